"""Two real nodes: a client's entry, whose own engine has another model, and the target that every request goes to."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.addresses import join_address
from node.assembly import Node
from node.emulator import EngineConfig, Timing
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.settings import make_settings
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import FAST_GOSSIP
from tests.waiting import PATIENCE_S

MODEL, OTHER = "demo", "other"
ENGINE = EngineConfig(
    name="t", timing=Timing(step_s=0.001, prefill_s=1e-5), block_size=16, kv_tokens=65_536, step_tokens=2048,
    max_model_len=4096,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The two, and the URL that a client is given."""

    entry: Node
    target: Node

    @property
    def port(self) -> int:
        return self.entry.http_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def decisions(self) -> list[dict[str, Any]]:
        """What the entry has decided, newest first."""
        told: list[dict[str, Any]] = json.loads((await ask(self.port, "GET", "/route/recent?limit=512")).body)[
            "decisions"
        ]
        return told


@asynccontextmanager
async def forwarded(folder: Path, **entry_settings: Any) -> AsyncIterator[Forwarded]:
    """Both ready, each known to the other."""
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for name, model, more in (("entry", OTHER, entry_settings), ("target", MODEL, {})):
            engine = await stack.enter_async_context(EmulatedServer(ENGINE, ServeOptions(models=(model,))))
            seeds = tuple(join_address(*node.gossip.address) for node in nodes)
            settings = make_settings(
                name=name, port=0, gossip_port=0, kv_port=0, mdns=False, kv=False, stop_grace_s=0.2, join=seeds,
                state_dir=folder / "state", run_dir=folder / "run",
                engine_url=f"http://127.0.0.1:{engine.port}", **more,
            )  # fmt: skip
            node = Node(settings, gossip_config=FAST_GOSSIP, rng=random.Random(name))
            await node.start()
            stack.push_async_callback(node.stop)
            nodes.append(node)
        pair = Forwarded(*nodes)
        changed = asyncio.Event()
        pair.entry.registry.subscribe(changed.set)
        async with asyncio.timeout(PATIENCE_S):
            while pair.entry.registry.serving() != ["entry", "target"]:
                changed.clear()
                await changed.wait()
        yield pair
