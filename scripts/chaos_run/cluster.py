"""All nodes of a run: made, started, waited for, and the record of what was done to them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
from localcluster import free_ports

from chaos_run.engines import Engines
from chaos_run.leaks import files_of
from chaos_run.network import Network
from chaos_run.node import ROOT, ChaosNode, Trouble
from node.addresses import DEFAULT_PORT, join_address
from node.settings import make_settings

ADMIN_TOKEN = "chaos"
STOP_GRACE_S = 20.0
_LOOK_S = 0.2


def names(size: int) -> list[str]:
    """The names of nodes."""
    return [f"n{number:02d}" for number in range(size)]


class NotReady(Exception):
    """A node did not come up; the message has its last lines."""


class Cluster:
    """The nodes."""

    def __init__(self, size: int, folder: Path, network: Network, engines: Engines) -> None:
        self.kind = engines
        self.network = network
        self.folder = folder
        self.troubles: list[Trouble] = []
        #: Descriptors that are no sockets, of each node when it became ready.
        self.files: dict[str, int] = {}
        ports = free_ports(size) if network.no_cuts else [DEFAULT_PORT] * size
        key = secrets.token_hex(16)
        self.nodes = {name: self._node(name, number, ports[number], key) for number, name in enumerate(names(size))}

    def _node(self, name: str, number: int, port: int, key: str) -> ChaosNode:
        kind = self.kind
        own = kind.options(self.folder / f"{name}.journal")
        options = ("--no-mdns", "--cluster", "chaos", "--stop-grace-s", str(STOP_GRACE_S), *own)
        env = {
            "GRAPEVINE_STATE_DIR": str(self.folder / "state"),
            "GRAPEVINE_RUN_DIR": str(self.folder / "run"),
            "GRAPEVINE_ADMIN_TOKEN": ADMIN_TOKEN,
            "GRAPEVINE_CLUSTER_KEY": key,
            "PYTHONPATH": str(ROOT),
        }
        prefix = self.network.prefix(number)
        return ChaosNode(
            name, number, self.network.host(number), port, self.folder, prefix, options, kind.arguments, env
        )

    async def start(self, name: str) -> None:
        """Start one node, joined to some of the others."""
        seeds = [join_address(*node.gossip) for node in self.nodes.values() if node.name != name][:5]
        await self.nodes[name].start(seeds)

    async def start_all(self, session: aiohttp.ClientSession) -> None:
        """Start all and wait until each sees all ready. Raises `NotReady`."""
        for name in self.nodes:
            await self.start(name)
        async with _limit(self.kind.all_ready_s, self.nodes.values()):
            for name in self.nodes:
                await self._until(session, name, set(self.nodes))
        self.files = {name: files_of(node) for name, node in self.nodes.items()}

    async def wait_ready(self, session: aiohttp.ClientSession, name: str) -> None:
        """Until a node that was started again has its own engine ready. Raises `NotReady`."""
        async with _limit(self.kind.one_ready_s, [self.nodes[name]]):
            await self._until(session, name, {name})

    async def all_ready(self, session: aiohttp.ClientSession) -> None:
        """Until each node sees all ready again. Raises `NotReady`."""
        async with _limit(self.kind.all_ready_s, self.nodes.values()):
            for name in self.nodes:
                await self._until(session, name, set(self.nodes))

    async def _until(self, session: aiohttp.ClientSession, name: str, wanted: set[str]) -> None:
        node, timeout = self.nodes[name], aiohttp.ClientTimeout(total=2.0)
        while True:
            if not node.running:
                raise NotReady(f"{name} has ended:\n{node.tail()}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                async with session.get(node.url + "/readyz", timeout=timeout) as answer:
                    if wanted <= set((await answer.json())["nodes"]):
                        return
            await asyncio.sleep(_LOOK_S)

    async def stop_all(self) -> list[str]:
        """Stop all at once; returns the names of those that did not end well by themselves."""
        nodes = list(self.nodes.values())
        ended = await asyncio.gather(*(node.stop(STOP_GRACE_S) for node in nodes))
        return [f"{node.name} did not end by itself" for node, good in zip(nodes, ended, strict=True) if not good]

    async def clear_away(self) -> None:
        """End whatever still runs, at once, and remove the pools: they are kept for a next start that does not come."""
        for node in self.nodes.values():
            if node.process is not None and node.running:
                with contextlib.suppress(ProcessLookupError):
                    node.process.kill()
                await node.process.wait()
            settings = make_settings(name=node.name, run_dir=self.folder / "run", state_dir=self.folder / "state")
            settings.pool_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def trouble(self, what: str, *names: str, excuses: bool = True) -> Iterator[None]:
        """Record that something was away while the block ran (`excuses`: and could not be told anything)."""
        begun = time.monotonic()
        first = len(self.troubles)
        self.troubles += [Trouble(what, name, begun, excuses=excuses) for name in names]
        marks = self.troubles[first:]
        try:
            yield
        finally:
            ended = time.monotonic()
            self.troubles = [replace(item, ended=ended) if item in marks else item for item in self.troubles]

    def engines(self) -> dict[str, psutil.Process]:
        """The engines that run."""
        return {name: engine for name, node in self.nodes.items() if (engine := node.engine()) is not None}


@contextlib.asynccontextmanager
async def _limit(seconds: float, nodes: Iterable[ChaosNode]) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        tails = "\n".join(f"--- {node.name}\n{node.tail()}" for node in nodes)
        raise NotReady(f"not ready within {seconds:.0f} s\n{tails}") from None
