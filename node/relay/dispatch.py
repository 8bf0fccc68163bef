"""The way of a request at its entry: decide, try, and write the one answer that the client sees.

Rules:
1. Every attempt rests on a decision made just before it, on the view as it is then.
2. A target that is full costs one of two bounces, one that seems to be full none; then the request waits in the
   bounded room (`node.room`) and decides anew when its turn comes (late binding). It leaves the line as soon as a
   target has taken it, long before its first byte: whoever stands behind it must not wait for its whole answer.
3. A target that fails before its first byte is left out for this request, and for all requests for a while
   (`node.peers.Circuits`). After the first byte an answer may be carried on (`node.relay.carry`), with the same record
   of what was tried; any other is not tried again.
4. An attempt that was opened is ended exactly once, however the client or the target behaves.
5. The client's deadline ends waiting, attempts and answer alike, and travels with the plan.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from node.decide import decide
from node.outlook import full_peers, outlook, seems_full
from node.plan import Plan, Refusal, RouteOptions
from node.policy import Policy
from node.prompt import ParsedRequest
from node.relay.answer import Relay
from node.relay.attempts import Attempts, too_busy
from node.relay.call import Busy, Call, Failed, Opened
from node.relay.carry.entry import Carried, carriable
from node.relay.deadlines import Deadlines
from node.relay.downs import DEATH_GRACE_S, Downs
from node.relay.handover import Fixed, Handovers
from node.relay.headers import REQUEST_ID, HeaderList, for_downstream
from node.relay.ports import Cluster, Notes, Peers, Runner, unnoticed
from node.relay.refused import Refused
from node.room import WaitingRoom
from node.turns import RETRY_S, Denial
from node.view import ClusterView

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
        self._notes = notes
        self._rng = rng
        self._clock = clock
        self._carried = Carried(
            name,
            cluster=cluster,
            peers=peers,
            downs=downs,
            deadlines=deadlines,
            handovers=handovers,
            notes=notes,
            open_leg=self._open_leg,
            decide=self._would_go,
            clock=clock,
        )

    async def run(self, call: Call, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``request``.

        :raises Refused: nobody runs it.
        """
        call = self._carried.taken(call)
        attempt = Attempts(call)
        opened, finish = await self._first(attempt)
        if carriable(call, opened.upstream):
            headers = _headers(call, opened)
            if call.parsed.stream:
                return await self._carried.write(attempt, opened, finish, request, headers)
            gathered = await self._carried.gather(attempt, opened, finish, request, headers)
            if isinstance(gathered, web.StreamResponse):
                return gathered
            if gathered is None:
                attempt.anew(replace(call, carries=False))
                opened, finish = await self._first(attempt)
            else:
                opened, finish = gathered.opened, gathered.finish
        whole = False
        try:
            response, whole = await self._relay(call, opened, request)
            return response
        finally:
            opened.end(whole)
            finish(whole)

    async def _first(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        """Open what the client is to get. :raises Refused: nobody runs it."""
        try:
            return await self._open_in_time(attempt)
        except Refused as refused:
            self._notes.answered(attempt.call, None, refused.refusal.status, first_byte_s=None)
            raise
        finally:
            if attempt.ticket is not None:
                attempt.leave(self._notes, self._clock())

    def end_streams(self, why: str) -> None:
        """End what clients get through us with an error: this node is about to be gone."""
        self._carried.end_streams(why)

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
        headers = _headers(call, opened)
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

    def _would_go(self, view: ClusterView, parsed: ParsedRequest, options: RouteOptions) -> Plan | Refusal:
        """Decide without leaving a trace of it."""
        return decide(
            view, parsed, self._policy, self._clock(), self._rng, entry=self._name, options=options, commit=False
        )

    async def _open_leg(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        try:
            return await self._open(attempt)
        finally:
            attempt.leave(self._notes, self._clock())


def _headers(call: Call, opened: Opened) -> HeaderList:
    """The headers of an answer: its engine's, then ours."""
    plan = opened.plan
    ours = [
        (TARGET_HEADER, plan.target),
        (REASON_HEADER, plan.reason),
        (HOPS_HEADER, str(plan.hops)),
        (REQUEST_ID, call.rid),
    ]
    return for_downstream(opened.upstream.headers) + ours + opened.headers


def _line(call: Call) -> str:
    """The line to stand in: who wants one certain node must not hold up who takes any."""
    return f"{call.parsed.model or ''}\0{call.options.force_target or ''}"


def _is_full(view: ClusterView, plan: Plan) -> bool:
    target = view.get(plan.target)
    return target is not None and not target.is_self and seems_full(view, target)


def _begins_after_ms(plan: Plan) -> float:
    cost = plan.cost
    return 0.0 if cost is None else cost.hop_ms + cost.queue_ms + cost.pull_ms + cost.prefill_ms + cost.barrier_ms
