"""Requests that are in the engine's queue while their blocks are pulled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvmigrate.link import messages as m
from node.kv_pulling import GRACE_S
from node.kv_pulls import PULL_MAX_S
from tests.node.fakes import connector as kv
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Member
from tests.node.http.bodies import CHAT
from tests.node.http.kv_pair import BLOCKS, LONG, Pair, force, send, warmed


class Held:
    """An engine that does with its requests what vLLM does: one whose blocks are being pulled waits, others do not."""

    def __init__(self, pair: Pair, member: Member) -> None:
        self._compute = member.fake.script
        self._connector = pair.connectors[member.name]
        self.arrived: list[float] = []
        self.computed: list[float] = []
        self._moved = asyncio.Condition()

    async def script(self, exchange: fake.Exchange) -> None:
        params = exchange.received.json["kv_transfer_params"]
        assert isinstance(params, dict)
        rid, hold_s = params["grapevine"]["rid"], params["grapevine"].get("hold_s", 0.0)
        await self._note(self.arrived, hold_s)
        if hold_s:
            await self._connector.until_got(lambda role, got: got == m.Pulled(rid))
        await self._note(self.computed, hold_s)
        await self._compute(exchange)

    async def until(self, what: Callable[[], bool]) -> None:
        async with self._moved, asyncio.timeout(60):
            await self._moved.wait_for(what)

    async def _note(self, where: list[float], hold_s: float) -> None:
        async with self._moved:
            where.append(hold_s)
            self._moved.notify_all()


async def holding(pair: Pair) -> tuple[Member, Member]:
    """As `warmed`; the engine of the second one computes something else, so that it is given requests to hold."""
    a, b = await warmed(pair, holds=True)
    b.node.meter.dispatched("somebody else's", time.monotonic(), 1)
    return a, b


def slow_source(member: Member, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A source that answers nobody until it is let."""
    go_on = threading.Event()
    resolve = member.node.kv.digest.resolve

    def wait(chunks: Sequence[int]) -> tuple[bytes, ...]:
        go_on.wait(10)
        return resolve(chunks)

    assert member.node.kv.server is not None
    monkeypatch.setattr(member.node.kv.server, "_resolve", wait)
    return go_on


async def test_a_request_waits_in_the_engines_queue_while_its_blocks_are_pulled_and_nobody_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await holding(pair)
    go_on, engine = slow_source(a, monkeypatch), Held(pair, b)
    b.fake.script = engine.script
    pulling = asyncio.create_task(send(b, *force("b", "a")))
    await engine.until(lambda: len(engine.arrived) == 1)
    assert engine.arrived[0] == PULL_MAX_S + GRACE_S, "the engine was asked to hold it, as long as a forced pull takes"
    other = await send(b, *force("b"), ("x-grapevine-no-pull", "1"))
    assert other.status == 200 and engine.computed == [0.0] and not pulling.done()
    go_on.set()
    answer = await pulling
    assert int(answer.one("x-grapevine-pulled-blocks") or 0) >= 0 and answer.one("x-grapevine-source") == "a"
    assert len(engine.computed) == 2
    b.node.admission.validate()


@pytest.mark.parametrize("held", [True, False])
async def test_who_needs_no_pull_has_the_place_of_who_waits_for_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """A node with one place: as many wait for their blocks as may run, on the engine or before they are sent there."""
    a, b = await warmed(pair, holds=True, settings={"max_running": 1})
    if held:
        b.node.meter.dispatched("somebody else's", time.monotonic(), 1)
    go_on, engine = slow_source(a, monkeypatch), Held(pair, b)
    b.fake.script = engine.script
    pulling = asyncio.create_task(send(b, *force("b", "a")))
    await b.until(lambda: b.node.admission.resting == 1)
    other = await send(b, *force("b"), ("x-grapevine-no-pull", "1"))
    assert other.status == 200 and not pulling.done()
    assert b.node.admission.active == b.node.admission.resting == 1
    go_on.set()
    assert (await pulling).status == 200
    await b.until(lambda: b.node.admission.active == b.node.admission.resting == 0)
    b.node.admission.validate()


async def test_an_idle_engine_is_asked_when_the_blocks_are_here(pair: Pair) -> None:
    _, b = await warmed(pair, holds=True)
    engine = Held(pair, b)
    b.fake.script = engine.script
    answer = await send(b, *force("b", "a"))
    assert int(answer.one("x-grapevine-pulled-blocks") or 0) >= BLOCKS - 8
    assert engine.arrived == [0.0], "the engine was asked to hold it"


async def test_the_engine_hears_of_the_blocks_before_it_hears_that_the_pull_is_over(pair: Pair) -> None:
    _, b = await holding(pair)
    b.fake.script = Held(pair, b).script
    answer = await send(b, *force("b", "a"))
    pulled = int(answer.one("x-grapevine-pulled-blocks") or 0)
    assert pulled >= BLOCKS - 8
    assert b.node.metrics.actual._value.get() == pulled * kv.BLOCK_TOKENS
    got = [message for role, message in pair.connectors["b"].got if role is m.Role.SCHEDULER]
    over = next(place for place, message in enumerate(got) if isinstance(message, m.Pulled))
    assert sum(len(message.items) for message in got[:over] if isinstance(message, m.Add)) == pulled


async def test_a_held_request_is_let_go_when_its_source_is_gone(pair: Pair) -> None:
    a, b = await holding(pair)
    assert a.node.kv.server is not None
    a.node.kv.server.close()
    b.fake.script = Held(pair, b).script
    answer = await send(b, *force("b", "a"))
    assert (answer.status, answer.one("x-grapevine-pulled-blocks")) == (200, "0")


async def test_an_engine_that_refuses_a_request_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await holding(pair)
    go_on = slow_source(a, monkeypatch)
    b.fake.script = fake.reply(fake.Reply(400))
    answer = await ask(b.port, "POST", CHAT, force("b", "a"), LONG)
    assert (answer.status, answer.one("x-grapevine-pulled-blocks")) == (400, "0")
    await pair.connectors["b"].until(m.Role.SCHEDULER, m.Pulled)
    go_on.set()


@pytest.mark.parametrize("held", [True, False])
async def test_a_pull_that_fails_by_a_bug_of_ours_costs_the_request_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, held: bool
) -> None:
    _, b = await holding(pair) if held else await warmed(pair, holds=True)

    async def broken(*args: object, **more: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(b.node.kv._pulls, "pull", broken)
    b.fake.script = Held(pair, b).script
    answer = await send(b, *force("b", "a"))
    assert answer.one("x-grapevine-pulled-blocks") == "0"
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == ["a pull failed"]


async def test_a_client_that_leaves_while_its_request_is_held_ends_the_hold_and_gives_its_place_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await holding(pair)
    go_on, engine = slow_source(a, monkeypatch), Held(pair, b)
    b.fake.script = engine.script
    async with connect("127.0.0.1", b.port) as client:
        await client.send("POST", CHAT, force("b", "a"), LONG)
        await engine.until(lambda: len(engine.arrived) == 1)
    await pair.connectors["b"].until(m.Role.SCHEDULER, m.Pulled)
    await b.until(lambda: b.node.admission.active == 0)
    go_on.set()
