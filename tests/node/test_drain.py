"""The drain of a node, with places and a mover that tests hold in their hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from node import drain as module
from node.admission import Admission, Place
from node.drain import Drain, Phase
from node.room import WaitingRoom


class Movers:
    """Moves what it was told to, and counts."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.held: list[Place] = []
        self.asked: list[bool] = []
        self.asks = asyncio.Event()
        self.moves = False

    @property
    def running(self) -> Movers:
        return self

    @property
    def movable(self) -> int:
        return len(self.held)

    def hold(self, count: int) -> None:
        self.held += [place for _ in range(count) if (place := self.admission.enter()) is not None]

    def move_all(self) -> int:
        self.asked.append(self.admission.draining)
        self.asks.set()
        if self.moves:
            self.end()
        return len(self.held)

    def end(self) -> None:
        while self.held:
            self.held.pop().leave()


class Lab:
    def __init__(self) -> None:
        self.now = 0.0
        self.published: list[bool] = []
        self.admission = Admission(8, WaitingRoom(8, lambda: self.now))
        self.movers = Movers(self.admission)
        self.drain = Drain(
            self.admission,
            self.movers,
            publish=lambda: self.published.append(self.admission.draining),
            clock=lambda: self.now,
        )

    async def asked(self) -> None:
        self.movers.asks.clear()
        await asyncio.wait_for(self.movers.asks.wait(), 20)


@pytest.fixture
async def lab(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(module, "MOVE_EVERY_S", 0.005)
    made = Lab()
    yield made
    await made.drain.close()
    made.admission.validate()


async def test_peers_hear_of_it_before_anybody_is_asked_to_take_over(lab: Lab) -> None:
    lab.movers.hold(2)
    lab.drain.begin(10)
    assert lab.published == [True] and lab.movers.asked == []
    await lab.asked()
    assert set(lab.movers.asked) == {True}
    assert lab.admission.enter() is None


async def test_what_moves_leaves_it_drained(lab: Lab) -> None:
    lab.movers.hold(3)
    lab.movers.moves = True
    lab.drain.begin(10)
    assert await asyncio.wait_for(lab.drain.over(), 20) is Phase.DRAINED
    assert lab.drain.status()["running_at_begin"] == 3


async def test_what_stayed_is_asked_again_until_it_moves(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.drain.begin(10)
    for _ in range(3):
        await lab.asked()
    assert lab.drain.phase is Phase.DRAINING
    lab.movers.moves = True
    assert await asyncio.wait_for(lab.drain.over(), 20) is Phase.DRAINED
    assert len(lab.movers.asked) >= 4


async def test_the_deadline_ends_the_waiting_and_not_the_work(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.drain.begin(10)
    await lab.asked()
    lab.now = 10.0
    assert await asyncio.wait_for(lab.drain.over(), 20) is Phase.OVERDUE
    assert lab.admission.active == 1 and lab.admission.draining
    lab.movers.end()
    assert lab.drain.phase is Phase.DRAINED


async def test_a_second_drain_moves_the_deadline(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.drain.begin(10)
    lab.now = 9.0
    lab.drain.begin(10)
    assert lab.drain.status()["left_s"] == 10.0
    assert lab.drain.status()["since_s"] == 9.0


async def test_who_takes_work_again_asks_nobody_any_more(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.drain.begin(10)
    await lab.asked()
    await lab.drain.resume()
    asked = len(lab.movers.asked)
    assert lab.drain.phase is Phase.SERVING and lab.published[-1] is False
    place = lab.admission.enter()
    assert place is not None
    place.leave()
    lab.movers.end()
    assert len(lab.movers.asked) == asked


async def test_an_idle_node_is_drained_at_once(lab: Lab) -> None:
    lab.drain.begin(10)
    assert lab.drain.phase is Phase.DRAINED
    assert await asyncio.wait_for(lab.drain.over(), 20) is Phase.DRAINED
    assert lab.movers.asked == []
