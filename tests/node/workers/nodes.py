"""Nodes with workers, for tests: in this process with their workers beside it, or as a user starts them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from node.workers.front import Front
from node.workers.process import WorkerProcess
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawClient, ask, connect
from tests.node.fakes.cluster import Cluster, Member, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
FORCE = "x-grapevine-force-target"


def front_of(member: Member) -> Front:
    front = member.node._http
    assert isinstance(front, Front)
    return front


async def complete(member: Member) -> tuple[WorkerProcess, ...]:
    """Wait until every worker serves."""
    async with asyncio.timeout(PATIENCE_S):
        for worker in front_of(member).workers:
            await worker.ready.wait()
    return front_of(member).workers


@asynccontextmanager
async def worked(count: int = 1, **settings: Any) -> AsyncIterator[Cluster]:
    """Nodes with two workers each, all of which serve."""
    async with cluster() as nodes:
        nodes.defaults = {"workers": 2}
        for index in range(count):
            await complete(await nodes.add("abcdefgh"[index], **settings))
        await nodes.agree()
        yield nodes


def alive(pid: int) -> bool:
    """Whether a process lives; one that waits to be reaped does not."""
    with suppress(OSError):
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def metric(port: int, name: str) -> float:
    """A figure of /metrics; 0 where it is not there yet."""
    page = (await ask(port, "GET", "/metrics")).body.decode()
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)


@asynccontextmanager
async def started(folder: Path, engine: str, port: int, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A node with two workers as a user starts it; killed in the end, if it still lives."""
    command = [sys.executable, "-c", "from node.cli import main; main()", "start", "--name", "w", "--port", str(port)]
    command += ["--engine-url", engine, "--workers", "2", "--no-mdns", "--no-kv", "--gossip-port", "0"]
    command += ["--state-dir", str(folder / "state"), "--run-dir", str(folder / "run"), "--log-format", "json"]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | variables,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def serving(port: int) -> None:
    """Wait until a node answers chats."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                if b'"id"' in (await ask(port, "GET", "/v1/models")).body:
                    return
            await asyncio.sleep(0.05)


async def connected(stack: AsyncExitStack, port: int, count: int) -> list[RawClient]:
    return [await stack.enter_async_context(connect("127.0.0.1", port)) for _ in range(count)]


async def streaming(client: RawClient, gate: Gate, *headers: tuple[str, str]) -> AsyncIterator[bytes]:
    """Begin a stream; its pieces, the first of which has come."""
    await client.send("POST", CHAT, headers, chat(stream=True))
    gate.open()
    head = await client.head()
    assert head.status == 200
    pieces = client.pieces(head)
    assert await anext(pieces) == fake.sse("one")
    return pieces
