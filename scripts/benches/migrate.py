"""KV migration with real engines: time to first token cold, local and pulled, and what the connector costs.

Three nodes with SmolLM2-135M: a holder, a puller, and one without a pool (`--no-kv`). Each prompt is new, so `cold` is
a whole prefill; `local` is the same prompt again at its holder, `pulled` the holder's blocks fetched by the puller.
Before each of them all engines rest: the processes of a vLLM spin for a second after their last message, and engines
that are hosts apart in the real world would take the cores from the one that is measured.
Throughput: prompts that nobody shares, at the holder (connector on, nothing to migrate) and at the node without a pool,
in turns: each round asks one, then the other, and the next round the other way round. The holder saves what it computes
as it always does, two blocks of each prompt at the block size of CPUs. Two engines with the same settings differ by
some 3 % from one start to the next, so all of it is done with several starts.

A second, larger model has the shape of SmolLM2-360M and random weights (`randommodel`): the times and the bytes are
those of a model of that size, what it says is not looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import randommodel
from localcluster import LocalCluster

from benches.result import Result, say

TARGETS = {
    "pulled_over_cold_n3500": ("<=", 0.08),
    "pulled_over_local_n3500": ("<=", 1.5),
    "larger_pulled_over_cold_n3500": ("<=", 0.08),
    "larger_pulled_over_local_n3500": ("<=", 1.5),
    "throughput_with_connector": (">=", 0.98),
}
PARTS = ("ttft", "throughput", "larger")
MODEL = "SmolLM2-135M-Instruct"
LARGER = "larger"
HOLDER, PULLER, PLAIN = "holder", "puller", "plain"
WORDS = (
    "anchor", "barley", "candle", "dune", "ember", "ferry", "garden", "harbour", "island", "juniper", "kettle",
    "lantern", "meadow", "needle", "orchard", "pepper", "quarry", "river", "saddle", "timber", "umbrella", "valley",
    "willow", "yarrow",
)  # fmt: skip
#: Answers are short where the first token counts, longer where the throughput does.
FIRST_TOKENS = 4
LOAD_REQUESTS, LOAD_AT_A_TIME, LOAD_WORDS, LOAD_TOKENS = 12, 6, 240, 48
PATIENCE_S = 20.0
#: vLLM's `SpinCondition.busy_loop_s` is 1 s.
REST_S = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what to measure ({','.join(PARTS)})")
    parser.add_argument("--tokens", default="512,1000,2000,3500,7800", help="prompt lengths (512,1000,2000,3500,7800)")
    parser.add_argument("--larger-tokens", default="1000,3500", help="prompt lengths of the larger model (1000,3500)")
    parser.add_argument("--repeats", type=int, default=3, help="prompts per length (3)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the throughput, per node and start (12)")
    parser.add_argument("--starts", type=int, default=4, help="starts of the engines for the throughput (4)")
    parser.add_argument("--rest", type=float, default=REST_S, help=f"seconds of rest before each request ({REST_S})")
    parser.add_argument("--dtype", default="auto", help="of the engines: auto is bfloat16, float32 is slower (auto)")


def run(options: argparse.Namespace) -> Result:
    """Measure everything. The engines of one part need about a minute to start on two cores."""
    result = Result("migrate", TARGETS)
    asyncio.run(_parts(result, options))
    result.note(f"engines: {MODEL}, dtype {options.dtype}, on this machine; the others idle while one is measured")
    result.note(f"{options.rest} s of rest before each request, so that no engine spins that is not asked")
    result.note("sizes are prompt tokens as the engine counts them, to within a few per cent")
    if LARGER in options.parts.split(","):
        result.note("larger: random weights in the shape of SmolLM2-360M (32 layers, 960 wide, 5 KV heads)")
    return result


async def _parts(result: Result, options: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # or the nodes would stay behind
    parts = options.parts.split(",")
    repeats, rounds, starts = (1, 1, 1) if options.quick else (options.repeats, options.rounds, options.starts)
    lengths, larger = (_lengths(text, options.quick) for text in (options.tokens, options.larger_tokens))
    engine = ("--dtype", options.dtype)
    if "ttft" in parts:
        async with _cluster((HOLDER, PULLER), engine, max(lengths)) as client:
            await _first_tokens(result, client, lengths, repeats, rest_s=options.rest)
    if "throughput" in parts:
        await _throughput(result, engine, starts, rounds, rest_s=options.rest)
    if LARGER in parts:
        with tempfile.TemporaryDirectory() as name:
            model = randommodel.make_model(Path(name) / LARGER, randommodel.LARGER)
            async with _cluster((HOLDER, PULLER), (*engine, *randommodel.ENGINE_ARGS), max(larger), model) as client:
                await _first_tokens(result, client, larger, repeats, rest_s=options.rest, prefix=f"{LARGER}_")


def _lengths(text: str, quick: bool) -> list[int]:
    lengths = [int(length) for length in text.split(",")]
    return [min(lengths, key=lambda length: abs(length - 3500))] if quick else lengths


async def _first_tokens(
    result: Result, client: _Client, lengths: list[int], repeats: int, *, rest_s: float, prefix: str = ""
) -> None:
    scale = await client.words_per_token()
    seeds = itertools.count(1)
    for length in lengths:
        rows = [await client.one(next(seeds), int(length * scale), rest_s) for _ in range(repeats)]
        cold, local, pulled = (statistics.median(row[place] for row in rows) for place in range(3))
        suffix = f"n{length}"
        result.add(f"{prefix}ttft_cold_s_{suffix}", cold)
        result.add(f"{prefix}ttft_local_s_{suffix}", local)
        result.add(f"{prefix}ttft_pulled_s_{suffix}", pulled)
        result.add(f"{prefix}pulled_over_cold_{suffix}", statistics.median(row[2] / row[0] for row in rows))
        result.add(f"{prefix}pulled_over_local_{suffix}", statistics.median(row[2] / row[1] for row in rows))


async def _throughput(result: Result, engine: tuple[str, ...], starts: int, rounds: int, *, rest_s: float) -> None:
    rates: list[tuple[float, float]] = []  # with, without
    saved = 0
    medians = []
    for _ in range(starts):
        async with _cluster((HOLDER, PLAIN), engine, 1000) as client:
            new = [await client.pair(turn, rest_s) for turn in range(-1, rounds)][1:]
            saved += await client.saved_blocks()
        rates += new
        medians.append(statistics.median(ours / theirs for ours, theirs in new))
        say(f"    this start: {medians[-1]:.3f}")
    result.add("throughput_with_connector", statistics.median(ours / theirs for ours, theirs in rates))
    result.add("throughput_spread_of_starts", max(medians) - min(medians))
    result.add("throughput_tokens_s", statistics.median(ours for ours, _ in rates))
    result.add("throughput_saved_blocks", saved)


@contextlib.asynccontextmanager
async def _cluster(
    names: tuple[str, ...], engine: tuple[str, ...], longest: int, model: Path | None = None
) -> AsyncIterator[_Client]:
    flags = (*engine, "--max-model-len", str(4096 if longest <= 3900 else 8192), "--enforce-eager")
    with tempfile.TemporaryDirectory() as workdir:
        cluster = LocalCluster(Path(workdir), names, args=("--no-mdns", "--cluster", "bench"), engine_args=flags)
        for name, node in cluster.nodes.items():
            node.args = (*node.args, *(("--no-kv",) if name == PLAIN else ("--kv-pool-gib", "2")))
            node.args = (*node.args, *(("--model", str(model)) if model is not None else ()))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            try:
                await cluster.start_all()
                await cluster.wait_ready(session)
                say("  engines are ready")
                yield _Client(cluster, session, MODEL if model is None else model.name)
            finally:
                await cluster.stop_all()


class _Client:
    """Asks nodes by name; nothing is routed elsewhere."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession, model: str) -> None:
        self._cluster = cluster
        self._session = session
        self._model = model

    async def words_per_token(self) -> float:
        """How many words of our prose make a token."""
        text = _prose(0, 500)
        async with self._session.post(self._cluster[HOLDER].url + "/tokenize", json={"prompt": text}) as answer:
            return 500 / int((await answer.json())["count"])

    async def one(self, seed: int, words: int, rest_s: float) -> tuple[float, float, float]:
        """Seconds to the first token of a prompt: cold, local, pulled. Raises when a pull brought nothing."""
        other, prompt = _prose(2 * seed, words), _prose(2 * seed + 1, words)
        await asyncio.sleep(rest_s)
        cold, _ = await self._first(PULLER, other, {"x-grapevine-no-pull": "1"})
        await self._first(HOLDER, prompt, {"x-grapevine-no-pull": "1"})
        await asyncio.sleep(rest_s)
        local, _ = await self._first(HOLDER, prompt, {"x-grapevine-no-pull": "1"})
        await self._heard(prompt)
        await asyncio.sleep(rest_s)
        pulled, headers = await self._first(PULLER, prompt, {"x-grapevine-force-source": HOLDER})
        blocks = int(headers.get("x-grapevine-pulled-blocks", "0"))
        if not blocks:
            raise RuntimeError(f"nothing was pulled: {dict(headers)}\n{self._cluster[PULLER].tail()}")
        say(f"    {words} words: cold {cold:.3f}, local {local:.3f}, pulled {pulled:.3f} s ({blocks} blocks)")
        return cold, local, pulled

    async def pair(self, turn: int, rest_s: float) -> tuple[float, float]:
        """Tokens of answers a second with the connector and without; who is asked first alternates."""
        rate = {}
        for name in (HOLDER, PLAIN) if turn % 2 == 0 else (PLAIN, HOLDER):
            await asyncio.sleep(rest_s)
            rate[name] = await self.load(name, 2 * (turn + 1) + (name == PLAIN))
        say(f"    with {rate[HOLDER]:.1f}, without {rate[PLAIN]:.1f} tokens/s")
        return rate[HOLDER], rate[PLAIN]

    async def saved_blocks(self) -> int:
        """Blocks that the holder has put into its pool since its start. Raises when there are none."""
        async with self._session.get(self._cluster[HOLDER].url + "/gossip/state") as answer:
            blocks = int((await answer.json())["kv"]["pool"]["commits"])
        if not blocks:
            raise RuntimeError("the holder saved no block: this is not what the connector costs")
        return blocks

    async def load(self, name: str, seed: int) -> float:
        """Tokens of answers a second, for prompts that nobody shares."""
        turns = asyncio.Semaphore(LOAD_AT_A_TIME)

        async def ask(number: int) -> int:
            async with turns:
                body = {
                    "prompt": _prose(1_000_000 + 1000 * seed + number, LOAD_WORDS),
                    "max_tokens": LOAD_TOKENS,
                    "ignore_eos": True,
                }
                answer = await self._post(name, body, {})
                return int(answer["usage"]["completion_tokens"])

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(ask(number) for number in range(LOAD_REQUESTS))))
        return tokens / (time.perf_counter() - started)

    async def _first(self, name: str, prompt: str, headers: Mapping[str, str]) -> tuple[float, Mapping[str, str]]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": FIRST_TOKENS, "temperature": 0, "stream": True}
        forced = {"x-grapevine-force-target": name, **headers}
        started = time.perf_counter()
        url = self._cluster[name].url + "/v1/completions"
        async with self._session.post(url, json=body, headers=forced) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            first = None
            async for line in answer.content:
                # Random weights may begin with a token that is no text.
                if first is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    first = time.perf_counter() - started
            if first is None:
                raise RuntimeError("an answer without a token")
            return first, answer.headers

    async def _heard(self, prompt: str) -> None:
        """Wait until the puller has heard that the holder has the prompt."""
        body = {"model": self._model, "prompt": prompt}
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self._session.post(self._cluster[PULLER].url + "/route/explain", json=body) as answer:
                    if (await answer.json())["matched_chunks"].get(HOLDER):
                        return
                await asyncio.sleep(0.05)

    async def _post(self, name: str, body: Mapping[str, object], headers: Mapping[str, str]) -> Any:
        url = self._cluster[name].url + "/v1/completions"
        forced = {"x-grapevine-force-target": name, "x-grapevine-no-pull": "1", **headers}
        async with self._session.post(url, json={"model": self._model, **body}, headers=forced) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            return await answer.json()


def _prose(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))
