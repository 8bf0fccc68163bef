"""Who has been told to go elsewhere, before a node leaves."""

from __future__ import annotations

import asyncio

import pytest

from node.http import readiness as module
from node.http.readiness import MAX_ASKERS, RECENT_S, Readiness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "LAG_S", 0.0)
    return Clock()


async def told(readiness: Readiness) -> asyncio.Task[None]:
    task = asyncio.create_task(readiness.told(60))
    await asyncio.sleep(0)
    return task


async def test_ready_shows_who_serves_until_the_node_leaves(clock: Clock) -> None:
    readiness = Readiness(lambda: ["a"], clock)
    assert readiness.ask("lb") == ["a"]
    readiness.leave()
    assert readiness.ask("lb") == []


async def test_where_nobody_asks_there_is_no_delay(clock: Clock) -> None:
    readiness = Readiness(lambda: ["a"], clock)
    readiness.leave()
    await asyncio.wait_for(readiness.told(0), 20)


async def test_every_asker_is_waited_for(clock: Clock) -> None:
    readiness = Readiness(lambda: ["a"], clock)
    for who in ("one", "two"):
        readiness.ask(who)
    readiness.leave()
    waiting = await told(readiness)
    readiness.ask("one")
    await asyncio.sleep(0)
    assert not waiting.done()
    readiness.ask("two")
    await asyncio.wait_for(waiting, 20)


async def test_who_asked_long_ago_is_not_waited_for(clock: Clock) -> None:
    readiness = Readiness(lambda: ["a"], clock)
    readiness.ask("gone")
    clock.now += RECENT_S + 1
    readiness.leave()
    await asyncio.wait_for(readiness.told(0), 20)


async def test_who_never_asks_again_is_waited_for_no_longer_than_allowed(clock: Clock) -> None:
    readiness = Readiness(lambda: ["a"], clock)
    readiness.ask("silent")
    readiness.leave()
    await asyncio.wait_for(readiness.told(0.01), 20)


def test_the_table_of_askers_is_bounded(clock: Clock) -> None:
    readiness = Readiness(lambda: ["a"], clock)
    for number in range(MAX_ASKERS * 2):
        readiness.ask(f"host-{number}")
    assert len(readiness._askers) == MAX_ASKERS
