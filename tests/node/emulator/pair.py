"""Two real nodes with emulated engines: attached by URL, linked as the connector would, KV pulled between them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from node.addresses import join_address
from node.assembly import Node
from node.chunks import CHUNK_BYTES
from node.emulator import EngineConfig, Timing
from node.emulator.serve.link import BLOCK_BYTES
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.settings import make_settings
from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import FAST_GOSSIP
from tests.waiting import PATIENCE_S

MODEL = "demo"
CONFIG = EngineConfig(
    name="t",
    timing=Timing(step_s=0.002, prefill_s=5e-4),
    block_size=16,
    kv_tokens=8192,
    step_tokens=512,
    max_model_len=4096,
)
POOL_GIB = 0.01
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

    async def send(self, entry: int, *headers: tuple[str, str], prompt: str = PROMPT) -> tuple[RawAnswer, str]:
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 24, "ignore_eos": True}).encode()
        answer = await ask(self.nodes[entry].http_port, "POST", "/v1/completions", list(headers), body)
        assert answer.status == 200, answer.body
        return answer, json.loads(answer.body)["choices"][0]["text"]


def _untold(name: str) -> dict[str, Any]:
    return {}


@asynccontextmanager
async def two_nodes(
    tmp_path: Path,
    more: Callable[[str], dict[str, Any]] = _untold,
    *,
    config: EngineConfig = CONFIG,
    linked: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> AsyncIterator[Pair]:
    """Started and agreed.

    ``more``: further arguments of a node by its name. ``linked``: the engines have a connector. The pools have
    ``POOL_GIB``, for blocks of ``block_bytes``.
    """
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        servers: list[EmulatedServer] = []
        for name in ("ann", "bob"):
            given = {"name": name, "port": 0, "gossip_port": 0, "kv_port": 0, "mdns": False, "stop_grace_s": 0.2}
            folders = {"state_dir": tmp_path / "state", "run_dir": tmp_path / "run", "kv_pool_gib": POOL_GIB}
            link = make_settings(**given, **folders).link_socket  # type: ignore[arg-type]
            options = ServeOptions(models=(MODEL,), link=link if linked else None, block_bytes=block_bytes)
            servers.append(await stack.enter_async_context(EmulatedServer(config, options)))
            seeds = tuple(join_address(*node.gossip.address) for node in nodes[:1])
            url = f"http://127.0.0.1:{servers[-1].port}"
            settings = make_settings(**given, **folders, engine_url=url, join=seeds)  # type: ignore[arg-type]
            node = Node(settings, gossip_config=FAST_GOSSIP, rng=random.Random(name), **more(name))
            await node.start()
            stack.push_async_callback(node.stop)
            nodes.append(node)
        both = Pair(nodes, servers)
        for node in nodes:
            await both.until(lambda node=node: node.registry.serving() == ["ann", "bob"])  # type: ignore[misc]
            if linked:
                await both.until(lambda node=node: node.kv.connected and node.registry.may_pull(MODEL))  # type: ignore[misc]
        yield both
        for server in servers:
            server.engine.validate()
            assert linked == (server.connector is not None)
            assert server.connector is None or server.connector.wrong == 0


def at(target: str, source: str = "") -> list[tuple[str, str]]:
    forced = [("x-grapevine-force-target", target)]
    return [*forced, ("x-grapevine-force-source", source)] if source else forced
