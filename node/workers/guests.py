"""A worker as the target of peers' requests: the main process checks and admits, bodies and answers are ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from node import load as load_vector
from node.http.errors import ApiError, ApiFailure
from node.http.intake import header_list
from node.http.peer import PeerRoutes
from node.http.signature import SignedBody
from node.plan import Plan
from node.relay.call import Busy, Call, Failed, Outcome
from node.relay.call import Opened as OpenedAttempt
from node.relay.carry.marks import CARRY_HEADER, MAX_LEG
from node.relay.headers import internal
from node.relay.ports import unnoticed
from node.workers import up
from node.workers.down import GuestBusy, GuestRefused
from node.workers.entry import Exchanges
from node.workers.link import Link, Question
from node.workers.told import read_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPlan(Plan):
    """A peer's plan, and the question under which the main process knows its request."""

    question: Question
    leg: str


class Guests:
    """The runner of peers' requests (`node.relay.ports.Runner`)."""

    def __init__(self, link: Link, exchanges: Exchanges) -> None:
        self._link = link
        self._exchanges = exchanges

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Begin to run it, or say why not."""
        assert isinstance(plan, GuestPlan)
        question = plan.question
        self._link.send(
            up.Begin(question.id, call.rid, call.target, call.method, call.carries, plan.leg, read_of(call.parsed))
        )
        try:
            outcome = await self._exchanges.run(question, lambda message: call)
        except BaseException:
            self._link.over(question)
            raise
        if isinstance(outcome, OpenedAttempt):
            return outcome
        self._link.forget(question)
        if isinstance(outcome, GuestBusy):
            load = load_vector.decode(outcome.load) if outcome.load else None
            return Busy(plan.target, load, longer=outcome.longer)
        return Failed(plan.target, outcome.message, reached=True)


class GuestRoutes(PeerRoutes):
    """The routes of a worker that only peers use."""

    def __init__(self, *args: Any, link: Link, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._link = link

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Run a forwarded request, or refuse it."""
        arrived = self._clock()
        question = self._link.question()
        begun = False
        with self._bodies.hold() as held:
            try:
                try:
                    plan, signed = await self._genuine(question, request, arrived)
                    call = await self._take(request, arrived, plan, held, signed)
                    begun = True
                finally:
                    if not begun:
                        self._link.over(question)
            except ApiFailure as failure:
                if failure.error.status == 429:
                    return self._busy(Busy(self._settings.name), request_read=False)
                return self._refuse(failure.error)
            return await self._run(call, plan, request)

    async def _genuine(
        self, question: Question, request: web.BaseRequest, arrived: float
    ) -> tuple[GuestPlan, SignedBody | None]:
        ours = internal(header_list(request))
        rid = request.headers.get("X-Request-Id", "")
        remote, told = request.remote, tuple(ours.items())
        self._link.send(up.Serve(question.id, request.method, request.raw_path, rid, remote, arrived, told))
        answer = await question.soon()
        if isinstance(answer, GuestRefused):
            raise ApiFailure(ApiError(answer.status, answer.code, answer.message))
        leg = ours.get(CARRY_HEADER, "")[:MAX_LEG]
        plan = GuestPlan(*answer.plan, question=question, leg=leg)
        signed = SignedBody(answer.body_key, answer.body_tag) if answer.body_key else None
        return plan, signed


class Counted:
    """What `PeerRoutes` counts (`node.metrics.Metrics`), told to the main process."""

    def __init__(self, link: Link) -> None:
        self.served = _Tally(link)
        self.remote_errors = _Errors(link)


class _Tally:
    def __init__(self, link: Link) -> None:
        self._link = link

    def add(self, labels: tuple[str, ...]) -> None:
        """Count one."""
        self._link.send(up.Note("served", labels[0]))


class _Errors:
    def __init__(self, link: Link) -> None:
        self._link = link

    def labels(self, what: str) -> _Error:
        """Count this kind."""
        return _Error(self._link, what)


class _Error:
    def __init__(self, link: Link, what: str) -> None:
        self._link = link
        self._what = what

    def inc(self) -> None:
        """Count one."""
        self._link.send(up.Note("remote_error", self._what))
