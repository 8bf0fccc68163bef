"""An engine that requests of the bench `fit` are sent to: one of our own with a small model, or any that is there."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from localcluster import LocalCluster

from benches.child import PACKAGES
from benches.fit_load import Ask
from node.emulator.config import SMOLLM2_CPU, EngineConfig
from node.emulator.fitting import Seen
from node.emulator.job import Job
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.emulator.tokens import block_hashes, pack

#: Limits that our own engine is started with; vLLM does not tell them afterwards.
BATCHED_TOKENS, SEQUENCES, CONTEXT = 2048, 128, 4096
#: Seconds that one answer may take.
PATIENCE_S = 300.0
EMULATED = "emulated"
_BLOCK_SIZE, _BLOCKS = (
    re.compile(rf'cache_config_info\{{.*?\b{name}="(\d+)"') for name in ("block_size", "num_gpu_blocks")
)


@dataclass(slots=True)
class Engine:
    """Sends token ids and takes the times. `speedup`: seconds of the engine's own time in one of ours."""

    session: aiohttp.ClientSession
    base: str
    model: str
    block_size: int
    speedup: float = 1.0
    sent: int = 0

    async def groups(self, groups: Sequence[Sequence[Ask]], start: float) -> list[Seen]:
        """Each group at once, when the one before it is done."""
        return [seen for group in groups for seen in await asyncio.gather(*(self.ask(ask, start) for ask in group))]

    async def open_loop(self, asks: Sequence[Ask], moments: Sequence[float], start: float) -> list[Seen]:
        """Each at its moment, done or not what came before."""
        began = time.perf_counter()

        async def at(ask: Ask, moment: float) -> Seen:
            await asyncio.sleep(began + moment / self.speedup - time.perf_counter())
            return await self.ask(ask, start)

        return await asyncio.gather(*(at(ask, moment) for ask, moment in zip(asks, moments, strict=True)))

    async def ask(self, ask: Ask, start: float) -> Seen:
        """One request; `start` is when the engine's time began. Raises RuntimeError when it is not answered whole."""
        body = {
            "model": self.model, "prompt": ask.prompt, "max_tokens": ask.answer, "min_tokens": ask.answer,
            "ignore_eos": True, "temperature": 0, "stream": True,
        }  # fmt: skip
        self.sent += 1
        job = Job(f"r{self.sent}", len(ask.prompt), ask.answer, block_hashes(pack(ask.prompt), self.block_size))
        began = time.perf_counter()
        first, tail = 0.0, b""
        async with asyncio.timeout(PATIENCE_S), self.session.post(f"{self.base}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"the engine answers {answer.status}: {(await answer.text())[:500]}")
            async for piece in answer.content.iter_any():
                first = first or time.perf_counter()
                tail = (tail + piece)[-32:]
        ended = time.perf_counter()
        if not tail.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"an answer ends in the middle: {tail!r}")
        return Seen(job, (began - start) * self.speedup, (first - began) * self.speedup, (ended - began) * self.speedup)


@contextlib.asynccontextmanager
async def small_model() -> AsyncIterator[tuple[Engine, EngineConfig]]:
    """vLLM with SmolLM2-135M, as a node starts and supervises it; asked at its own socket, past the node."""
    with tempfile.TemporaryDirectory(prefix="gvf") as folder:
        flags = (
            "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEQUENCES),
            "--max-num-batched-tokens", str(BATCHED_TOKENS),
        )  # fmt: skip
        run = Path(folder) / "run"
        env = {"PYTHONPATH": PACKAGES, "GRAPEVINE_RUN_DIR": str(run)}
        cluster = LocalCluster(Path(folder), ("fit",), args=("--no-mdns", "--no-kv"), engine_args=flags, env=env)
        try:
            await cluster.start_all()
            async with aiohttp.ClientSession() as session:
                await cluster.wait_ready(session)
            connector = aiohttp.UnixConnector(path=str(run / "fit.engine"))
            async with aiohttp.ClientSession(connector=connector) as session:
                yield await _known(session, "http://engine")
        finally:
            await cluster.stop_all()


@contextlib.asynccontextmanager
async def there(url: str, key: str) -> AsyncIterator[tuple[Engine, EngineConfig]]:
    """A vLLM server that somebody else started."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield await _known(session, url.rstrip("/").removesuffix("/v1"))


@contextlib.asynccontextmanager
async def emulated(config: EngineConfig, speedup: float) -> AsyncIterator[Engine]:
    """An emulated engine behind HTTP, in this process."""
    options = ServeOptions(models=(EMULATED,), speedup=speedup)
    async with EmulatedServer(config, options) as server, aiohttp.ClientSession() as session:
        yield Engine(session, f"http://127.0.0.1:{server.port}", EMULATED, config.block_size, speedup)


async def _known(session: aiohttp.ClientSession, base: str) -> tuple[Engine, EngineConfig]:
    """The engine, and its limits as far as it tells them."""
    async with session.get(f"{base}/v1/models") as answer:
        card = (await answer.json())["data"][0]
    async with session.get(f"{base}/metrics") as answer:
        page = await answer.text()
    size, blocks = _BLOCK_SIZE.search(page), _BLOCKS.search(page)
    if size is None or blocks is None:
        raise RuntimeError(f"{base}/metrics has no vllm:cache_config_info: is this vLLM?")
    config = replace(
        SMOLLM2_CPU,
        block_size=int(size[1]),
        kv_tokens=int(size[1]) * int(blocks[1]),
        max_model_len=int(card["max_model_len"]),
        max_num_seqs=SEQUENCES,
        step_tokens=BATCHED_TOKENS,
    )
    return Engine(session, base, str(card["id"]), config.block_size), config
