"""Answers that this node, as their entry, can carry: written to their clients as they come, or gathered first.

Rules
1. What can be carried and is streamed is written as it comes; what is not streamed and came as a stream all the same,
   as the entry had asked for (`node.relay.local`), is gathered and written at the end, in one piece.
2. A gathered answer is noted when it is over: its status is not known before. Its first byte is its engine's.
3. Where an answer cannot be told from its stream (`UnlikeError`) it is asked for again, not as a stream, and so is
   whatever else is asked of that model: a parser in the engine stays there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NoReturn

from aiohttp import web

from node.plan import Plan, Refusal, RouteOptions
from node.prompt import ParsedRequest
from node.relay.answer import is_event_stream
from node.relay.attempts import Attempts
from node.relay.call import Call, Opened
from node.relay.carry.ahead import MAX_MOVES
from node.relay.carry.carrier import Carrier, Finish, Leg, Open
from node.relay.carry.gathering import Gathering, json_headers
from node.relay.carry.lost import Lost
from node.relay.carry.sentry import Sentry
from node.relay.carry.silence import judge_peer
from node.relay.carry.stream import CarriedStream
from node.relay.carry.whole import UnlikeError, whole
from node.relay.deadlines import Deadlines
from node.relay.downs import DEATH_GRACE_S, Downs
from node.relay.handover import Handovers
from node.relay.headers import HeaderList
from node.relay.ports import Notes, Settling, Sights
from node.relay.refused import Refused
from node.relay.response import RawResponse, length_of
from node.relay.upstream import UpstreamAnswer, UpstreamSilentError
from node.view import ClusterView

#: Models whose answers are not gathered any more.
MAX_UNLIKE = 1024

#: Decides where a request would go, without a trace.
Decide = Callable[[ClusterView, ParsedRequest, RouteOptions], Plan | Refusal]

_log = logging.getLogger("grapevine.carry")


class Carried:
    """The answers that are being carried here. ``open_leg`` opens an attempt, and ends its stay in the line."""

    def __init__(
        self,
        name: str,
        *,
        cluster: Sights,
        peers: Settling,
        downs: Downs,
        deadlines: Deadlines,
        handovers: Handovers,
        notes: Notes,
        open_leg: Open,
        decide: Decide,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._cluster = cluster
        self._peers = peers
        self._downs = downs
        self._deadlines = deadlines
        self._handovers = handovers
        self._notes = notes
        self._open_leg = open_leg
        self._decide = decide
        self._clock = clock
        self._streams: set[CarriedStream] = set()
        self._moves = asyncio.Semaphore(MAX_MOVES)
        self._unlike: set[str | None] = set()

    def taken(self, call: Call) -> Call:
        """The call as it is to be tried: where nothing is gathered any more, nobody is asked to."""
        carriage = call.parsed.carriage
        if not call.carries or carriage is None or not carriage.gathers or call.parsed.model not in self._unlike:
            return call
        return replace(call, carries=False)

    def end_streams(self, why: str) -> None:
        """End every answer that clients get through us with an error: this node is about to be gone."""
        for stream in tuple(self._streams):
            stream.end(why)

    def move(self, rid: str, visited: tuple[str, ...]) -> None:
        """Ask an answer to go on elsewhere that was asked before, wherever it runs; named as `decide` was asked."""
        for stream in tuple(self._streams):
            options = stream.elsewhere
            if options is not None and (options.rid, options.visited) == (rid, visited):
                stream.move()

    async def write(
        self, attempt: Attempts, opened: Opened, finish: Finish, request: web.BaseRequest, headers: HeaderList
    ) -> web.StreamResponse:
        """Write a streamed answer, on as many legs as it takes."""
        call, plan, upstream = attempt.call, opened.plan, opened.upstream
        first_byte_s = self._clock() - call.arrived
        self._notes.answered(call, plan, upstream.status, first_byte_s=first_byte_s, told=dict(opened.headers))
        response = RawResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        carrier = self._carrier(attempt)
        stream = self._stream(attempt, carrier, request)
        await self._run(stream, Leg(opened, finish, carrier.record), response, call, plan)
        if stream.error is not None:
            self._notes.broke(call, plan, stream.error)
        return response

    async def gather(
        self, attempt: Attempts, opened: Opened, finish: Finish, request: web.BaseRequest, headers: HeaderList
    ) -> web.StreamResponse | Leg | None:
        """Write an answer in one piece that comes as a stream, on as many legs as it takes.

        A leg that answers in one piece itself is returned as it is; None: it has to be asked for anew.

        :raises Refused: nobody runs it (any more), or its time is over.
        """
        call, plan = attempt.call, opened.plan
        first_byte_s = self._clock() - call.arrived
        carrier = self._carrier(attempt)
        stream = self._stream(attempt, carrier, request)
        gathering = Gathering(lambda: carrier.record)
        try:
            await self._run(stream, Leg(opened, finish, carrier.record), gathering, call, plan)
            if stream.in_one_piece is not None:
                return stream.in_one_piece
            if gathering.failure is None:
                status, body = 200, whole(carrier.record, chat=carrier.chat, own_ids=carrier.carriage.own_ids)
            elif gathering.failure.said is not None:
                status, body = gathering.failure.said
            else:
                refusal = attempt.too_late() if gathering.failure.late else gathering.failure.refusal
                self._refuse(call, refusal, late=gathering.failure.late)
        except UnlikeError as error:
            self._learn_unlike(call, str(error))
            if plan.target != self._name:  # it may have been left in its middle, and another one begins
                await self._peers.settled(opened)
            return None
        self._notes.gathered("whole" if gathering.failure is None else "failed")
        self._notes.answered(call, plan, status, first_byte_s=first_byte_s, told=dict(opened.headers))
        reason = opened.upstream.reason if status == 200 else ""
        response = RawResponse(status=status, reason=reason, headers=json_headers(headers, len(body)))
        try:
            async with asyncio.timeout(self._deadlines.idle_s):
                response.begin(request)
                await response.write_eof(body)
        except TimeoutError as error:
            self._notes.broke(call, plan, "client gone")
            raise ConnectionResetError("the client took nothing for too long") from error
        return response

    def _refuse(self, call: Call, refusal: Refusal, *, late: bool) -> NoReturn:
        self._notes.gathered("failed")
        if late:
            self._notes.denied("deadline")
        self._notes.answered(call, None, refusal.status, first_byte_s=None)
        raise Refused(refusal)

    def _learn_unlike(self, call: Call, why: str) -> None:
        self._notes.gathered("unlike")
        _log.warning("answers of %r are not gathered any more: %s", call.parsed.model, why)
        if len(self._unlike) >= MAX_UNLIKE:
            self._unlike.clear()
        self._unlike.add(call.parsed.model)

    # --- one answer

    def _carrier(self, attempt: Attempts) -> Carrier:
        return Carrier(attempt.call, attempt, self._open_leg, self._clock)

    def _stream(self, attempt: Attempts, carrier: Carrier, request: web.BaseRequest) -> CarriedStream:
        return CarriedStream(
            request,
            carrier,
            idle_s=self._deadlines.idle_s,
            left_s=attempt.time_left(self._clock()),
            on_leg=self._began,
            on_lost=self._lost,
            on_carried=partial(self._notes.carried, attempt.call),
            may_move=self._may_move,
            moves=self._moves,
        )

    async def _run(
        self, stream: CarriedStream, leg: Leg, reader: RawResponse | Gathering, call: Call, plan: Plan
    ) -> None:
        self._streams.add(stream)
        try:
            await stream.run(leg, reader)
        except (ConnectionError, asyncio.CancelledError):
            self._notes.broke(call, plan, "client gone")
            raise
        finally:
            self._streams.discard(stream)

    def _began(self, stream: CarriedStream, leg: Leg) -> Callable[[], None]:
        """A leg begins: watch whoever runs it. Our own engine is watched by its runner."""
        target, upstream = leg.opened.plan.target, leg.opened.upstream
        stack = ExitStack()
        if target == self._name:
            stack.enter_context(self._handovers.runs(stream))
            return stack.close

        def give_up(heard: float) -> None:
            if stream.heard == heard:
                upstream.fail(UpstreamSilentError(f"{target} was declared dead"))

        def down() -> None:
            timer = asyncio.get_running_loop().call_later(DEATH_GRACE_S, give_up, stream.heard)
            stack.callback(timer.cancel)

        stack.enter_context(self._downs.watch(target, down))
        sentry = Sentry(
            upstream,
            lambda silent_s: judge_peer(silent_s, self._cluster.row_age_s(target)),
            error=UpstreamSilentError,
        )
        stack.callback(sentry.close)
        return stack.close

    async def _lost(self, leg: Leg, lost: Lost) -> None:
        """A leg was closed: learn from it, and be sure that it is over where its target can still say so.

        A peer that said itself what happened to its engine is in order; one that broke off or fell silent is not.
        """
        if lost.target == self._name or lost.told:
            return
        if lost.cause in ("moved", "garbage"):  # it lives
            await self._peers.settled(leg.opened)
        else:
            self._cluster.failed(lost.target, lost.why)

    def _may_move(self, carrier: Carrier, target: str) -> bool:
        """Whether another node would be asked to go on with it."""
        parsed = carrier.call.parsed
        return isinstance(self._decide(self._cluster.view(parsed), parsed, carrier.elsewhere(target)), Plan)


def carriable(call: Call, upstream: UpstreamAnswer) -> bool:
    """Whether an answer is a stream of events that we know how to carry."""
    if not call.carries or upstream.status != 200:
        return False
    return is_event_stream(upstream.headers) and length_of(upstream.headers) is None
