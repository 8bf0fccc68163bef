"""Copies that several threads make: each once, each waited for, none after the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvmigrate import copier
from kvmigrate.copier import Copier, Copy, Helpers
from tests.waiting import PATIENCE_S


@pytest.fixture(params=[0, 1, 3], ids=["alone", "one helper", "three helpers"])
def helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Helpers]:
    monkeypatch.setattr(copier, "MIN_SHARED_BYTES", 0)
    made = Helpers()
    made.most = request.param
    yield made
    made.close()


def noted(made: list[int], number: int) -> Callable[[], bytes]:
    def make() -> bytes:
        made.append(number)
        return b"%d" % number

    return make


def test_each_copy_is_made_once_and_told_in_order(helpers: Helpers) -> None:
    made: list[int] = []
    work = Copier(helpers)
    for first in range(0, 300, 100):
        work.begin([Copy(noted(made, n), 1) for n in range(first, first + 100)])
    assert [work.finish() for _ in range(300)] == [b"%d" % n for n in range(300)]
    assert sorted(made) == list(range(300))


def test_what_a_copy_raises_is_raised_where_it_is_waited_for(helpers: Helpers) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    work = Copier(helpers)
    work.begin([Copy(lambda: b"1", 1), Copy(fail, 1), Copy(lambda: b"3", 1)])
    assert work.finish() == b"1"
    with pytest.raises(ValueError, match="no"):
        work.finish()
    assert work.finish() == b"3"


def test_stop_waits_for_what_is_being_copied_and_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "MIN_SHARED_BYTES", 0)
    helpers = Helpers()
    helpers.most = 1
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slow() -> bytes:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        made.append("slow")
        return b""

    work = Copier(helpers)
    work.begin([Copy(slow, 1), *(Copy(noted([], n), 1) for n in range(5))])
    assert begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=work.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive() and not made
    go_on.set()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive() and made == ["slow"]
    helpers.close()


def test_stop_cancels_what_nobody_has_begun() -> None:
    helpers, made = Helpers(), list[int]()
    helpers.most = 0
    work = Copier(helpers)
    work.begin([Copy(noted(made, n), 1) for n in range(5)])
    work.finish()
    work.stop()
    assert made == [0]
    helpers.close()


def test_without_helpers_that_live_the_caller_does_it_all() -> None:
    helpers, made = Helpers(), list[int]()
    helpers.close()
    work = Copier(helpers)
    work.begin([Copy(noted(made, n), 1 << 20) for n in range(5)])
    assert [work.finish() for _ in range(5)] == [b"%d" % n for n in range(5)]
    helpers.close()
