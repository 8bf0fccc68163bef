"""The drain of a node, with places and a mover that tests hold in their hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from node import drain as module
from node.admission import Admission, Place
from node.drain import Drain, Phase
from node.room import WaitingRoom
from tests.waiting import PATIENCE_S


class Movers:
    """Moves what it was told to, and counts."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.held: list[Place] = []
        self.asked: list[bool] = []
        self.asks = asyncio.Event()
        self.moves = False
        #: Nothing of it can be moved.
        self.still = False

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
        return 0 if self.still else len(self.held)

    def end(self) -> None:
        while self.held:
            self.held.pop().leave()


class Copies:
    """Copies for as long as the test says; `seconds` pass by the lab's clock in each run."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.runs: list[tuple[float, float]] = []
        self.forgotten = self.cancelled = 0
        self.seconds = 0.0
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.active: list[int] = []

    async def run(self, until: float) -> None:
        self.runs.append((self.lab.now, until))
        self.active.append(self.lab.admission.active)
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.lab.now += self.seconds

    def forget(self) -> None:
        self.forgotten += 1

    def status(self) -> dict[str, object]:
        return {"runs": len(self.runs)}


class Lab:
    def __init__(self) -> None:
        self.now = 0.0
        self.published: list[bool] = []
        self.admission = Admission(8, WaitingRoom(8, lambda: self.now))
        self.movers = Movers(self.admission)
        self.copies = Copies(self)
        self.drain = Drain(
            self.admission,
            self.movers,
            self.copies,
            copy_s=10.0,
            publish=lambda: self.published.append(self.admission.draining),
            clock=lambda: self.now,
        )

    async def asked(self) -> None:
        self.movers.asks.clear()
        await asyncio.wait_for(self.movers.asks.wait(), PATIENCE_S)


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
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert lab.drain.status()["running_at_begin"] == 3


async def test_what_stayed_is_asked_again_until_it_moves(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.drain.begin(10)
    for _ in range(3):
        await lab.asked()
    assert lab.drain.phase is Phase.DRAINING
    lab.movers.moves = True
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert len(lab.movers.asked) >= 4


async def test_the_deadline_ends_the_waiting_and_not_the_work(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.drain.begin(10)
    await lab.asked()
    lab.now = 10.0
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.OVERDUE
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
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert lab.movers.asked == []


async def test_an_idle_node_is_not_drained_before_its_kv_is_copied(lab: Lab) -> None:
    lab.copies.go_on.clear()
    lab.drain.begin(30)
    assert lab.drain.phase is Phase.DRAINING and lab.drain.status()["copying"]
    await asyncio.wait_for(lab.copies.begun.wait(), PATIENCE_S)
    assert lab.drain.phase is Phase.DRAINING
    lab.copies.go_on.set()
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert lab.copies.runs == [(0.0, 10.0)] and lab.drain.status()["kv"] == {"runs": 1}


async def test_copies_have_half_of_the_time_at_most_all_runs_together(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.movers.moves = True
    lab.copies.seconds = 3.0
    lab.drain.begin(12)
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert lab.copies.runs[0] == (0.0, 6.0) and lab.copies.runs[1:] in ([], [(3.0, 6.0)])
    lab.drain.begin(0)
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert len(lab.copies.runs) <= 2, "no time, no copies"


async def test_streams_that_move_have_the_transfers_for_themselves_at_first_and_copies_do_not_wait_for_ever(
    lab: Lab,
) -> None:
    lab.movers.hold(2)
    lab.drain.begin(20)
    await lab.asked()
    await lab.asked()
    assert not lab.copies.runs
    lab.now = module.MOVES_ALONE_S
    await asyncio.wait_for(lab.copies.begun.wait(), PATIENCE_S)
    assert lab.copies.active == [2], "beside what still runs"
    lab.movers.moves = True
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED
    assert lab.copies.active == [2, 0], "and once more for what was computed since"


async def test_work_that_cannot_move_delays_no_copy_and_no_copy_delays_a_move(lab: Lab) -> None:
    lab.movers.hold(1)
    lab.movers.still = True
    lab.copies.go_on.clear()
    lab.drain.begin(20)
    await asyncio.wait_for(lab.copies.begun.wait(), PATIENCE_S)
    assert lab.now == 0.0
    await lab.asked()
    await lab.asked()
    lab.movers.end()
    lab.copies.go_on.set()
    assert await asyncio.wait_for(lab.drain.over(), PATIENCE_S) is Phase.DRAINED


@pytest.mark.parametrize("running", [0, 1])
async def test_a_drain_that_is_cut_short_ends_its_copies(lab: Lab, running: int) -> None:
    lab.movers.hold(running)
    lab.movers.still = True
    lab.copies.go_on.clear()
    lab.drain.begin(30)
    await asyncio.wait_for(lab.copies.begun.wait(), PATIENCE_S)
    await asyncio.wait_for(lab.drain.resume(), PATIENCE_S)
    assert lab.drain.phase is Phase.SERVING and not lab.drain.status()["copying"]
    assert lab.copies.cancelled == 1
    lab.movers.end()
    lab.drain.begin(30)
    assert lab.copies.forgotten == 2, "what a drain tells of is its own"
