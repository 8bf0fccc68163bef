"""A node with two workers: what clients see is what they see of one process, limits and counts are exact."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from node.errors import SettingsError
from node.relay.deadlines import Deadlines
from node.settings import make_settings
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawClient, ask, connect
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.engine import Exchange, FakeEngine, Gate, Reply
from tests.node.http.bodies import CHAT, chat
from tests.node.workers.nodes import (
    FORCE,
    connected,
    front_of,
    metric,
    serving,
    started,
    streaming,
    worked,
)
from tests.waiting import PATIENCE_S, until


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
