"""One request of a worker as the main process sees it: its tries, and what it holds here once its answer is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from node.plan import Plan
from node.prompt import ParsedRequest
from node.relay.attempts import Attempts
from node.relay.call import Call, Opened
from node.relay.upstream import (
    UpstreamAnswer,
    UpstreamBrokenError,
    UpstreamError,
    UpstreamMovedError,
    UpstreamRefusedError,
    UpstreamSilentError,
    UpstreamStalledError,
)
from node.view import ClusterView
from node.workers.down import Cancel, Fail
from node.workers.up import Ask, End, Tried

#: How an exchange may fail, in the words of `up.Tried`.
FAULTS: dict[str, type[UpstreamError]] = {
    "refused": UpstreamRefusedError,
    "silent": UpstreamSilentError,
    "stalled": UpstreamStalledError,
    "moved": UpstreamMovedError,
    "broken": UpstreamBrokenError,
}


def fault_of(error: BaseException) -> str:
    """The word for an error of an exchange."""
    for word, kind in FAULTS.items():
        if isinstance(error, kind):
            return word
    return "broken"


def error_of(fault: str, why: str) -> UpstreamError:
    """The error that a worker, or the main process, had."""
    return FAULTS.get(fault, UpstreamBrokenError)(why)


class Worker(Protocol):
    """The worker whose request it is; `node.workers.desk.Desk`."""

    def send(self, message: Any) -> None:
        """Tell it something."""
        ...


class Answer(UpstreamAnswer):
    """An answer that a worker reads, as those see it who judge and count it here."""

    __slots__ = ("_asked", "_complete")

    def __init__(self, asked: Asked) -> None:  # no connection of its own: it is the worker's
        self._asked = asked
        self._complete = False
        self._connection = None
        self._fault = None
        self.waiting_since = None
        self.status = 0
        self.reason = ""
        self.headers = []

    @property
    def whole(self) -> bool:
        """Whether all of it came and was read."""
        return self._complete

    @property
    def complete(self) -> bool:
        """The same: what a worker tells of it, it has read."""
        return self._complete

    def began(self, tried: Tried) -> None:
        """Its first piece came."""
        self.status, self._complete, self.headers = tried.status, tried.whole, list(tried.ours)

    def fail(self, error: UpstreamError) -> None:
        """Let the worker end it; whoever reads it there gets this error."""
        if self._fault is None:
            self._fault = error
            self._asked.fail(error)

    def close(self) -> None:
        """Nothing is held here."""


class Asked:
    """One request. A try is under way (`attempt`), or an answer is open (`hold`), or neither."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.id = number
        self.worker = worker
        self.task: asyncio.Task[None] | None = None
        self.stack = ExitStack()
        #: The answer is over, as its worker said before it was taken in here that it is open.
        self.ended: End | None = None
        self.opened: Opened | None = None
        #: What came of the last try.
        self.tried: Tried | None = None
        #: The worker does not show an answer before it hears the headers that belong to it.
        self.waits = False
        #: What it has tried, where it is a client's.
        self.attempts: Attempts | None = None
        #: Whom the events of its answer are told: how many, and when the last one came.
        self.count: Callable[[int, float], None] = _uncounted
        #: Called once when the worker first reports on its answer, which takes it longer than usual.
        self.when_slow: Callable[[], None] | None = None
        self._finish: Callable[[bool], None] = _nothing
        self._number = 0
        self._trying: asyncio.Future[Tried] | None = None
        self._answer: Answer | None = None

    @property
    def queued(self) -> bool:
        """It stands in line, or has stood there: its client is told for how long."""
        return self.attempts is not None and (self.attempts.ticket is not None or self.attempts.waited_s > 0)

    @property
    def first(self) -> bytes:
        """The beginning of its answer, as far as that is told: the ids that it gives (`node.stored`)."""
        return self.tried.first if self.tried is not None else b""

    async def attempt(self, tell: Callable[[int], Any], answer: Answer) -> None:
        """Let the worker make an exchange; returns when ``answer`` has begun.

        :raises UpstreamError: it did not.
        """
        self._number += 1
        self.tried, self._answer = None, answer
        trying = self._trying = asyncio.get_running_loop().create_future()
        self.worker.send(tell(self._number))
        try:
            tried = await trying
        except BaseException:
            self.worker.send(Cancel(self.id, self._number))
            raise
        finally:
            self._trying = None
        if tried.fault:
            self.tried = None
            raise error_of(tried.fault, tried.why)
        answer.began(tried)

    def came(self, tried: Tried) -> bool:
        """Take what came of a try; False when nobody waits for it any more, and the worker may show an answer."""
        if self._trying is None or self._trying.done() or tried.number != self._number:
            return bool(tried.fault) or self.waits
        self.tried = tried
        self._trying.set_result(tried)
        return True

    @property
    def begun(self) -> bool:
        """The worker has an answer, whether that was taken in here or not."""
        return self.tried is not None and not self.tried.fault

    def hold(self, opened: Opened, finish: Callable[[bool], None]) -> None:
        """The answer is open: keep what it holds until `over`."""
        self.opened, self._finish = opened, finish

    def moved(self, events: int, at: float, waiting_since: float) -> None:
        """More of the answer came to the worker, or does not come."""
        if self.when_slow is not None and self._answer is not None:
            when_slow, self.when_slow = self.when_slow, None
            when_slow()
        if self._answer is not None:
            self._answer.waiting_since = waiting_since or None
        if at and self.opened is not None:
            self.count(events, at)

    def fail(self, error: UpstreamError) -> None:
        """Its engine or peer is given up."""
        if self._trying is not None:
            if not self._trying.done():
                self._trying.set_exception(error)
        else:
            self.worker.send(Fail(self.id, fault_of(error), str(error)))

    def over(self, end: End) -> None:
        """Give back all that the answer holds, once."""
        self.stack.close()
        opened, self.opened = self.opened, None
        if opened is not None:
            if end.events:
                self.count(end.events, end.at)
            opened.end(end.whole)
            self._finish(end.whole)
        self._answer, self.count, self._finish, self.when_slow = None, _uncounted, _nothing, None


def _nothing(whole: bool) -> None:
    return None


def _uncounted(events: int, at: float) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCall(Call):
    """A call of a worker: its headers and its body are there."""

    asked: Asked
    #: What the target's model can, where the body depends on that.
    context: int = 0
    block: int = 0


class AskedAttempts(Attempts):
    """What a worker's request has tried."""

    def __init__(self, call: AskedCall, ask: Ask) -> None:
        super().__init__(call)
        self.adopt(ask.past)
        self._mark = ask.mark
        self._fits = ask.fits

    def mark(self) -> int:
        """What the request is known by when it comes again: its worker has its body."""
        return self._mark

    def fitted(self, plan: Plan, view: ClusterView) -> Call:
        """The call with what its worker needs to make the body for the target of a plan."""
        call = self.call
        candidate = view.get(plan.target) if self._fits else None
        info = candidate.models.get(plan.model) if candidate is not None else None
        if info is None or not isinstance(call, AskedCall):
            return call
        return asked_call(call, call.parsed, asked=call.asked, context=info.max_model_len, block=info.block_size)


def asked_call(call: Call, parsed: ParsedRequest, *, asked: Asked, context: int = 0, block: int = 0) -> AskedCall:
    """A call like this one for the question ``asked``."""
    return AskedCall(
        call.method,
        call.target,
        call.headers,
        parsed,
        call.rid,
        call.options,
        call.arrived,
        carries=call.carries,
        client=call.client,
        priority=call.priority,
        asked=asked,
        context=context,
        block=block,
    )
