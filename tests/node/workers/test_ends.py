"""A worker or its node that is killed, hangs, lacks something or is told to stop takes only its own with it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.engine import FakeEngine, Gate
from tests.node.http.bodies import CHAT, chat
from tests.node.workers.nodes import (
    FORCE,
    alive,
    children,
    complete,
    connected,
    front_of,
    metric,
    serving,
    started,
    streaming,
    worked,
)
from tests.waiting import PATIENCE_S, until


async def test_a_killed_worker_ends_its_own_connections_only_and_a_new_one_comes(nodes: Cluster) -> None:
    a, gates = nodes[0], [Gate(), Gate()]
    async with AsyncExitStack() as stack:
        clients = await connected(stack, a.port, 2)
        streams = []
        for client, gate in zip(clients, gates, strict=True):
            a.fake.script = fake.gated(gate, [fake.sse("one"), fake.DONE])
            streams.append(await streaming(client, gate))
        assert [len(worker.desk) for worker in front_of(a).workers] == [1, 1]
        assert a.node.admission.active == 2
        victim = front_of(a).workers[0]
        os.kill(victim.pid, signal.SIGKILL)
        await a.fake.until(lambda: a.fake.disconnects == 1)
        await until(lambda: a.node.admission.active == 1)
        ended, went_on = 0, 0
        for stream, gate in zip(streams, gates, strict=True):
            gate.open()
            try:
                assert [piece async for piece in stream] == [fake.DONE]
                went_on += 1
            except (asyncio.IncompleteReadError, ConnectionError):
                ended += 1
        assert (ended, went_on) == (1, 1)
        await until(lambda: front_of(a).workers[0].pid not in (0, victim.pid))
    for worker in await complete(a):
        assert alive(worker.pid)
    assert not alive(victim.pid)
    await until(lambda: not a.node.admission.active)
    assert await metric(a.port, 'grapevine_broken_answers_total{why="target"}') == 1
    a.fake.script = fake.answer_chat
    async with AsyncExitStack() as stack:
        for client in await connected(stack, a.port, 4):
            assert (await client.ask("POST", CHAT, (), chat())).status == 200
        await front_of(a).settle()
        assert [worker.connections for worker in front_of(a).workers] == [2, 2]


async def test_a_killed_worker_gives_back_what_its_clients_had_and_waited_for(tmp_path: Path) -> None:
    key = "a-key-of-one-client"
    (tmp_path / "f").write_text(f"one {key} max-running=2")
    async with worked(max_running=1, clients_file=str(tmp_path / "f")) as nodes:
        a, gate = nodes[0], Gate()
        a.fake.script = fake.hold(gate)
        headers = (("Authorization", f"Bearer {key}"),)
        async with AsyncExitStack() as stack:
            clients = await connected(stack, a.port, 2)
            for number, client in enumerate(clients):
                await client.send("POST", CHAT, headers, chat(max_tokens=number + 1))
                if not number:
                    await a.fake.until(lambda: a.fake.active == 1)
            await a.until(lambda: len(a.node.room) == 1)
            assert (await ask(a.port, "POST", CHAT, headers, chat())).status == 429, "over both workers"
            for worker in front_of(a).workers:
                os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: not a.node.admission.active and not len(a.node.room))
        one = a.node.access.named("one")
        assert one is not None
        await until(lambda: not one.running)
        a.fake.script = fake.answer_chat
        assert (await ask(a.port, "POST", CHAT, headers, chat())).status == 200


async def test_a_worker_that_hangs_gets_no_connections(nodes: Cluster) -> None:
    a = nodes[0]
    stopped = front_of(a).workers[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        await until(lambda: not stopped.takes)
        async with AsyncExitStack() as stack:
            for client in await connected(stack, a.port, 3):
                assert (await client.ask("POST", CHAT, (), chat())).status == 200
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    await until(lambda: stopped.takes)


async def test_a_worker_that_has_no_descriptors_left_loses_a_connection_and_nothing_else(nodes: Cluster) -> None:
    a = nodes[0]
    full, other = front_of(a).workers
    soft, hard = resource.prlimit(full.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(full.pid, resource.RLIMIT_NOFILE, (3, hard))
    statuses = []
    async with AsyncExitStack() as stack:
        for client in await connected(stack, a.port, 2):
            try:
                statuses.append((await client.ask("GET", "/v1/models")).status)
            except (asyncio.IncompleteReadError, ConnectionError):
                statuses.append(0)
        assert sorted(statuses) == [0, 200]
        await front_of(a).settle()
        assert (full.load, other.load) == (0, 1), "it is not taken to hold what it has lost"
        resource.prlimit(full.pid, resource.RLIMIT_NOFILE, (soft, hard))
        (client,) = await connected(stack, a.port, 1)
        assert (await client.ask("POST", CHAT, (), chat())).status == 200
        await front_of(a).settle()
        assert (full.connections, other.connections) == (1, 1)


async def test_a_worker_that_hung_or_started_meanwhile_knows_the_keys_of_now(tmp_path: Path) -> None:
    """What changes is told to those too of whom nobody expects that they listen."""
    file = tmp_path / "clients"
    file.write_text("one a-key-of-one-client")
    async with worked(2, cluster_key="a-secret-of-the-cluster-for-tests", clients_file=str(file)) as nodes:
        a = nodes[0]

        async def asked(key: str) -> list[int]:
            """One after the other through both workers, run by the other node."""
            headers = (("Authorization", f"Bearer {key}"), (FORCE, "b"))
            async with AsyncExitStack() as stack:
                clients = await connected(stack, a.port, 2)
                return [(await client.ask("POST", CHAT, headers, chat())).status for client in clients]

        hung, victim = front_of(a).workers
        os.kill(victim.pid, signal.SIGKILL)
        await until(lambda: front_of(a).workers[1].pid not in (0, victim.pid))
        stopped = [hung.pid, front_of(a).workers[1].pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: not hung.takes)
        file.write_text("one another-key-of-the-client")
        old = a.node.keys.ring.ids[0]
        for member in nodes.members:
            await member.node.reloader.look(forced=True)
            await member.node.keys.add("another-secret-of-the-cluster")
        for member in nodes.members:
            member.node.keys.use(member.node.keys.ring.ids[1])
            member.node.keys.remove(old)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await complete(a)
        await until(lambda: hung.takes)
        await front_of(a).settle()
        assert await asked("a-key-of-one-client") == [401, 401]
        assert await asked("another-key-of-the-client") == [200, 200]


async def test_a_worker_whose_files_are_broken_starts_when_they_are_mended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, key = tmp_path / "clients", "a-key-of-one-client"
    file.write_text(f"one {key}")
    async with worked(clients_file=str(file)) as nodes:
        a = nodes[0]
        file.write_text("one")
        os.kill(front_of(a).workers[0].pid, signal.SIGKILL)
        await until(lambda: front_of(a).restarts == 2)
        assert (await ask(a.port, "POST", CHAT, (("Authorization", f"Bearer {key}"),), chat())).status == 200
        file.write_text(f"one {key}")
        await until(lambda: front_of(a).workers[0].serves)
    told = capfd.readouterr().err
    assert "until that is mended this worker does not start" in told and "Traceback" not in told


async def test_no_worker_outlives_a_killed_node(tmp_path: Path, free_port: int) -> None:
    engine = await FakeEngine(tmp_path / "e").start(tcp=True)
    try:
        async with started(tmp_path, engine.url, free_port) as node:
            await serving(free_port)
            workers = children(node.pid)
            assert len(workers) == 2
            node.kill()
            await node.wait()
            await until(lambda: not any(alive(pid) for pid in workers))
    finally:
        await engine.close()


async def test_a_node_that_is_told_to_stop_ends_its_answers_first(tmp_path: Path, free_port: int) -> None:
    engine, gate = await FakeEngine(tmp_path / "e").start(tcp=True), Gate()
    engine.script = fake.gated(gate, [fake.sse("one"), fake.sse("two"), fake.DONE])
    try:
        async with started(tmp_path, engine.url, free_port) as node:
            await serving(free_port)
            workers = children(node.pid)
            async with connect("127.0.0.1", free_port) as client, connect("127.0.0.1", free_port) as idle:
                stream = await streaming(client, gate)
                assert (await idle.ask("GET", "/healthz")).status == 200
                node.terminate()
                while not json.loads((await idle.ask("GET", "/readyz")).body)["leaving"]:
                    pass
                gate.open(2)
                assert b"".join([piece async for piece in stream]) == fake.sse("two") + fake.DONE
                async with asyncio.timeout(PATIENCE_S):
                    assert await idle.reader.read() == b""
            assert await node.wait() == 0
            await until(lambda: not any(alive(pid) for pid in workers))
    finally:
        await engine.close()
