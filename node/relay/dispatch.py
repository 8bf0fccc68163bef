"""The way of a request at its entry: decide, try, and write the one answer that the client sees.

Rules:
1. Every attempt rests on a decision made just before it, on the view as it is then.
2. A target that is full costs one of two bounces, one that seems to be full none; then the request waits in the
   bounded room (`node.room`) and decides anew when its turn comes (late binding). It leaves the line as soon as a
   target has taken it, long before its first byte: whoever stands behind it must not wait for its whole answer.
3. A target that fails before its first byte is left out for this request, and for all requests for a while
   (`node.peers.Circuits`). After the first byte a streamed answer may be carried on (`node.relay.carry`), with the
   same record of what was tried; any other is not tried again.
4. An attempt that was opened is ended exactly once, however the client or the target behaves.
5. The client's deadline ends waiting, attempts and answer alike, and travels with the plan.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from aiohttp import web

from node.decide import decide
from node.outlook import full_peers, outlook, seems_full
from node.plan import Plan, Refusal, RouteOptions
from node.policy import Policy
from node.prompt import ParsedRequest
from node.relay.answer import Relay, is_event_stream
from node.relay.attempts import Attempts, too_busy
from node.relay.call import Busy, Call, Failed, Opened
from node.relay.carry.ahead import MAX_MOVES
from node.relay.carry.carrier import Carrier, Leg
from node.relay.carry.lost import Lost
from node.relay.carry.sentry import Sentry
from node.relay.carry.silence import judge_peer
from node.relay.carry.stream import CarriedStream
from node.relay.deadlines import Deadlines
from node.relay.downs import Downs
from node.relay.handover import Fixed, Handovers
from node.relay.headers import REQUEST_ID, HeaderList, for_downstream
from node.relay.ports import Cluster, Notes, Peers, Runner, unnoticed
from node.relay.refused import Refused
from node.relay.response import length_of
from node.relay.upstream import UpstreamSilentError
from node.room import WaitingRoom
from node.turns import RETRY_S, Denial
from node.view import ClusterView

#: A stream from a peer that gossip declared dead has this many seconds to show that it lives.
DEATH_GRACE_S = 2.0

TARGET_HEADER = "x-grapevine-target"
REASON_HEADER = "x-grapevine-reason"
HOPS_HEADER = "x-grapevine-hops"
QUEUED_HEADER = "x-grapevine-queued-ms"


class Dispatcher:
    """Runs requests somewhere in the cluster."""

    def __init__(
        self,
        name: str,
        *,
        cluster: Cluster,
        policy: Policy,
        local: Runner,
        peers: Peers,
        room: WaitingRoom,
        downs: Downs,
        deadlines: Deadlines,
        handovers: Handovers,
        notes: Notes,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._cluster = cluster
        self._policy = policy
        self._local = local
        self._peers = peers
        self._room = room
        self._downs = downs
        self._deadlines = deadlines
        self._handovers = handovers
        self._streams: set[CarriedStream] = set()
        self._moves = asyncio.Semaphore(MAX_MOVES)
        self._notes = notes
        self._rng = rng
        self._clock = clock

    async def run(self, call: Call, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``request``.

        :raises Refused: nobody runs it.
        """
        attempt = Attempts(call)
        try:
            opened, finish = await self._open_in_time(attempt)
        except Refused as refused:
            self._notes.answered(call, None, refused.refusal.status, first_byte_s=None)
            raise
        finally:
            if attempt.ticket is not None:
                attempt.leave(self._notes, self._clock())
        if _carriable(call, opened):
            return await self._carry(attempt, opened, finish, request)
        whole = False
        try:
            response, whole = await self._relay(call, opened, request)
            return response
        finally:
            opened.end(whole)
            finish(whole)

    def explain(self, parsed: ParsedRequest, options: RouteOptions) -> tuple[Plan | Refusal, ClusterView]:
        """Decide without running anything."""
        view = self._cluster.view(parsed)
        return self._decide(view, parsed, options, explain=True), view

    def _decide(
        self, view: ClusterView, parsed: ParsedRequest, options: RouteOptions, *, explain: bool = False
    ) -> Plan | Refusal:
        return decide(
            view,
            parsed,
            self._policy,
            self._clock(),
            self._rng,
            entry=self._name,
            options=options,
            every=explain,
            commit=not explain,
        )

    async def _open_in_time(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        """Wait for a place and a first byte, no longer than the client allows."""
        if not attempt.call.options.deadline_s:
            return await self._open(attempt)
        try:
            async with asyncio.timeout(attempt.time_left(self._clock())):
                return await self._open(attempt)
        except TimeoutError:
            self._notes.denied("deadline")
            raise Refused(attempt.too_late()) from None

    async def _open(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        call = attempt.call
        while True:
            await self._wait_turn(attempt)
            started = self._clock()
            view = self._cluster.view(call.parsed)
            plan = self._decide(view, call.parsed, attempt.options(started))
            if isinstance(plan, Plan) and plan.target != self._name and not attempt.probing and _is_full(view, plan):
                full = full_peers(view, call.parsed.model)
                plan = self._decide(view, call.parsed, attempt.options(started, full=full))
                attempt.was_busy = True
                if isinstance(plan, Refusal):
                    attempt.must_wait = True
            self._notes.decided(call, plan, self._clock() - started)
            if isinstance(plan, Refusal):
                if not attempt.bounced and not attempt.must_wait:
                    raise Refused(attempt.explain(plan))
                attempt.must_wait = True
                continue
            finish = self._cluster.sent(plan)
            try:
                outcome = await self._runner(plan).open(
                    attempt.fitted(plan, view),
                    plan,
                    predicted_ms=_begins_after_ms(plan),
                    admitted=unnoticed if attempt.ticket is None else self._leaving(attempt),
                )
            except BaseException:
                finish(False)
                raise
            if isinstance(outcome, Opened):
                if plan.target != self._name:
                    self._cluster.worked(plan.target)
                if outcome.upstream.status < 400:
                    self._cluster.answered(call.parsed, plan.target, outcome.first)
                if attempt.ticket is not None:
                    attempt.leave(self._notes, self._clock(), served=True)
                if attempt.waited_s > 0:
                    outcome.headers = [*outcome.headers, (QUEUED_HEADER, str(round(attempt.waited_s * 1000)))]
                return outcome, self._freeing(plan, finish)
            finish(False)
            self._learn(attempt, outcome)
            if attempt.exhausted:
                raise Refused(attempt.broken())

    def _leaving(self, attempt: Attempts) -> Callable[[], None]:
        """What to call when a target has taken the request."""
        return lambda: attempt.leave(self._notes, self._clock(), served=True)

    def _freeing(self, plan: Plan, finish: Callable[[bool], None]) -> Callable[[bool], None]:
        """When a request that ran on a peer is over, there is a place for somebody who waits here."""
        if plan.target == self._name:
            return finish  # our own admission says so itself

        def finish_and_stir(whole: bool) -> None:
            finish(whole)
            self._room.stir()

        return finish_and_stir

    def _runner(self, plan: Plan) -> Runner:
        return self._local if plan.target == self._name else self._peers

    def _learn(self, attempt: Attempts, outcome: Busy | Failed) -> None:
        if isinstance(outcome, Busy):
            self._notes.retried("longer" if outcome.longer else "busy")
            self._cluster.busy(outcome.target, outcome.load)
            if outcome.longer:
                attempt.longer()
            else:
                attempt.bounce(outcome.target)
            return
        self._notes.retried("failed" if outcome.reached else "refused")
        if not outcome.innocent:
            self._cluster.failed(outcome.target, outcome.why)
        attempt.fail(outcome.target, outcome.why, reached=outcome.reached)

    async def _wait_turn(self, attempt: Attempts) -> None:
        """Stand in line when somebody of our kind waits already, or when every node is full; return at our turn."""
        if attempt.ticket is None:
            if not attempt.must_wait and not self._room.waiting(_line(attempt.call)):
                return
            self._join(attempt)
        elif attempt.keeps_turn:
            attempt.keeps_turn = False
            return
        else:
            attempt.ticket.give_way()
        ticket = attempt.ticket
        assert ticket is not None
        while True:
            left = attempt.wait_left(self._clock())
            if left <= 0:
                raise self._denied(self._room.deny(ticket, "No node had a place for it in time."), "waited")
            woken = await ticket.turn(min(left, RETRY_S))
            if ticket.denial is not None:
                raise self._denied(ticket.denial, "displaced")
            if woken:
                attempt.again()
                return
            self._room.retry(ticket.line)

    def _join(self, attempt: Attempts) -> None:
        call = attempt.call
        expected = outlook(self._cluster.view(call.parsed), call.parsed.model)
        joined = self._room.join(attempt.entrance(_line(call), expected, self._clock()))
        if isinstance(joined, Denial):
            raise self._denied(joined, "line")
        attempt.ticket = joined

    def _denied(self, denial: Denial, why: str) -> Refused:
        self._notes.denied(why)
        return Refused(too_busy(denial))

    async def _relay(self, call: Call, opened: Opened, request: web.BaseRequest) -> tuple[web.StreamResponse, bool]:
        """Write the answer; returns it and whether it was whole."""
        plan = opened.plan
        headers = for_downstream(opened.upstream.headers) + answer_headers(call, plan) + opened.headers
        left_s = None if call.deadline is None else call.deadline - self._clock()
        idle_s = self._deadlines.idle_s
        relay = Relay(request, opened.upstream, headers, idle_s=idle_s, left_s=left_s, on_piece=opened.on_piece)
        status = opened.upstream.status
        self._notes.answered(call, plan, status, first_byte_s=self._clock() - call.arrived, told=dict(opened.headers))
        try:
            if opened.upstream.whole:
                response = await relay.run(opened.first)
            elif plan.target == self._name:
                with self._handovers.runs(Fixed()):
                    response = await relay.run(opened.first)
            else:
                with self._downs.watch(plan.target, lambda: relay.hurry(DEATH_GRACE_S)):
                    response = await relay.run(opened.first)
        except (ConnectionError, asyncio.CancelledError):
            self._notes.broke(call, plan, "client gone")
            raise
        if relay.error is None:
            return response, True
        self._notes.broke(call, plan, relay.error)
        if plan.target != self._name and not relay.late:
            self._cluster.failed(plan.target, relay.error)
        return response, False

    # --- streams that can be carried

    async def _carry(
        self, attempt: Attempts, opened: Opened, finish: Callable[[bool], None], request: web.BaseRequest
    ) -> web.StreamResponse:
        """Write a streamed answer, on as many legs as it takes."""
        call, plan = attempt.call, opened.plan
        headers = for_downstream(opened.upstream.headers) + answer_headers(call, plan) + opened.headers
        self._notes.answered(
            call, plan, opened.upstream.status, first_byte_s=self._clock() - call.arrived, told=dict(opened.headers)
        )
        carrier = Carrier(call, attempt, self._open_leg, self._clock)
        stream = CarriedStream(
            request,
            carrier,
            idle_s=self._deadlines.idle_s,
            left_s=attempt.time_left(self._clock()),
            on_leg=self._began,
            on_lost=self._lost,
            on_carried=partial(self._notes.carried, call),
            may_move=self._may_move,
            moves=self._moves,
        )
        self._streams.add(stream)
        try:
            response = await stream.run(Leg(opened, finish, carrier.record), headers)
        except (ConnectionError, asyncio.CancelledError):
            self._notes.broke(call, plan, "client gone")
            raise
        finally:
            self._streams.discard(stream)
        if stream.error is not None:
            self._notes.broke(call, plan, stream.error)
        return response

    def end_streams(self, why: str) -> None:
        """End every stream that clients get through us with an error event: this node is about to be gone."""
        for stream in tuple(self._streams):
            stream.end(why)

    async def _open_leg(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        try:
            return await self._open(attempt)
        finally:
            attempt.leave(self._notes, self._clock())

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
        call = carrier.call
        view = self._cluster.view(call.parsed)
        plan = decide(
            view,
            call.parsed,
            self._policy,
            self._clock(),
            self._rng,
            entry=self._name,
            options=carrier.elsewhere(target),
            commit=False,
        )
        return isinstance(plan, Plan)


def _carriable(call: Call, opened: Opened) -> bool:
    """Whether an answer is a stream of events that we know how to carry."""
    upstream = opened.upstream
    if not call.carries or upstream.status != 200:
        return False
    return is_event_stream(upstream.headers) and length_of(upstream.headers) is None


def answer_headers(call: Call, plan: Plan) -> HeaderList:
    """Our own headers of an answer."""
    return [
        (TARGET_HEADER, plan.target),
        (REASON_HEADER, plan.reason),
        (HOPS_HEADER, str(plan.hops)),
        (REQUEST_ID, call.rid),
    ]


def _line(call: Call) -> str:
    """The line to stand in: who wants one certain node must not hold up who takes any."""
    return f"{call.parsed.model or ''}\0{call.options.force_target or ''}"


def _is_full(view: ClusterView, plan: Plan) -> bool:
    target = view.get(plan.target)
    return target is not None and not target.is_self and seems_full(view, target)


def _begins_after_ms(plan: Plan) -> float:
    cost = plan.cost
    return 0.0 if cost is None else cost.hop_ms + cost.queue_ms + cost.pull_ms + cost.prefill_ms + cost.barrier_ms
