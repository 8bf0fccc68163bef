"""Races between worker and main process, as the desk sees them: never two engines for a request, nothing is kept."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.errors import RemoteError
from node.plan import Plan
from node.relay.call import Opened
from node.relay.upstream import UpstreamBrokenError, UpstreamRefusedError, UpstreamSilentError
from node.workers import down, up
from node.workers.asked import Answer, Asked
from node.workers.desk import Desk, Parts

PLAN = Plan("r", "m", "a", "a")


class Said:
    """A worker that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)


def tried(number: int, fault: str = "", *, of: int = 1) -> up.Tried:
    return up.Tried(of, number, fault, "why", 200, False, False, 2, b"", ())


def trying(asked: Asked, answer: Answer) -> asyncio.Task[None]:
    return asyncio.ensure_future(asked.attempt(lambda number: ("try", number), answer))


async def test_an_answer_that_comes_in_time_begins() -> None:
    worker = Said()
    asked = Asked(worker, 1)
    answer = Answer(asked)
    task = trying(asked, answer)
    await asyncio.sleep(0)
    assert worker.said == [("try", 1)] and asked.came(tried(1))
    await task
    assert answer.status == 200 and asked.begun


@pytest.mark.parametrize(
    ("fault", "error"),
    [("refused", UpstreamRefusedError), ("silent", UpstreamSilentError), ("odd", UpstreamBrokenError)],
)
async def test_a_fault_is_the_error_that_the_worker_had(fault: str, error: type[Exception]) -> None:
    asked = Asked(Said(), 1)
    task = trying(asked, Answer(asked))
    await asyncio.sleep(0)
    assert asked.came(tried(1, fault))
    with pytest.raises(error, match="why"):
        await task
    assert not asked.begun


@pytest.mark.parametrize("waits", [False, True])
async def test_an_answer_to_a_try_that_was_given_up_is_taken_back_where_it_may_be_shown(*, waits: bool) -> None:
    worker = Said()
    asked = Asked(worker, 1)
    asked.waits = waits
    task = trying(asked, Answer(asked))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert worker.said == [("try", 1), down.Cancel(1, 1)]
    assert asked.came(tried(1)) is waits, "one that waits for its headers shows nothing"
    assert asked.came(tried(1, "silent")), "a fault is no answer"


async def test_what_an_answer_holds_is_given_back_once() -> None:
    asked, ended, counted = Asked(Said(), 1), list[Any](), list[Any]()
    asked.count = lambda events, at: counted.append((events, at))
    asked.hold(Opened(PLAN, Answer(asked), b"", on_end=ended.append), ended.append)
    asked.moved(3, 1.0, 1.0)
    asked.over(up.End(1, True, 2, 2.0))
    asked.over(up.End(1, False, 2, 3.0))
    assert ended == [True, True] and counted == [(3, 1.0), (2, 2.0)]


async def test_a_late_answer_of_a_request_that_is_over_is_taken_from_the_worker() -> None:
    worker = Said()
    desk = Desk(cast(Parts, None), worker.send)
    desk.take(tried(1, of=7))
    assert worker.said == [down.Fail(7, "silent", "it answered too late")]
    desk.take(tried(1, "broken", of=7))
    desk.take(up.End(7, False, 0, 0.0))
    desk.take(up.Moved(((7, 1, 1.0, 0.0),)))
    desk.take(up.Left(7, 1.0))
    assert len(worker.said) == 1 and not len(desk)
    desk.lost()


def test_what_a_worker_never_says_makes_no_sense() -> None:
    desk = Desk(cast(Parts, SimpleNamespace(metrics=None)), Said().send)
    for message in (down.Cancel(1, 1), up.Note("nothing", "x"), up.Carried("by magic", 1.0, "")):
        with pytest.raises(RemoteError):
            desk.take(message)
