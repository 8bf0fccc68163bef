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

#: Seconds for all nodes to see each other ready, and for a process to end.
READY_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
MODEL = "demo"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the cluster is like."""

    nodes: int
    #: Requests that an engine computes at once, and that its node takes.
    places: int
    #: Virtual seconds per second of the engines.
    speedup: float
    node_args: Sequence[str] = ()


@asynccontextmanager
async def emulated_cluster(sizes: Sizes) -> AsyncIterator[list[str]]:
    """Start it; gives the base URL of each node. Everything ends with the block."""
    names = [f"n{index + 1}" for index in range(sizes.nodes)]
    with TemporaryDirectory(prefix="gvb") as folder:
        ports = free_ports(2 * sizes.nodes)
        cluster = LocalCluster(Path(folder), names, ports=ports[: sizes.nodes], env=_environment(folder))
        engines = [await _engine(port, sizes, Path(folder)) for port in ports[sizes.nodes :]]
        try:
            for node, port in zip(cluster.nodes.values(), ports[sizes.nodes :], strict=True):
                node.args = (
                    "--engine-url", f"http://127.0.0.1:{port}", "--no-mdns", "--no-kv",
                    "--max-running", str(sizes.places), "--log-level", "warning", *sizes.node_args,
                )  # fmt: skip
            await cluster.start_all()
            async with aiohttp.ClientSession() as session:
                await cluster.wait_ready(session, limit_s=READY_LIMIT_S)
            yield [node.url for node in cluster.nodes.values()]
        finally:
            await cluster.stop_all()
            await asyncio.gather(*(_end(engine) for engine in engines))


def _environment(folder: str) -> dict[str, str]:
    """The sources that this bench belongs to, whatever is installed; and a short place for sockets."""
    return {"PYTHONPATH": str(Path(__file__).parents[2]), "GRAPEVINE_RUN_DIR": f"{folder}/run"}


async def _engine(port: int, sizes: Sizes, folder: Path) -> asyncio.subprocess.Process:
    command = [
        "emulate", "--preset", "8b-gpu", "--served-model-name", MODEL, "--port", str(port),
        "--speedup", str(sizes.speedup), "--max-num-seqs", str(sizes.places),
    ]  # fmt: skip
    with (folder / f"engine-{port}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            GRAPEVINE,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **_environment(str(folder))},
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
