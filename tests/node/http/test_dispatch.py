"""Where requests go when nodes are full, refuse, die, drain, or do not exist."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack

import pytest

from node.engine.events import EngineState
from node.http import intake
from node.meta import NodeMeta
from node.peers import BUSY_HEADER, LONGER, PLAN_HEADER, REFUSED_HEADER
from node.plan import MAX_VISITED, Plan
from node.relay import attempts
from node.relay.attempts import MAX_BROKEN
from node.relay.deadlines import Deadlines
from node.relay.forward import read_load
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Cluster, Member
from tests.node.fakes.engine import Gate, Reply
from tests.node.http.bodies import CHAT, chat


def error_of(answer: RawAnswer) -> dict[str, object]:
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


async def fill(member: Member, gate: Gate, count: int = 1) -> list[asyncio.Task[RawAnswer]]:
    """Occupy places of a node with its own clients until the gate opens."""
    member.fake.script = fake.hold(gate)
    forced = (("x-grapevine-force-target", member.name),)
    tasks = [asyncio.create_task(ask(member.port, "POST", CHAT, forced, chat())) for _ in range(count)]
    await member.fake.until(lambda: member.fake.active == count)
    return tasks


# --- what cannot be served


async def test_an_unknown_model_is_answered_as_openai_does(nodes: Cluster) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", CHAT, (), chat("nope"))
    assert answer.status == 404
    error = error_of(answer)
    assert error["code"] == "model_not_found" and error["param"] == "model" and "nope" in str(error["message"])
    assert answer.one("x-request-id")


async def test_a_model_name_that_is_no_text_is_unknown_and_leaves_the_state_readable(nodes: Cluster) -> None:
    a = await nodes.add("a")
    body = b'{"model": "m\\ud800", "messages": []}'
    answer = await ask(a.port, "POST", CHAT, (), body)
    assert answer.status == 404 and error_of(answer)["code"] == "model_not_found"
    assert (await ask(a.port, "POST", "/route/explain", (), body)).status == 200
    assert (await ask(a.port, "GET", "/gossip/state")).status == 200


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff\xfe", b"nothing"])
async def test_a_body_that_is_no_json_object_is_refused(nodes: Cluster, body: bytes) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", CHAT, (("Content-Type", "application/json"),), body)
    assert answer.status == 400
    assert error_of(answer)["type"] == "invalid_request_error"
    assert not a.fake.received


async def test_a_body_that_is_too_large_is_refused_with_413(nodes: Cluster) -> None:
    a = await nodes.add("a", max_body_mib=1)
    big = chat(filler="x" * (1 << 20))
    for headers, body in (((), big), ((("Transfer-Encoding", "chunked"),), _chunked(big))):
        answer = await ask(a.port, "POST", CHAT, headers, body)
        assert answer.status == 413 and "1 MiB" in str(error_of(answer)["message"])
    assert not a.fake.received


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


async def test_the_bodies_that_a_node_holds_are_bounded(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send most of a large body and then stop hold memory: together no more than the bound."""
    monkeypatch.setattr(intake, "BODIES", 2)
    a = await nodes.add("a", max_body_mib=1)
    size = (1 << 20) - 8
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {1 << 20}\r\n\r\n".encode()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect("127.0.0.1", a.port)) for _ in range(3)]
        for client in clients:
            client.writer.write(head + b" " * size)
        first = [asyncio.create_task(client.answer()) for client in clients]
        done, stalled = await asyncio.wait(first, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert [(task.result().status, error_of(task.result())["code"]) for task in done] == [(429, "too_many_bodies")]
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        # What is small is taken all the time, and the room is there again when the clients are gone.
        assert (await ask(a.port, "POST", CHAT, (), chat())).status == 200
    assert (await ask(a.port, "POST", CHAT, (), chat(filler="x" * (1 << 19)))).status == 200


async def test_no_candidate_names_what_is_missing(nodes: Cluster) -> None:
    a = await nodes.add("a", up=False)
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 503
    assert "loading" in str(error_of(answer)["message"]) and "a" in str(error_of(answer)["message"])
    a.supervisor.up()
    assert (await ask(a.port, "POST", CHAT, (), chat())).status == 200
    a.supervisor.down(EngineState.RESTARTING)
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 503 and answer.one("Retry-After")


async def test_a_node_serves_its_clients_while_its_own_engine_loads(nodes: Cluster) -> None:
    a, b = await nodes.add("a", up=False), await nodes.add("b")
    await nodes.agree()
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 200 and answer.one("x-grapevine-target") == b.name


async def test_each_model_goes_to_the_node_that_serves_it(nodes: Cluster) -> None:
    a, b = await nodes.add("a", models=["m", "one"]), await nodes.add("b", models=["two"])
    await nodes.agree()
    for entry in (a, b):
        for model, target in (("one", "a"), ("two", "b")):
            answer = await ask(entry.port, "POST", CHAT, (), chat(model))
            assert answer.one("x-grapevine-target") == target, answer.body


@pytest.mark.parametrize("header", ["x-grapevine-force-target", "x-grapevine-force-source"])
async def test_an_unknown_node_in_an_option_is_named(nodes: Cluster, header: str) -> None:
    a = await nodes.add("a")
    answer = await ask(a.port, "POST", CHAT, ((header, "ghost"),), chat())
    assert answer.status == 400 and "ghost" in str(error_of(answer)["message"])


async def test_contradicting_options_are_refused(nodes: Cluster) -> None:
    a = await nodes.add("a")
    both = (("x-grapevine-force-source", "a"), ("x-grapevine-no-pull", "1"))
    assert (await ask(a.port, "POST", CHAT, both, chat())).status == 400
    assert (await ask(a.port, "POST", CHAT, (("x-grapevine-no-pull", "maybe"),), chat())).status == 400
    assert (await ask(a.port, "POST", CHAT, (("x-grapevine-no-pull", "1"),), chat())).status == 200


async def test_a_stored_response_is_asked_for_where_it_was_stored(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    b.fake.script = fake.reply(fake.Reply(chunks=(b'{"id":"resp_abc","object":"response"}',)))
    body = json.dumps({"model": "m", "input": "hi"}).encode()
    first = await ask(a.port, "POST", "/v1/responses", (("x-grapevine-force-target", "b"),), body)
    assert first.status == 200
    for method, path in (("GET", "/v1/responses/resp_abc"), ("POST", "/v1/responses/resp_abc/cancel")):
        answer = await ask(a.port, method, path, (), b"")
        assert answer.one("x-grapevine-target") == "b", answer.body
    body = json.dumps({"model": "m", "input": "and?", "previous_response_id": "resp_abc"}).encode()
    assert (await ask(a.port, "POST", "/v1/responses", (), body)).one("x-grapevine-target") == "b"
    assert (await ask(a.port, "GET", "/v1/responses/resp_other", (), b"")).one("x-grapevine-target") == "a"


# --- full nodes


async def test_a_full_target_bounces_the_request_to_the_next(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b", max_running=1), await nodes.add("c", max_running=1)
    await nodes.agree()
    gate = Gate()
    held = await fill(b, gate)
    answers = [await ask(a.port, "POST", CHAT, (), chat()) for _ in range(3)]
    assert [answer.one("x-grapevine-target") for answer in answers] == ["c"] * 3
    assert not c.fake.disconnects
    gate.open()
    assert (await held[0]).status == 200


async def test_a_busy_node_tells_its_fresh_load(nodes: Cluster) -> None:
    b = await nodes.add("b", max_running=1)
    gate = Gate()
    held = await fill(b, gate)
    plan = Plan(rid="r", model="m", entry="a", target="b", hops=1).header()
    answer = await ask(b.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat())
    assert answer.status == 429 and answer.one(BUSY_HEADER) == "1"
    load = read_load(answer.one("x-grapevine-load"))
    assert load is not None and load.active == 1 and load.ready
    gate.open()
    await held[0]


async def test_a_node_whose_queue_grew_says_so_and_the_next_best_takes_the_request(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()
    c.node.meter.dispatched("x", time.monotonic(), 30_000)  # half a minute of prompts, known to everybody
    await a.until(lambda: a.node.registry.roster.get("c").load.queued_ms > 20_000)  # type: ignore[union-attr]
    b.node.reporter.tick = lambda: None  # type: ignore[method-assign]
    b.node.meter.dispatched("y", time.monotonic(), 300_000)  # five minutes, known to nobody
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 200 and answer.one("x-grapevine-target") == "c"
    assert a.node.metrics.retries.labels("longer")._value.get() == 1
    assert a.node.registry.roster.get("b").load.queued_ms > 200_000  # type: ignore[union-attr]


async def test_a_plan_without_patience_is_run_whatever_the_queue(nodes: Cluster) -> None:
    b = await nodes.add("b")
    b.node.meter.dispatched("y", time.monotonic(), 300_000)
    for patience_ms, status in ((1000.0, 429), (400_000.0, 200), (0.0, 200)):
        plan = Plan(rid="r", model="m", entry="a", target="b", hops=1, patience_ms=patience_ms).header()
        answer = await ask(b.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat())
        assert answer.status == status and (status == 200 or answer.one(BUSY_HEADER) == LONGER)


async def test_a_request_waits_for_a_place_and_gets_the_first_that_is_free(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b = await nodes.add("b", max_running=1)
    await nodes.agree()
    gate = Gate()
    held = await fill(b, gate)
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.until(lambda: len(a.node.room) == 1)
    assert b.fake.active == 1
    gate.open(2)
    assert (await held[0]).status == 200
    answer = await waiting
    assert answer.status == 200 and answer.one("x-grapevine-target") == "b"
    assert len(a.node.room) == 0


@pytest.mark.parametrize("entry", ["a", "b"])
async def test_the_whole_line_moves_up_when_places_become_free(nodes: Cluster, entry: str) -> None:
    """The first of the line has its place long before its answer begins: nobody waits for that answer."""
    a, b = await nodes.add("a", max_running=3), await nodes.add("b", models=["other"])
    await nodes.agree()
    gate = Gate()
    held = await fill(a, gate, 3)
    at = a if entry == "a" else b
    waiting = [asyncio.create_task(ask(at.port, "POST", CHAT, (), chat())) for _ in range(3)]
    await at.until(lambda: len(at.node.room) == 3)
    gate.open(3)
    assert [(await task).status for task in held] == [200] * 3
    await a.fake.until(lambda: a.fake.active == 3)
    await at.until(lambda: len(at.node.room) == 0)
    gate.open(3)
    assert [(await task).status for task in waiting] == [200] * 3


async def test_a_full_queue_answers_429_with_retry_after(nodes: Cluster) -> None:
    a = await nodes.add("a", max_running=1, max_queue=0)
    gate = Gate()
    held = await fill(a, gate)
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 429 and int(answer.one("Retry-After") or 0) >= 1
    assert error_of(answer)["code"] == "cluster_busy"
    gate.open()
    await held[0]


async def test_waiting_ends_with_429_in_the_end(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_WAIT_S", 0.1)
    a = await nodes.add("a", max_running=1)
    gate = Gate()
    held = await fill(a, gate)
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 429 and answer.one("Retry-After")
    gate.open()
    await held[0]


async def test_a_client_that_leaves_the_queue_leaves_no_trace(nodes: Cluster) -> None:
    a = await nodes.add("a", max_running=1)
    gate = Gate()
    held = await fill(a, gate)
    async with connect("127.0.0.1", a.port) as client:
        await client.send("POST", CHAT, (), chat())
        await a.until(lambda: len(a.node.room) == 1)
    await a.until(lambda: len(a.node.room) == 0)
    gate.open()
    await held[0]
    assert len(a.fake.received) == 1


# --- nodes that fail


#: vLLM's API server outlives its engine core by a moment, and says this to whoever asks.
CORE_DIED = (
    b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.",'
    b'"type":"InternalServerError","param":null,"code":500}}'
)
FAILURES = {
    "resets": fake.reset,
    "core died": fake.reply(Reply(500, (("Content-Type", "application/json"),), (CORE_DIED,))),
    "core died, streamed": fake.reply(
        Reply(200, (("Content-Type", "text/event-stream"),), (b"data: " + CORE_DIED + b"\n\ndata: [DONE]\n\n",))
    ),
}


async def test_an_engines_own_error_is_the_answer(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()
    own = fake.reply(Reply(500, (("Content-Type", "application/json"),), (b'{"error":"its own"}',)))
    b.fake.script = c.fake.script = own
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert (answer.status, answer.body) == (500, b'{"error":"its own"}')
    assert len(b.fake.received) + len(c.fake.received) == 1


@pytest.mark.parametrize("how", ["refuses", *FAILURES])
async def test_a_target_that_fails_before_the_first_byte_is_replaced(nodes: Cluster, how: str) -> None:
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()
    if how == "refuses":
        await b.fake.close()
    else:
        b.fake.script = FAILURES[how]
    for _ in range(4):
        answer = await ask(a.port, "POST", CHAT, (), chat())
        assert answer.status == 200 and answer.one("x-grapevine-target") == "c", answer.body
    assert len(c.fake.received) == 4


async def test_a_peer_that_refuses_connections_is_avoided_before_gossip_knows(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()
    assert b.node._http is not None
    await b.node._http.close()
    targets = [(await ask(a.port, "POST", CHAT, (), chat())).one("x-grapevine-target") for _ in range(6)]
    assert targets == ["c"] * 6
    state = a.node.registry.describe("b")
    refused = a.node.metrics.retries.labels("refused")._value.get()
    assert refused <= 2 and (state.avoided or refused == 0)
    assert c.fake.received


async def test_a_failing_own_engine_sends_the_request_to_a_peer(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    await a.fake.close()
    for _ in range(4):
        answer = await ask(a.port, "POST", CHAT, (), chat())
        assert answer.status == 200 and answer.one("x-grapevine-target") == b.name


async def test_when_every_target_fails_the_client_is_told_of_each(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    a.fake.script = b.fake.script = fake.reset
    answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 503
    message = str(error_of(answer)["message"])
    assert "a:" in message and "b:" in message
    assert len(a.fake.received) == len(b.fake.received) == 1


async def test_a_request_that_breaks_engines_is_not_carried_through_the_whole_cluster(nodes: Cluster) -> None:
    members = [await nodes.add(name) for name in "abcde"]
    await nodes.agree()
    for member in members:
        member.fake.script = fake.reset
    answer = await ask(members[0].port, "POST", CHAT, (), chat())
    assert answer.status == 503 and error_of(answer)["code"] == "no_node_answered"
    assert sum(len(member.fake.received) for member in members) == MAX_BROKEN


async def test_nodes_that_cannot_be_reached_are_each_tried_once(nodes: Cluster) -> None:
    """More of them than a plan can name: none of them comes up a second time."""
    a = await nodes.add("a", models=["other"])
    members = [await nodes.add(f"n{number}") for number in range(MAX_VISITED + 2)]
    await nodes.agree()
    for member in members:
        assert member.node._http is not None
        await member.node._http.close()
    async with asyncio.timeout(60):
        answer = await ask(a.port, "POST", CHAT, (), chat())
    assert answer.status == 503 and error_of(answer)["code"] == "no_node_answered"
    assert a.node.metrics.retries.labels("refused")._value.get() == len(members)


async def test_a_refusal_that_never_ends_holds_up_nobody(nodes: Cluster) -> None:
    """A peer sends the head of its refusal and then nothing: what matters has been said."""
    a = await nodes.add("a", models=["other"], deadlines=Deadlines(exchange_s=0.1))
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 9\r\n" + REFUSED_HEADER.encode() + b": gone\r\n\r\n{")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
        a.node.registry._meta[b.name] = NodeMeta(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(60):
            answer = await ask(a.port, "POST", CHAT, (("x-grapevine-force-target", b.name),), chat())
        assert answer.status == 503 and "gone" in str(error_of(answer)["message"])
        assert (await ask(a.port, "POST", CHAT, (), chat())).one("x-grapevine-target") == c.name


async def test_a_peer_that_refuses_one_request_is_not_avoided_for_others(nodes: Cluster) -> None:
    a, b = await nodes.add("a", models=["other"]), await nodes.add("b", max_body_mib=1)
    await nodes.agree()
    answer = await ask(a.port, "POST", CHAT, (), chat(filler="x" * (2 << 20)))
    assert answer.status == 503 and "--max-body-mib" in str(error_of(answer)["message"])
    assert not a.node.registry.describe(b.name).avoided


async def test_a_silent_target_is_left_and_its_work_aborted(nodes: Cluster) -> None:
    quick = Deadlines(cold_s=0.2)
    a = await nodes.add("a", models=["other"], deadlines=quick)
    b = await nodes.add("b")
    await nodes.agree()
    b.fake.script = fake.stall
    answer = await ask(a.port, "POST", CHAT, (), chat(stream=True))
    assert answer.status == 503
    await b.fake.until(lambda: b.fake.disconnects == 1)


async def test_a_peer_declared_dead_is_left_at_once(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()
    b.fake.script = c.fake.script = fake.stall
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    first = await _receiver(b, c)
    second = c if first is b else b
    second.fake.script = fake.answer_chat
    a.node.downs.down(first.name)
    answer = await waiting
    assert answer.status == 200 and answer.one("x-grapevine-target") == second.name
    await first.fake.until(lambda: first.fake.disconnects == 1)


async def _receiver(*members: Member) -> Member:
    tasks = [asyncio.create_task(m.fake.until(lambda m=m: m.fake.active == 1)) for m in members]  # type: ignore[misc]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return members[tasks.index(done.pop())]


# --- loops, drain


async def test_a_plan_for_another_node_is_refused_not_forwarded(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    plan = Plan(rid="r", model="m", entry="a", target="a", hops=1).header()
    answer = await ask(b.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat())
    assert answer.status == 421 and answer.one(REFUSED_HEADER)
    assert not a.fake.received and not b.fake.received


async def test_two_nodes_that_each_believe_the_other_has_room_do_not_loop(nodes: Cluster) -> None:
    a, b = await nodes.add("a", max_running=1, max_queue=0), await nodes.add("b", max_running=1, max_queue=0)
    await nodes.agree()
    gate = Gate()
    held = await fill(a, gate) + await fill(b, gate)
    for entry in (a, b):
        answer = await ask(entry.port, "POST", CHAT, (), chat())
        assert answer.status == 429
    assert len(a.fake.received) == len(b.fake.received) == 1
    gate.open(2)
    await asyncio.gather(*held)


async def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new(nodes: Cluster) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    gate = Gate()
    held = await fill(b, gate)
    b.node.drain(60)
    await a.until(lambda: a.sees(["a"]))
    for entry in (a, b):
        answer = await ask(entry.port, "POST", CHAT, (), chat())
        assert answer.one("x-grapevine-target") == "a"
    gate.open()
    assert (await held[0]).one("x-grapevine-target") == "b"
    b.fake.script = fake.answer_chat
    await b.node.resume()
    await a.until(lambda: a.sees(["a", "b"]))
    forced = (("x-grapevine-force-target", "b"),)
    assert (await ask(a.port, "POST", CHAT, forced, chat())).status == 200


async def test_a_draining_node_refuses_a_peer_that_has_not_heard_of_it(nodes: Cluster) -> None:
    b = await nodes.add("b")
    b.node.drain(60)
    plan = Plan(rid="r", model="m", entry="a", target="b", hops=1).header()
    answer = await ask(b.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat())
    load = read_load(answer.one("x-grapevine-load"))
    assert answer.status == 429 and load is not None and load.draining
    assert not b.fake.received


@pytest.mark.parametrize("policy", ["cost", "least_connections", "latency_based", "round_robin"])
async def test_every_policy_can_be_chosen(nodes: Cluster, policy: str) -> None:
    a, b = await nodes.add("a", policy=policy), await nodes.add("b", policy=policy)
    await nodes.agree()
    targets = [(await ask(a.port, "POST", CHAT, (), chat())).one("x-grapevine-target") for _ in range(4)]
    assert set(targets) <= {"a", "b"}
    if policy == "round_robin":
        assert sorted(map(str, targets)) == ["a", "a", "b", "b"]
    assert len(a.fake.received) + len(b.fake.received) == 4


async def test_who_waits_for_one_certain_node_holds_up_nobody_else(nodes: Cluster) -> None:
    a = await nodes.add("a", max_running=1)
    b = await nodes.add("b")
    await nodes.agree()
    gate = Gate()
    held = await fill(a, gate)
    forced = asyncio.create_task(ask(b.port, "POST", CHAT, (("x-grapevine-force-target", "a"),), chat()))
    await b.until(lambda: len(b.node.room) == 1)
    answer = await ask(b.port, "POST", CHAT, (), chat())
    assert answer.status == 200 and answer.one("x-grapevine-target") == "b"
    gate.open(2)
    assert [(await held[0]).status, (await forced).one("x-grapevine-target")] == [200, "a"]


async def test_waiting_ends_when_nobody_is_left_to_wait_for(nodes: Cluster) -> None:
    a = await nodes.add("a", models=["other"])
    b = await nodes.add("b", max_running=1)
    await nodes.agree()
    gate = Gate()
    held = await fill(b, gate)
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.until(lambda: len(a.node.room) == 1)
    b.supervisor.down(EngineState.FAILED, "out of memory")
    answer = await waiting
    assert answer.status in {404, 503}, answer.body
    gate.open()
    await held[0]
