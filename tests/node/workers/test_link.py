"""A worker's side of the channel: questions, tries that are given up, and what is reported of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.errors import RemoteError
from node.http.errors import ApiFailure
from node.relay.upstream import UpstreamError, UpstreamStalledError
from node.workers import down, up
from node.workers import link as links
from node.workers.link import Answering, Link
from tests.waiting import until


class Said:
    """A channel that keeps what is said."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.take = take
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)


class Upstream:
    """An answer as far as it is reported."""

    def __init__(self) -> None:
        self.waiting_since: float | None = 1.0
        self.failed: list[UpstreamError] = []

    def fail(self, error: UpstreamError) -> None:
        self.failed.append(error)


def unheard(message: Any) -> None:
    raise KeyError


def linked(news: Callable[[Any], None] = unheard) -> tuple[Link, Said]:
    made: list[Said] = []

    def channel(take: Callable[[Any], None]) -> Any:
        made.append(Said(take))
        return made[0]

    return Link(channel, news), made[0]


def answering(link: Link, question: links.Question, upstream: Upstream, *, stream: bool = True) -> Answering:
    answer = Answering(link, question, upstream, stream=stream)  # type: ignore[arg-type]
    link.relays(question, answer)
    return answer


async def test_a_question_that_nobody_answers_is_a_503_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "QUESTION_S", 0.01)
    link, channel = linked()
    with pytest.raises(ApiFailure) as failure:
        await link.ask(lambda number: up.AskKnown(number, ("a",)))
    assert failure.value.error.status == 503
    channel.take(down.Known(channel.said[0].id, ("a",)))  # too late, and no error


async def test_a_question_has_its_own_answers_in_their_order() -> None:
    link, channel = linked()
    one, two = link.question(), link.question()
    channel.take(down.Settled(two.id))
    channel.take(down.Elsewhere(one.id, True))
    channel.take(down.Settled(one.id))
    assert [await one.get(), await one.get()] == [down.Elsewhere(one.id, True), down.Settled(one.id)]
    assert await two.soon() == down.Settled(two.id)


@pytest.mark.parametrize("early", [True, False])
async def test_a_try_that_is_given_up_ends_whether_it_has_begun_or_not(*, early: bool) -> None:
    link, channel = linked()
    question = link.question()
    if early:
        channel.take(down.Cancel(question.id, 1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timer:
            question.trying(1, timer)
            if not early:
                channel.take(down.Cancel(question.id, 1))
            await asyncio.Event().wait()
    async with asyncio.timeout(None) as timer:  # the next one is another
        question.trying(2, timer)
        await asyncio.sleep(0)
    assert not question.given_up


async def test_an_answer_is_failed_where_it_is_still_relayed() -> None:
    link, channel = linked()
    question, upstream = link.question(), Upstream()
    answer = answering(link, question, upstream)
    channel.take(down.Fail(question.id, "stalled", "it hangs"))
    assert isinstance(upstream.failed[0], UpstreamStalledError) and str(upstream.failed[0]) == "it hangs"
    answer.end(False)
    channel.take(down.Fail(question.id, "stalled", "again"))
    assert len(upstream.failed) == 1


async def test_only_what_is_new_is_reported_and_the_rest_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REPORT_EVERY_S", 0.01)
    link, channel = linked()
    question, upstream = link.question(), Upstream()
    answer = answering(link, question, upstream)
    answer.piece(b"data: told when it came")
    answer.piece(b"data: one\n\ndata: two\n\n")
    await until(lambda: bool(channel.said))
    (report,) = channel.said
    ((number, events, at, since),) = report.answers
    assert (number, events, since) == (question.id, 2, 1.0) and at > 0
    quiet = asyncio.get_running_loop().time() + 0.1
    await until(lambda: asyncio.get_running_loop().time() > quiet)
    assert channel.said == [report], "nothing has happened since"
    answer.piece(b"data: three\n\n")
    answer.end(True)
    answer.end(False)
    assert channel.said[1:] == [up.End(question.id, True, 1, channel.said[-1].at)]


async def test_what_a_worker_is_never_told_makes_no_sense() -> None:
    _, channel = linked()
    with pytest.raises(RemoteError):
        channel.take(up.Ready(1))
