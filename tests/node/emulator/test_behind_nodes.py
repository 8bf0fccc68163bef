"""Emulated engines behind real nodes: attached by URL, linked as the connector would, KV pulled between them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from node.addresses import join_address
from node.assembly import Node
from node.chunks import CHUNK_BYTES
from node.emulator import EngineConfig, Timing
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.settings import make_settings
from tests.node.fakes.client import PATIENCE_S, RawAnswer, ask, connect
from tests.node.fakes.cluster import FAST_GOSSIP

MODEL = "demo"
CONFIG = EngineConfig(
    name="t",
    timing=Timing(step_s=0.002, prefill_s=2e-4),
    block_size=16,
    kv_tokens=8192,
    step_tokens=512,
    max_model_len=4096,
)
PROMPT = "Everything was in confusion in the house; the wife had found out. " * 60
CHUNKS = len(PROMPT) // CHUNK_BYTES


class Pair:
    """Two nodes and their engines."""

    def __init__(self, nodes: list[Node], servers: list[EmulatedServer]) -> None:
        self.nodes, self.servers = nodes, servers
        self._changed = asyncio.Event()
        for node in nodes:
            node.registry.subscribe(self._changed.set)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def send(self, entry: int, *headers: tuple[str, str]) -> tuple[RawAnswer, str]:
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}).encode()
        answer = await ask(self.nodes[entry].http_port, "POST", "/v1/completions", list(headers), body)
        assert answer.status == 200, answer.body
        return answer, json.loads(answer.body)["choices"][0]["text"]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        servers: list[EmulatedServer] = []
        for name in ("ann", "bob"):
            given = {"name": name, "port": 0, "gossip_port": 0, "kv_port": 0, "mdns": False, "stop_grace_s": 0.2}
            folders = {"state_dir": tmp_path / "state", "run_dir": tmp_path / "run", "kv_pool_gib": 0.01}
            link = make_settings(**given, **folders).link_socket  # type: ignore[arg-type]
            options = ServeOptions(models=(MODEL,), link=link)
            servers.append(await stack.enter_async_context(EmulatedServer(CONFIG, options)))
            seeds = tuple(join_address(*node.gossip.address) for node in nodes[:1])
            url = f"http://127.0.0.1:{servers[-1].port}"
            settings = make_settings(**given, **folders, engine_url=url, join=seeds)  # type: ignore[arg-type]
            node = Node(settings, gossip_config=FAST_GOSSIP, rng=random.Random(name))
            await node.start()
            stack.push_async_callback(node.stop)
            nodes.append(node)
        both = Pair(nodes, servers)
        for node in nodes:
            await both.until(lambda node=node: node.registry.serving() == ["ann", "bob"])  # type: ignore[misc]
            await both.until(lambda node=node: node.kv.connected and node.registry.may_pull(MODEL))  # type: ignore[misc]
        yield both
        for server in servers:
            server.engine.validate()
            assert server.connector is not None and server.connector.wrong == 0


def at(target: str, source: str = "") -> list[tuple[str, str]]:
    forced = [("x-grapevine-force-target", target)]
    return [*forced, ("x-grapevine-force-source", source)] if source else forced


async def test_kv_is_pulled_from_one_emulated_engine_to_the_other_and_the_answer_is_the_same(pair: Pair) -> None:
    bob = pair.nodes[1]
    _, cold = await pair.send(0, *at("ann"))
    await pair.until(lambda: bob.registry.roster.prefixes.count("ann") == CHUNKS)
    answer, pulled = await pair.send(0, *at("bob", "ann"))
    blocks = int(answer.one("x-grapevine-pulled-blocks") or 0)
    assert blocks > 20 and pulled == cold
    engine, connector = pair.servers[1].engine, pair.servers[1].connector
    assert connector is not None and connector.loaded == engine.counts.external_hit // 16
    assert engine.counts.external_hit >= (blocks - 3) * 16
    assert answer.one("x-grapevine-target") == "bob"


async def test_the_second_request_is_routed_to_the_holder_and_hits(pair: Pair) -> None:
    await pair.send(0, *at("bob"))
    await pair.until(lambda: pair.nodes[0].registry.roster.prefixes.count("bob") == CHUNKS)
    answer, _ = await pair.send(0, ("x-grapevine-no-pull", "1"))
    assert answer.one("x-grapevine-target") == "bob"
    assert (answer.one("x-grapevine-reason") or "").startswith("prefix")
    assert pair.servers[1].engine.counts.hit > 500


async def test_a_stream_that_moves_takes_its_kv_along(pair: Pair) -> None:
    """Its continuation is token ids, that no chunk stands for: the client's own chunks travel with it."""
    bob = pair.nodes[1]
    sent = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "stream": True}
    body = json.dumps({**sent, "return_token_ids": False}).encode()
    whole = text_of((await ask(bob.http_port, "POST", "/v1/completions", tuple(at("bob")), body)).body)
    await pair.until(lambda: bob.registry.roster.prefixes.count("bob") == CHUNKS)
    begun = pair.servers[0].engine.counts.prompt
    async with connect("127.0.0.1", bob.http_port) as client:
        await client.send("POST", "/v1/completions", tuple(at("bob")), body)
        assert (await client.head()).status == 200
        shown = await client.chunk()
        bob.drain(60)
        assert bob.handovers.move_all() == 1
        while piece := await client.chunk():
            shown += piece
    assert text_of(shown) == whole and b"error" not in shown
    assert bob.admission.active == 0
    connector, counts = pair.servers[0].connector, pair.servers[0].engine.counts
    assert connector is not None and connector.loaded > 20  # pulled from bob, that runs nothing any more
    assert counts.external_hit > (counts.prompt - begun) * 0.8
    assert b'cause="moved",result="carried"} 1.0' in bob.metrics.page()


def text_of(raw: bytes) -> str:
    events = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])
