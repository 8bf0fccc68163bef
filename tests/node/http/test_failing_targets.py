"""Targets that fail, refuse, stay silent or die before the first byte: who is asked instead, and how often."""

from __future__ import annotations

import asyncio

import pytest

from node.meta import NodeMeta
from node.peers import REFUSED_HEADER
from node.plan import MAX_VISITED
from node.relay.attempts import MAX_BROKEN
from node.relay.deadlines import Deadlines
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Cluster, Member
from tests.node.fakes.engine import Reply
from tests.node.http.asking import error_of
from tests.node.http.bodies import CHAT, chat

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
