"""Where requests go, what cannot be served, and what a draining node takes."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from node.engine.events import EngineState
from node.http import intake
from node.peers import PLAN_HEADER, REFUSED_HEADER
from node.plan import Plan
from node.relay.forward import read_load
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.engine import Gate
from tests.node.http.asking import error_of, fill
from tests.node.http.bodies import CHAT, chat


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
