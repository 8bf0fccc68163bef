"""Where requests go when nodes are full or have longer queues than was known, and how they wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from node.engine.events import EngineState
from node.peers import BUSY_HEADER, LONGER, PLAN_HEADER
from node.plan import Plan
from node.relay import attempts
from node.relay.forward import read_load
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.engine import Gate
from tests.node.http.asking import error_of, fill
from tests.node.http.bodies import CHAT, chat
from tests.waiting import PATIENCE_S

#: Who is asked before a request waits: its target, and two bounces.
TRIED = 3


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


async def test_a_request_is_bounced_twice_and_then_waits_for_whoever_has_a_place(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five are full and nobody knows: three are asked, each says how it is, and the two others are left in peace."""
    monkeypatch.setattr("node.relay.dispatch.RETRY_S", PATIENCE_S)
    a = await nodes.add("a", models=["other"])
    peers = [await nodes.add(name, max_running=1) for name in "bcdef"]
    await nodes.agree()
    gate, held = Gate(), []
    for peer in peers:
        peer.node.reporter.tick = lambda: None  # type: ignore[method-assign]
        held += await fill(peer, gate)
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.until(lambda: len(a.node.room) == 1)
    assert a.node.metrics.retries.labels("busy")._value.get() == TRIED
    assert sum(peer.node.admission.refused for peer in peers) == TRIED
    told = [peer for peer in peers if a.node.registry.load(peer.name).active == 1]
    assert [peer.node.admission.refused for peer in told] == [1] * TRIED
    gate.open(6)
    a.node.room.stir()
    answer = await waiting
    assert answer.status == 200 and answer.one("x-grapevine-queued-ms") is not None
    assert [(await task).status for task in held] == [200] * 5


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
