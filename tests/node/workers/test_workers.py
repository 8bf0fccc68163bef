"""A node with two workers: what clients see is what they see of one process, limits and counts are exact, and whatever
ends takes only what is its own with it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from node.errors import SettingsError
from node.relay.carry.lost import CAUSES
from node.relay.deadlines import Deadlines
from node.settings import make_settings
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawClient, ask, connect
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.engine import Exchange, FakeEngine, Gate, Reply
from tests.node.fakes.faulty import Decodes, Fault, FaultyEngine
from tests.node.http.bodies import CHAT, chat
from tests.node.workers.nodes import alive, children, complete, front_of, metric, serving, started, worked
from tests.waiting import PATIENCE_S, until

FORCE = "x-grapevine-force-target"


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with worked() as running:
        yield running


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


async def test_connections_are_shared_evenly_and_each_worker_serves(nodes: Cluster) -> None:
    a = nodes[0]
    async with AsyncExitStack() as stack:
        for client in await connected(stack, a.port, 8):
            assert (await client.ask("POST", CHAT, (), chat())).status == 200
        await front_of(a).settle()
        assert [worker.connections for worker in front_of(a).workers] == [4, 4]


async def test_a_connection_goes_to_the_worker_with_fewer_open_requests(nodes: Cluster) -> None:
    a, gate = nodes[0], Gate()
    a.fake.script = fake.gated(gate, [fake.sse("one"), fake.DONE])
    async with AsyncExitStack() as stack:
        (first,) = await connected(stack, a.port, 1)
        await streaming(first, gate)
        for client in await connected(stack, a.port, 2):
            assert (await client.ask("GET", "/healthz")).status == 200
        await front_of(a).settle()
        (busy,) = [worker for worker in front_of(a).workers if len(worker.desk)]
        assert busy.connections == 1, "a stream counts as much as another connection"
        gate.open()


@pytest.mark.parametrize("stream", [False, True])
async def test_admission_is_exact_over_all_workers_and_every_request_is_counted(*, stream: bool) -> None:
    most, clients, each = 3, 8, 6
    async with worked(max_running=most) as nodes:
        a = nodes[0]
        peak, full = 0, asyncio.Event()

        async def counted(exchange: Exchange) -> None:
            nonlocal peak
            peak = max(peak, a.fake.active)
            if peak == most:
                full.set()
            await full.wait()
            await fake.answer_chat(exchange)

        a.fake.script = counted
        statuses: list[int] = []

        async def load(client: RawClient) -> None:
            for _ in range(each):
                answer = await client.ask("POST", CHAT, (), chat(stream=stream, max_tokens=5))
                assert answer.complete
                statuses.append(answer.status)

        async with AsyncExitStack() as stack:
            await asyncio.gather(*(load(client) for client in await connected(stack, a.port, clients)))
        assert statuses == [200] * clients * each
        assert peak == most, "as many as may run did, and never more"
        assert len(a.fake.received) == clients * each
        for _ in range(4):  # whichever worker is asked
            assert await metric(a.port, 'grapevine_requests_total{place="local",status="200"}') == clients * each
        assert await metric(a.port, "grapevine_active_requests") == 0
        assert a.node.admission.admitted == clients * each and not a.node.admission.active


async def test_who_finds_no_place_waits_in_one_line_and_is_refused_in_the_same_words() -> None:
    async with worked(max_running=1, max_queue=1) as nodes:
        a, gate = nodes[0], Gate()
        a.fake.script = fake.hold(gate)
        async with AsyncExitStack() as stack:
            clients = await connected(stack, a.port, 2)
            for number, client in enumerate(clients):
                await client.send("POST", CHAT, (), chat(max_tokens=number + 1))
                if not number:
                    await a.fake.until(lambda: a.fake.active == 1)
            await a.until(lambda: len(a.node.room) == 1)
            refused = await ask(a.port, "POST", CHAT, (), chat())
            assert refused.status == 429 and json.loads(refused.body)["error"]["code"] == "cluster_busy"
            assert refused.one("retry-after")
            gate.open(2)
            first, waited = [await client.answer() for client in clients]
            assert first.one("x-grapevine-queued-ms") is None and waited.one("x-grapevine-queued-ms") is not None
        assert await metric(a.port, 'grapevine_denials_total{why="line"}') == 1
        assert await metric(a.port, "grapevine_wait_seconds_count") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_passes_workers_at_its_entry_and_at_its_target(*, stream: bool) -> None:
    async with worked(2) as nodes:
        a, b = nodes.members
        async with AsyncExitStack() as stack:
            for client in await connected(stack, a.port, 4):
                answer = await client.ask("POST", CHAT, ((FORCE, "b"), ("X-Request-Id", "mine")), chat(stream=stream))
                assert answer.status == 200 and answer.complete
                assert (answer.one("x-grapevine-target"), answer.one("x-grapevine-hops")) == ("b", "1")
                assert answer.one("x-request-id") == "mine"
        assert len(b.fake.received) == 4 and not a.fake.received
        assert await metric(a.port, 'grapevine_requests_total{place="forwarded",status="200"}') == 4
        assert await metric(b.port, 'grapevine_peer_requests_total{status="200"}') == 4
        await until(lambda: not b.node.admission.active)


async def test_calls_between_nodes_are_signed_by_workers_and_follow_the_ring() -> None:
    async with worked(2, cluster_key="a-secret-of-the-cluster-for-tests") as nodes:
        a, b = nodes.members

        async def forwarded() -> int:
            return (await ask(a.port, "POST", CHAT, ((FORCE, "b"),), chat())).status

        assert await forwarded() == 200
        assert (await ask(b.port, "POST", "/peer" + CHAT, (), chat())).status == 403
        assert await metric(b.port, 'grapevine_remote_errors_total{what="signature"}') == 1
        old = a.node.keys.ring.ids[0]
        for member in nodes.members:
            await member.node.keys.add("another-secret-of-the-cluster")
        for member in nodes.members:
            member.node.keys.use(member.node.keys.ring.ids[1])
            member.node.keys.remove(old)
            await front_of(member).settle()
        assert await forwarded() == 200
        assert len(b.fake.received) == 2


async def test_a_client_that_goes_away_aborts_the_engine(nodes: Cluster) -> None:
    a, gate = nodes[0], Gate()
    a.fake.script = fake.gated(gate, [fake.sse("one"), fake.DONE])
    async with connect("127.0.0.1", a.port) as client:
        await streaming(client, gate)
        assert a.node.admission.active == 1
    await a.fake.until(lambda: a.fake.disconnects == 1)
    await until(lambda: not a.node.admission.active)
    assert await metric(a.port, 'grapevine_broken_answers_total{why="client"}') == 1


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


async def test_limits_of_a_client_are_exact_over_all_workers(tmp_path: Path) -> None:
    key = "a-key-of-one-client"
    (tmp_path / "f").write_text(f"one {key} requests-per-minute=5 tokens-per-minute=100000")
    async with worked(clients_file=str(tmp_path / "f")) as nodes:
        a = nodes[0]
        headers = (("Authorization", f"Bearer {key}"),)
        async with AsyncExitStack() as stack:
            clients = await connected(stack, a.port, 8)
            answers = await asyncio.gather(*(client.ask("POST", CHAT, headers, chat()) for client in clients))
        assert sorted(answer.status for answer in answers) == [200] * 5 + [429] * 3
        assert await metric(a.port, 'grapevine_client_requests_total{client="one"}') == 5
        assert await metric(a.port, 'grapevine_client_refusals_total{client="one",limit="requests"}') == 3


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


async def test_what_is_no_request_for_an_engine_is_answered_by_the_main_process(nodes: Cluster) -> None:
    a = nodes[0]
    assert json.loads((await ask(a.port, "GET", "/v1/models")).body)["data"][0]["id"] == "m"
    state = await ask(a.port, "GET", "/gossip/state")
    assert json.loads(state.body)["self"] == "a"
    explained = await ask(a.port, "POST", "/route/explain", (("Content-Type", "application/json"),), chat())
    assert json.loads(explained.body)["plan"]["target"] == "a"
    assert (await ask(a.port, "HEAD", "/healthz")).status == 200
    assert (await ask(a.port, "GET", "/nothing")).status == 404
    assert (await ask(a.port, "DELETE", "/healthz")).one("allow") == "GET"
    assert (await ask(a.port, "POST", "/admin/drain", (), b"{}")).status == 403
    page = await ask(a.port, "GET", "/")
    assert page.status == 200 and b"<html" in page.body
    async with connect("127.0.0.1", a.port) as client:
        await client.send("GET", "/page/events")
        head = await client.head()
        assert head.status == 200 and (head.one("content-type") or "").startswith("text/event-stream")
        assert await anext(client.pieces(head))


async def test_the_header_by_which_a_client_is_named_inside_is_nobody_elses(nodes: Cluster) -> None:
    a = nodes[0]
    forged = (("X-Grapevine-Client", "192.0.2.7"), ("X-Grapevine-Client", "192.0.2.8"))
    assert (await ask(a.port, "GET", "/readyz", forged)).status == 200
    assert list(a.node.readiness._askers) == ["127.0.0.1"]


async def test_the_log_tells_which_worker_speaks(tmp_path: Path, free_port: int) -> None:
    engine = await FakeEngine(tmp_path / "e").start(tcp=True)
    try:
        async with started(tmp_path, engine.url, free_port, GRAPEVINE_LOG_LEVEL="debug") as node:
            await serving(free_port)
            assert node.stderr is not None
            engine.script = fake.reset_after([fake.sse("one")])
            answer = await ask(free_port, "POST", CHAT, (("X-Request-Id", "mine"),), chat(stream=True))
            assert b"error" in answer.body
            async with asyncio.timeout(PATIENCE_S):
                while line := await node.stderr.readline():
                    told = json.loads(line)
                    if told.get("worker"):
                        assert told["worker"] in (1, 2) and told["request_id"] == "mine"
                        return
            raise AssertionError("no worker has said anything")
    finally:
        await engine.close()


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


STORY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@asynccontextmanager
async def carrying() -> AsyncIterator[Cluster]:
    """Three nodes with workers over engines whose streams can be broken. Nothing runs twice, and nothing is left."""
    decodes = Decodes()
    async with worked(0) as nodes:
        for name in "abc":
            engine = FaultyEngine(nodes.folder / f"{name}.fake", decodes=decodes)
            await complete(await nodes.add(name, engine=engine))
        await nodes.agree()
        yield nodes
        for member in nodes.members:
            await until(lambda member=member: not member.node.admission.active)  # type: ignore[misc]
        await until(lambda: not decodes.open)
        assert not decodes.doubled


async def tell(nodes: Cluster, target: str) -> bytes:
    """The story as it comes through the first node from another one."""
    answer = await ask(nodes[0].port, "POST", CHAT, ((FORCE, target),), json.dumps(STORY).encode())
    assert answer.status == 200 and answer.complete
    return without_time(answer.body)


def without_time(raw: bytes) -> bytes:
    return re.sub(rb'"created":\d+|"id":"[^"]*"', b"", raw)


async def test_a_stream_that_breaks_goes_on_elsewhere_to_the_byte() -> None:
    async with carrying() as nodes:
        whole, broken = await tell(nodes, "c"), 0
        for target in "ab":  # the entry's own engine, and a peer's
            for kind in ("reset", "garbage", "error"):
                nodes["abc".index(target)].faulty.faults = [Fault(5, kind)]
                assert await tell(nodes, target) == whole, (target, kind)
                broken += 1
        page = (await ask(nodes[0].port, "GET", "/metrics")).body.decode()
        carried = re.findall(r'grapevine_carries_total\{[^}]*result="carried"\} (\S+)', page)
        assert sum(map(float, carried)) == broken


async def test_an_answer_in_one_piece_is_gathered_carried_and_counted_once() -> None:
    sent = json.dumps({name: value for name, value in STORY.items() if name != "stream"} | {"max_tokens": 40}).encode()
    async with carrying() as nodes:
        answers = []
        for target in "cab":
            if target != "c":
                nodes["abc".index(target)].faulty.faults = [Fault(5, "reset")]
            answer = await ask(nodes[0].port, "POST", CHAT, ((FORCE, target),), sent)
            assert answer.status == 200 and answer.one("x-grapevine-target") == target
            answers.append(re.sub(rb',"prompt_tokens_details":\{[^}]*\}', b"", without_time(answer.body)))
        assert answers[0] == answers[1] == answers[2]
        assert await metric(nodes[0].port, 'grapevine_gathered_answers_total{result="whole"}') == 3
        page = (await ask(nodes[0].port, "GET", "/metrics")).body.decode()
        counted = re.findall(r'grapevine_requests_total\{[^}]*status="200"\} (\S+)', page)
        assert sum(map(float, counted)) == 3


async def test_a_drained_node_moves_the_streams_of_its_workers() -> None:
    """Also those of which the entry's worker does not know yet whether they may."""
    async with carrying() as nodes:
        whole = await tell(nodes, "c")
        for target in "ab":
            member = nodes["abc".index(target)]
            member.faulty.faults = [Fault(5, "stall")]
            telling = asyncio.create_task(tell(nodes, target))
            await member.faulty.until_stalled()
            await until(lambda member=member: member.node.handovers.running.movable == 1)  # type: ignore[misc]
            member.node.drain(60)
            assert await telling == whole
            await until(lambda member=member: member.node.drain_status()["phase"] == "drained")  # type: ignore[misc]
            await member.node.resume()
        page = (await ask(nodes[0].port, "GET", "/metrics")).body
        assert b'cause="moved",result="carried"} 2.0' in page


async def test_only_those_streams_move_that_are_asked_to_and_once_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has to ask first whether a stream may move remembers which one, wherever that runs."""
    for limit in ("PATIENCE_MIN_S", "PATIENCE_MAX_S"):  # else a stream that pauses is carried as one that hangs
        monkeypatch.setattr(f"node.relay.carry.silence.{limit}", 600.0)
    async with carrying() as nodes:
        a, b, _ = nodes.members
        whole = await tell(nodes, "c")
        stay: list[asyncio.Task[bytes]] = []
        go: list[asyncio.Task[bytes]] = []
        for member, telling in ((a, stay), (b, go)):  # of each, one for each worker of their entry
            member.faulty.faults = [Fault(5, "pause"), Fault(5, "pause")]
            for number in (1, 2):
                await front_of(a).settle()
                telling.append(asyncio.create_task(tell(nodes, member.name)))
                await until(lambda: member.node.handovers.running.movable == number)  # noqa: B023
        assert [len(worker.desk) for worker in front_of(a).workers] == [2, 2]
        assert b.node.handovers.move_all() == 2
        assert await asyncio.gather(*go) == [whole] * 2
        a.faulty.resume()
        assert await asyncio.gather(*stay) == [whole] * 2
        assert await metric(a.port, 'grapevine_carries_total{cause="moved",result="carried"}') == 2
        assert (await ask(a.port, "GET", "/metrics")).body.count(b'result="carried"} 0.0') == len(CAUSES) - 1


async def test_a_request_whose_engine_says_nothing_is_given_up_as_by_one_process() -> None:
    deadlines = Deadlines(first_byte_s=0.2, cold_s=0.2, first_byte_factor=0.01, answer_factor=0.0)
    async with worked(deadlines=deadlines) as nodes:
        a = nodes[0]
        a.fake.script = fake.stall
        answer = await ask(a.port, "POST", CHAT, (), chat(max_tokens=1))
        assert answer.status == 503 and b"no first byte" in answer.body
        await a.fake.until(lambda: a.fake.disconnects == 1)
        await until(lambda: not a.node.admission.active)


async def test_a_client_s_deadline_ends_its_request_at_the_engine_too(nodes: Cluster) -> None:
    a = nodes[0]
    a.fake.script = fake.stall
    answer = await ask(a.port, "POST", CHAT, (("x-request-timeout", "0.3"),), chat())
    assert answer.status == 504
    await a.fake.until(lambda: a.fake.disconnects == 1)
    await until(lambda: not a.node.admission.active)
    assert await metric(a.port, 'grapevine_denials_total{why="deadline"}') == 1
    assert await metric(a.port, 'grapevine_requests_total{place="refused",status="504"}') == 1


async def test_answers_of_any_size_come_whole(nodes: Cluster) -> None:
    a = nodes[0]
    big = os.urandom(3_000_000)
    a.fake.script = fake.reply(Reply(chunks=(big,), headers=(("Content-Type", "audio/mpeg"),)))
    answer = await ask(a.port, "POST", "/v1/audio/speech", (), chat(extra="x" * 2_000_000))
    assert answer.status == 200 and answer.body == big
    assert len(a.fake.received[-1].body) > 2_000_000


@pytest.mark.parametrize("workers", [0, 65, -1])
def test_a_number_of_workers_that_makes_no_sense_is_refused(workers: int) -> None:
    with pytest.raises(SettingsError, match=f"--workers {workers}: use a number from 1 to 64"):
        make_settings(workers=workers)


def test_traces_and_workers_do_not_go_together() -> None:
    with pytest.raises(SettingsError, match="Leave one of them out"):
        make_settings(workers=2, otlp_traces_endpoint="http://127.0.0.1:4318")
