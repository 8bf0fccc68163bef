"""Nodes as processes, each with an emulated engine of its own: what a bench of the whole way needs, without a GPU."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from localcluster import GRAPEVINE, LocalCluster, free_ports

from benches.child import PACKAGES
from node.settings import GIB

#: Seconds for all nodes to see each other ready, and for a process to end.
READY_LIMIT_S = 150.0
STOP_LIMIT_S = 10.0
POLL_S = 0.1
MODEL = "demo"
#: Folder of the nodes' sockets, beside the engines' logs.
RUN = "run"
#: A pool's books, bytes a block, and the least pool that a node takes.
BLOCK_BOOKS = 4096 + 64
LEAST_POOL_GIB = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the cluster is like."""

    nodes: int
    #: Requests that an engine computes at once, and that its node takes.
    places: int
    #: Virtual seconds per second of the engines.
    speedup: float
    node_args: Sequence[str] = ()
    engine_args: Sequence[str] = ()
    #: Blocks that each node's pool holds, and bytes of one; no blocks: the nodes have no pool.
    pool_blocks: int = 0
    block_bytes: int = 4096


@dataclass(frozen=True, slots=True)
class Engines:
    """Emulated engines that run: base URLs and process ids, and where each looks for the link of its node."""

    urls: list[str]
    pids: list[int]
    run_dir: Path

    @property
    def names(self) -> list[str]:
        """Of the nodes before them."""
        return [_name(index) for index in range(len(self.urls))]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes that run and see each other ready: base URLs and process ids."""

    urls: list[str]
    pids: list[int]


@asynccontextmanager
async def emulated_cluster(sizes: Sizes) -> AsyncIterator[list[str]]:
    """Start engines and nodes; gives the base URL of each node. Everything ends with the block."""
    async with emulated_engines(sizes) as engines, nodes_before(engines, sizes) as nodes:
        yield nodes.urls


@asynccontextmanager
async def emulated_engines(sizes: Sizes) -> AsyncIterator[Engines]:
    """Start the engines alone, and wait until they answer."""
    with TemporaryDirectory(prefix="gvb") as folder:
        ports = free_ports(sizes.nodes)
        started: list[asyncio.subprocess.Process] = []
        try:
            for index, port in enumerate(ports):
                engine = await _engine(port, sizes, Path(folder), _name(index))
                started.append(engine)
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            async with aiohttp.ClientSession() as session, asyncio.timeout(READY_LIMIT_S):
                await asyncio.gather(*(_answers(session, url) for url in urls))
            yield Engines(urls, [process.pid for process in started], Path(folder) / RUN)
        finally:
            await asyncio.gather(*(_end(engine) for engine in started))


@asynccontextmanager
async def nodes_before(engines: Engines, sizes: Sizes) -> AsyncIterator[Nodes]:
    """A node before each engine."""
    with TemporaryDirectory(prefix="gvb") as folder:
        names = engines.names
        environment = _environment(engines.run_dir)
        cluster = LocalCluster(Path(folder), names, ports=free_ports(len(names)), env=environment)
        for node, url in zip(cluster.nodes.values(), engines.urls, strict=True):
            node.args = (
                "--engine-url", url, "--no-mdns", *_pool(sizes),
                "--max-running", str(sizes.places), "--log-level", "warning", *sizes.node_args,
            )  # fmt: skip
        try:
            await cluster.start_all()
            async with aiohttp.ClientSession() as session:
                await cluster.wait_ready(session, limit_s=READY_LIMIT_S)
                nodes = cluster.nodes.values()
                urls = [node.url for node in nodes]
                if sizes.pool_blocks:
                    async with asyncio.timeout(READY_LIMIT_S):
                        await asyncio.gather(*(_exchanges(session, url, len(urls)) for url in urls))
            yield Nodes(urls, [node.process.pid for node in nodes if node.process is not None])
        finally:
            await cluster.stop_all()


def _name(index: int) -> str:
    return f"n{index + 1}"


def _pool(sizes: Sizes) -> tuple[str, ...]:
    if not sizes.pool_blocks:
        return ("--no-kv",)
    return ("--kv-pool-gib", f"{max(LEAST_POOL_GIB, sizes.pool_blocks * (sizes.block_bytes + BLOCK_BOOKS) / GIB):.4f}")


def _environment(run_dir: Path) -> dict[str, str]:
    """The packages that this bench has itself; and a short place for sockets."""
    return {"PYTHONPATH": PACKAGES, "GRAPEVINE_RUN_DIR": str(run_dir)}


async def _engine(port: int, sizes: Sizes, folder: Path, name: str) -> asyncio.subprocess.Process:
    run_dir = folder / RUN
    command = [
        "emulate", "--preset", "8b-gpu", "--served-model-name", MODEL, "--port", str(port),
        "--speedup", f"{sizes.speedup:.6g}", "--max-num-seqs", str(sizes.places),
        "--link-socket", str(run_dir / f"{name}.link"), "--kv-block-bytes", str(sizes.block_bytes), *sizes.engine_args,
    ]  # fmt: skip
    with (folder / f"engine-{port}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            GRAPEVINE,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **_environment(run_dir)},
        )


async def _answers(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(POLL_S)


async def _exchanges(session: aiohttp.ClientSession, url: str, nodes: int) -> None:
    """Until this node knows all nodes' fingerprints: before, it can pull from nobody and does not know what they hold.

    The engines' links connect some time after the nodes are ready, which take requests without.
    """
    while True:
        async with session.get(f"{url}/gossip/state") as answer:
            members = (await answer.json())["members"]
        if sum(bool(member["fingerprints"].get(MODEL)) for member in members) == nodes:
            return
        await asyncio.sleep(POLL_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
