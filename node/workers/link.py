"""A worker's side of its channel to the main process: questions and what is answered to them, and news."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from node.errors import RemoteError
from node.http.errors import ApiError, ApiFailure
from node.relay.local import EVENT
from node.relay.upstream import UpstreamAnswer
from node.workers.asked import error_of
from node.workers.channel import Channel
from node.workers.down import (
    Cancel,
    Deny,
    Elsewhere,
    Entered,
    Fail,
    GuestBusy,
    GuestRefused,
    Known,
    Opened,
    Refuse,
    Served,
    Settled,
    TryLocal,
    TryPeer,
)
from node.workers.up import End, Moved

#: Seconds between two reports of what came of the answers.
REPORT_EVERY_S = 0.25
#: Seconds that the main process may take for a question that it can answer at once.
QUESTION_S = 60.0
_ANSWERS = frozenset(
    {
        TryLocal,
        TryPeer,
        Opened,
        Refuse,
        Deny,
        Served,
        GuestRefused,
        GuestBusy,
        Entered,
        Known,
        Elsewhere,
        Settled,
    }
)


class NoAnswer(ApiFailure):
    """The main process does not answer; so is the client told who waits for that."""

    def __init__(self, why: str) -> None:
        message = f"The node's main process does not answer: {why}."
        super().__init__(ApiError(503, "node_silent", message, retry_after_s=1))


class Question:
    """What the main process was asked under one id, and the messages that it has for that."""

    __slots__ = ("_cancelled", "_news", "_number", "_timer", "_waiter", "answer", "first", "id")

    def __init__(self, number: int) -> None:
        self.id = number
        #: The answer that is relayed, once there is one.
        self.answer: Answering | None = None
        #: It is for the first leg of an answer.
        self.first = True
        self._news: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._number = self._cancelled = 0
        self._timer: asyncio.Timeout | None = None

    def put(self, message: Any) -> None:
        """A message has come."""
        self._news.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def back(self, message: Any) -> None:
        """Take this one again."""
        self._news.appendleft(message)

    async def get(self) -> Any:
        """The next message."""
        while not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._news.popleft()

    async def soon(self) -> Any:
        """The next message, where it needs no more than a look.

        :raises NoAnswer: it did not come.
        """
        if self._news:
            return self._news.popleft()
        try:
            async with asyncio.timeout(QUESTION_S):
                return await self.get()
        except TimeoutError as error:
            raise NoAnswer(f"nothing within {QUESTION_S:.0f} s") from error

    def trying(self, number: int, timer: asyncio.Timeout | None) -> None:
        """The try of that number is under way (`timer` ends it), or over."""
        self._number, self._timer = number, timer
        if timer is not None and self._cancelled >= number:
            self.cancel(number)

    def cancel(self, number: int) -> None:
        """The main process has given up a try."""
        self._cancelled = max(self._cancelled, number)
        if self._timer is not None and self._number <= number and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    @property
    def given_up(self) -> bool:
        """Whether the main process has given up the try."""
        return self._cancelled >= self._number


class Answering:
    """One answer that is relayed here: what the main process counts of it, gathered until it is told."""

    __slots__ = ("_first", "_link", "_open", "_question", "_stream", "at", "events", "told_since", "upstream")

    def __init__(self, link: Link, question: Question, upstream: UpstreamAnswer, *, stream: bool) -> None:
        self.upstream = upstream
        self.events = 0
        self.at = 0.0
        self.told_since = 0.0
        self._link = link
        self._question = question
        self._stream = stream
        #: The first piece was told when it came.
        self._first = True
        self._open = True

    def piece(self, data: bytes) -> None:
        """A piece of the answer goes to the client."""
        if self._first:
            self._first = False
            return
        self.at = time.monotonic()
        if self._stream:
            self.events += data.count(EVENT)

    def end(self, whole: bool) -> None:
        """It is over: the main process gives back what it holds. Once."""
        if self._open:
            self._open = False
            self._link.over(self._question, whole, self.events, self.at)


class Link:
    """Asks, tells and hears. `news` is called with what is no answer to a question."""

    def __init__(self, channel: Callable[[Callable[[Any], None]], Channel], news: Callable[[Any], None]) -> None:
        self._news = news
        self._ids = itertools.count(1)
        self._questions: dict[int, Question] = {}
        self._answers: dict[int, Answering] = {}
        self._report: asyncio.TimerHandle | None = None
        self.channel = channel(self._take)

    def send(self, message: Any) -> None:
        """Tell the main process something."""
        self.channel.send(message)

    def question(self) -> Question:
        """Begin to ask something; `forget` it in the end, or `over`."""
        question = Question(next(self._ids))
        self._questions[question.id] = question
        return question

    def forget(self, question: Question) -> None:
        """All is answered."""
        self._questions.pop(question.id, None)
        self._answers.pop(question.id, None)

    def over(self, question: Question, whole: bool = False, events: int = 0, at: float = 0.0) -> None:
        """It is over, or not wanted any more: the main process gives back what it holds for it."""
        self.forget(question)
        self.send(End(question.id, whole, events, at))

    async def ask(self, make: Callable[[int], Any]) -> Any:
        """Ask something that is answered at once.

        :raises NoAnswer: it was not, within `QUESTION_S`.
        """
        question = self.question()
        self.send(make(question.id))
        try:
            return await question.soon()
        finally:
            self.forget(question)

    def relays(self, question: Question, answer: Answering) -> None:
        """An answer has begun to come: report what comes of it."""
        question.answer = answer
        self._answers[question.id] = answer
        if self._report is None:
            self._report = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._tell)

    def forget_answer(self, question: Question) -> None:
        """What had begun to come is not the answer."""
        question.answer = None
        self._answers.pop(question.id, None)

    def _tell(self) -> None:
        self._report = None
        if not self._answers:
            return
        told = []
        for number, answer in self._answers.items():
            since = answer.upstream.waiting_since or 0.0
            if answer.at or since != answer.told_since:
                told.append((number, answer.events, answer.at, since))
                answer.events, answer.at, answer.told_since = 0, 0.0, since
        if told:
            self.send(Moved(tuple(told)))
        self._report = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._tell)

    def _take(self, message: Any) -> None:
        if type(message) in _ANSWERS:
            question = self._questions.get(message.id)
            if question is not None:  # else nobody waits any more, and the main process has been told
                question.put(message)
        elif isinstance(message, Cancel):
            if (question := self._questions.get(message.id)) is not None:
                question.cancel(message.number)
        elif isinstance(message, Fail):
            question = self._questions.get(message.id)
            if question is not None and question.answer is not None:
                question.answer.upstream.fail(error_of(message.fault, message.why))
        else:
            try:
                self._news(message)
            except KeyError as error:
                raise RemoteError(f"worker: {type(message).__name__} is nothing that a worker is told") from error
