"""A node as a process of its own: what it prints, serves, and leaves behind, attached to an engine over TCP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.node.fakes.client import ask
from tests.node.fakes.engine import FakeEngine
from tests.node.http.bodies import CHAT, chat

_RUN = """
import json, sys
from node.app import run
from node.settings import make_settings
sys.exit(run(make_settings(**json.loads(sys.argv[1]))))
"""
START_S = 120.0
NAME = f"p{os.getpid()}"


class Process:
    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.name = NAME
        self.lines: list[str] = []

    async def until(self, text: str) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError("".join(self.lines))

    async def end(self) -> int:
        async with asyncio.timeout(START_S):
            return await self.process.wait()


@asynccontextmanager
async def node_process(
    folder: Path, *, stdin: int = asyncio.subprocess.DEVNULL, **settings: object
) -> AsyncIterator[Process]:
    given = {
        "name": NAME,
        "port": 0,
        "gossip_port": 0,
        "kv_port": 0,
        "mdns": False,
        "kv_pool_gib": 0.01,
        "state_dir": str(folder / "state"),
        "run_dir": str(folder / "run"),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _RUN,
        json.dumps(given | settings),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[3],
    )
    try:
        yield Process(process, folder)
    finally:
        if process.returncode is None:
            process.terminate()  # kill would leave its pool behind, as it should
            await asyncio.wait_for(process.wait(), START_S)
        process._transport.close()  # type: ignore[attr-defined]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="gv") as folder:
        running = await FakeEngine(Path(folder) / "engine").start(tcp=True)
        yield running
        await running.close()


def port_of(line: str) -> int:
    return int(line.split("http://127.0.0.1:")[1].split("/", maxsplit=1)[0])


def pools(name: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"grapevine-*-{name}-*.kv"))


def leftovers(folder: Path) -> list[Path]:
    return [*folder.glob("run/*.link"), *folder.glob("run/*.engine"), *folder.glob("state/running/*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_node_serves_says_so_and_leaves_nothing_behind(engine: FakeEngine, number: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gv") as folder:
        async with node_process(Path(folder), engine_url=engine.url) as node:
            port = port_of(await node.until("API"))
            await node.until("WARNING  no cluster key")
            assert "--join 127.0.0.1:" in "".join(node.lines)
            await node.until("the engine is ready and serves m")
            answer = await ask(port, "POST", CHAT, (), chat())
            assert answer.status == 200 and answer.one("x-grapevine-target") == node.name
            state = json.loads((await ask(port, "GET", "/gossip/state")).body)
            assert state["kv"]["enabled"] and state["members"][0]["load"]["ready"]
            assert pools(node.name)
            node.process.send_signal(number)
            assert await node.end() == 0
            await node.until("has stopped")
        assert not pools(node.name) and not leftovers(Path(folder))


async def test_a_node_that_cannot_start_says_why_in_one_line(engine: FakeEngine) -> None:
    with tempfile.TemporaryDirectory(prefix="gv") as folder:
        async with node_process(Path(folder), engine_url=engine.url) as first:
            port = port_of(await first.until("API"))
            async with node_process(Path(folder), engine_url=engine.url, name="q", port=port) as second:
                line = await second.until("cannot start")
                assert str(port) in line and "taken" in line
                assert await second.end() == 1
            async with node_process(Path(folder), engine_url=engine.url) as third:
                assert "already runs" in await third.until("cannot start")
                assert await third.end() == 1


async def test_a_service_reads_its_files_again_at_a_hangup(engine: FakeEngine) -> None:
    with tempfile.TemporaryDirectory(prefix="gv") as folder:
        clients = Path(folder) / "clients"
        clients.touch()
        async with node_process(Path(folder), engine_url=engine.url, clients_file=str(clients)) as node:
            port = port_of(await node.until("API"))
            node.process.send_signal(signal.SIGHUP)
            told = json.loads(await node.until("read again"))
            assert (told["message"], told["node"]) == ("clients: read again", node.name)
            assert (await ask(port, "GET", "/healthz")).status == 200


async def test_a_node_ends_with_its_terminal(engine: FakeEngine) -> None:
    ours, its = os.openpty()
    try:
        with tempfile.TemporaryDirectory(prefix="gv") as folder:
            async with node_process(Path(folder), stdin=its, engine_url=engine.url) as node:
                await node.until("API")
                node.process.send_signal(signal.SIGHUP)
                assert await node.end() == 0
    finally:
        os.close(ours)
        os.close(its)
