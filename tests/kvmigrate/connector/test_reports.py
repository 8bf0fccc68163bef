"""How often an engine's halves speak with their node."""

from typing import cast

import pytest

from kvmigrate.connector.metadata import BlockSave
from kvmigrate.connector.reports import LOAD_INTERVAL_S, SAME_KV_USE, SAME_LOAD_INTERVAL_S, LinkReports
from kvmigrate.connector.sides import LOOK_INTERVAL_S, WorkerSide
from kvmigrate.connector.slots import PoolSlots
from kvmigrate.link import LinkClient, Load, Message


class Link:
    """A link that always takes what it is given, and the clock of who uses it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[Message] = []
        self.reports = LinkReports(cast(LinkClient, self), lambda: self.now)

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    def told(self, running: int, waiting: int, kv_use: float, after_s: float = 0.0) -> bool:
        """Whether a load is told that is reported so long after the one before."""
        self.now += after_s
        before = len(self.sent)
        self.reports.load(running, waiting, kv_use)
        return self.sent[before:] == [Load(running, waiting, kv_use)]


@pytest.mark.parametrize("other", [(2, 0, 0.1), (1, 1, 0.1), (1, 0, 0.1 + 2 * SAME_KV_USE)])
def test_another_load_is_told_soon_and_the_same_one_as_a_sign_of_life(other: tuple[int, int, float]) -> None:
    link = Link()
    assert link.told(1, 0, 0.1)
    assert not link.told(*other, after_s=LOAD_INTERVAL_S / 2)
    assert link.told(*other, after_s=LOAD_INTERVAL_S / 2 + 0.001)
    assert not link.told(*other, after_s=SAME_LOAD_INTERVAL_S / 2)
    assert link.told(*other, after_s=SAME_LOAD_INTERVAL_S / 2 + 0.001)


def test_a_kv_cache_that_fills_slowly_is_told_when_it_has_grown() -> None:
    link = Link()
    assert link.told(1, 0, 0.1)
    tellings = [link.told(1, 0, 0.1 + step * SAME_KV_USE * 0.3, after_s=LOAD_INTERVAL_S) for step in range(1, 6)]
    assert tellings == [False, False, False, True, False]


def test_that_nothing_runs_any_more_is_told_at_once_and_once() -> None:
    link = Link()
    assert link.told(1, 0, 0.1)
    assert link.told(0, 1, 0.1)
    assert not link.told(0, 1, 0.1, after_s=LOAD_INTERVAL_S)


class Slots:
    """Counts how often the link is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def poll(self) -> None:
        self.looks += 1


def test_a_worker_looks_at_its_link_when_it_saves_and_else_at_times() -> None:
    slots, now = Slots(), 100.0
    side = WorkerSide(cast(PoolSlots, slots), None, lambda: now)
    assert slots.looks == 1
    side.save(1, [])
    assert slots.looks == 2
    now += LOOK_INTERVAL_S / 2
    side.save(2, [])
    assert slots.looks == 2
    side.save(3, [BlockSave(0, bytes(32))])
    assert slots.looks == 3
    now += LOOK_INTERVAL_S + 0.001
    side.save(4, [])
    assert slots.looks == 4
