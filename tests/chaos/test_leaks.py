"""A place, a lease, a pull that is not given back is found; an idle node has none."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from chaos_run import leaks
from chaos_run.node import WORKERS, ChaosNode

Worker = subprocess.Popen[bytes]
IDLE = "grapevine_active_requests 0.0\ngrapevine_queued_requests 0.0\n"


class Fake:
    """A node's surface, as quiet as the test says; its process is this one."""

    def __init__(self) -> None:
        self.metrics = IDLE
        self.state: dict[str, Any] = {
            "self": "a",
            "members": [{"name": "a", "load": {"running": 0, "waiting": 0, "queued_tokens": 0}}],
            "kv": {"pool": {"leases": 0}, "pulls": {"running": 0}},
        }
        self.port = 0

    async def serve(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text=self.metrics) if request.path == "/metrics" else web.json_response(self.state)

    async def look(self, files_before: int = 10_000) -> list[str]:
        node = ChaosNode("a", 0, "127.0.0.1", self.port, Path(), (), ())
        node.process = SimpleNamespace(pid=os.getpid(), returncode=None)  # type: ignore[assignment]
        async with aiohttp.ClientSession() as session:
            return await leaks.look(session, node, 1000, {"a": files_before})


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    made = Fake()
    runner = web.ServerRunner(web.Server(made.serve))
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    made.port = listener.getsockname()[1]
    yield made
    await runner.cleanup()


async def test_a_quiet_node_leaks_nothing(fake: Fake) -> None:
    assert await fake.look() == []


async def test_each_thing_that_is_held_is_found(fake: Fake) -> None:
    fake.metrics = IDLE.replace("active_requests 0", "active_requests 1")
    fake.state["kv"]["pool"]["leases"] = 2
    fake.state["kv"]["pulls"]["running"] = 3
    fake.state["members"][0]["load"]["waiting"] = 4
    assert await fake.look() == ["a: active_requests 1", "a: 2 leases", "a: 3 pulls", "a: engine waiting 4"]


async def test_files_that_stay_open_are_found(fake: Fake, tmp_path: Path) -> None:
    before = len(await fake.look()) + leaks.files_of(_here())
    opened = [(tmp_path / str(number)).open("w") for number in range(leaks.FILES_SPARE + 4)]
    assert any("files" in leak for leak in await fake.look(before))
    for file in opened:
        file.close()


async def test_a_socket_whose_other_side_has_closed_is_found(fake: Fake) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        other.close()
        assert any("other side has closed" in leak for leak in await fake.look())
        client.close()
    assert await fake.look() == []


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """A process of the command line of a worker, of a node whose files are in a folder; it holds what it is told to."""
    package = tmp_path / "node" / "workers"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(HOLDING)
    env = {**os.environ, leaks.RUN_DIR: str(tmp_path / "run"), "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", WORKERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=tmp_path
    ) as process:
        yield process
        process.kill()


HOLDING = """import socket, sys
for line in sys.stdin:
    host, port = line.split()
    held = [open(__file__) for _ in range(16)], socket.create_connection((host, int(port)))
    print("held", flush=True)
"""


async def test_workers_are_looked_at_with_their_node_and_none_may_outlive_it(
    fake: Fake, worker: Worker, tmp_path: Path
) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    assert worker.pid in _here().pids()
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = leaks.files_of(_here())
        host, port = server.getsockname()
        worker.stdin.write(f"{host} {port}\n".encode())
        worker.stdin.flush()
        other, _ = server.accept()
        assert await asyncio.to_thread(worker.stdout.readline) == b"held\n"
        other.close()
        found = await fake.look(before)
    assert any("files" in leak for leak in found) and any("other side has closed" in leak for leak in found)
    (left,) = leaks.processes_left(tmp_path)
    assert left.startswith(f"process {worker.pid} ")


def _here() -> ChaosNode:
    node = ChaosNode("a", 0, "127.0.0.1", 0, Path(), (), ())
    node.process = SimpleNamespace(pid=os.getpid(), returncode=None)  # type: ignore[assignment]
    return node


def test_a_metric_is_summed_over_its_labels() -> None:
    assert leaks.gauge('grapevine_x{a="1"} 2.0\ngrapevine_x{a="2"} 3\ngrapevine_xy 9\n', "grapevine_x") == 5.0
    assert leaks.gauge("", "grapevine_x") == 0.0
