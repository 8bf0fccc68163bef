"""The way of a request at its entry: decide, try, and write the one answer that the client sees.

Rules:
1. Every attempt rests on a decision made just before it, on the view as it is then.
2. A target that is full costs one of two bounces; after them the request waits in the bounded room and decides
   anew whenever something changed (late binding), until its deadline. It leaves the line as soon as a target has
   taken it, long before its first byte: whoever stands behind it must not wait for its whole answer.
3. A target that fails before its first byte is left out for this request, and for all requests for a while
   (`node.peers.Circuits`). After the first byte nothing is tried again here.
4. An attempt that was opened is ended exactly once, however the client or the target behaves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from aiohttp import web

from node.admission import WaitingRoom
from node.decide import decide
from node.plan import Plan, Refusal, RouteOptions
from node.policy import Policy
from node.prompt import ParsedRequest
from node.relay.answer import Relay
from node.relay.attempts import Attempts
from node.relay.call import Busy, Call, Failed, Opened
from node.relay.deadlines import Deadlines
from node.relay.downs import Downs
from node.relay.headers import REQUEST_ID, HeaderList, for_downstream
from node.relay.ports import Cluster, Notes, Runner
from node.view import ClusterView

#: Seconds a request waits for a place before it is refused.
MAX_WAIT_S = 60.0
#: The first of a line decides anew at least this often, in seconds, even when nothing woke it.
RETRY_S = 0.5
#: A stream from a peer that gossip declared dead has this many seconds to show that it lives.
DEATH_GRACE_S = 2.0

TARGET_HEADER = "x-grapevine-target"
REASON_HEADER = "x-grapevine-reason"
HOPS_HEADER = "x-grapevine-hops"


class Refused(Exception):
    """No node can or would run the request: answer with this refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Dispatcher:
    """Runs requests somewhere in the cluster."""

    def __init__(
        self,
        name: str,
        *,
        cluster: Cluster,
        policy: Policy,
        local: Runner,
        peers: Runner,
        room: WaitingRoom,
        downs: Downs,
        deadlines: Deadlines,
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
        self._notes = notes
        self._rng = rng
        self._clock = clock

    async def run(self, call: Call, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``request``.

        :raises Refused: nobody runs it.
        """
        attempt = Attempts(call, self._clock() + MAX_WAIT_S)
        try:
            opened, finish = await self._open(attempt)
        except Refused as refused:
            self._notes.answered(call, None, refused.refusal.status, first_byte_s=None)
            raise
        finally:
            attempt.leave(self._notes, self._clock())
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

    async def _open(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        call = attempt.call
        while True:
            await self._wait_turn(attempt)
            started = self._clock()
            view = self._cluster.view(call.parsed)
            plan = self._decide(view, call.parsed, attempt.options())
            self._notes.decided(call, plan, self._clock() - started)
            if isinstance(plan, Refusal):
                if not attempt.bounced:
                    raise Refused(attempt.explain(plan))
                attempt.wait(attempt.explain(plan))
                continue
            finish = self._cluster.sent(plan)
            try:
                outcome = await self._runner(plan).open(
                    call,
                    plan,
                    predicted_ms=_begins_after_ms(plan),
                    admitted=lambda: attempt.leave(self._notes, self._clock()),
                )
            except BaseException:
                finish(False)
                raise
            if isinstance(outcome, Opened):
                self._cluster.worked(plan.target)
                if outcome.upstream.status < 400:
                    self._cluster.answered(call.parsed, plan.target, outcome.first)
                return outcome, finish
            finish(False)
            self._learn(attempt, outcome)
            if attempt.exhausted:
                raise Refused(attempt.broken())

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
        """Stand in line when somebody of our model waits already, or when every node has refused."""
        line = _line(attempt.call)
        if attempt.ticket is None:
            if not attempt.must_wait and not self._room.waiting(line):
                return
            attempt.ticket = self._room.join(line, first=attempt.stood)
            attempt.joined_at = self._clock()
            if attempt.ticket is None:
                raise Refused(attempt.too_busy("The queue of this node is full."))
        while True:
            left = attempt.deadline - self._clock()
            if left <= 0:
                raise Refused(attempt.too_busy("No node had a place for it in time."))
            if await attempt.ticket.turn(min(left, RETRY_S)) or attempt.ticket.first:
                attempt.again()
                return

    async def _relay(self, call: Call, opened: Opened, request: web.BaseRequest) -> tuple[web.StreamResponse, bool]:
        """Write the answer; returns it and whether it was whole."""
        plan = opened.plan
        headers = for_downstream(opened.upstream.headers) + answer_headers(call, plan) + opened.headers
        idle_s = self._deadlines.idle_s
        relay = Relay(request, opened.upstream, headers, idle_s=idle_s, on_piece=opened.on_piece)
        status = opened.upstream.status
        self._notes.answered(call, plan, status, first_byte_s=self._clock() - call.arrived, told=dict(opened.headers))
        try:
            with self._downs.watch(plan.target, lambda: relay.hurry(DEATH_GRACE_S)):
                response = await relay.run(opened.first)
        except (ConnectionError, asyncio.CancelledError):
            self._notes.broke(call, plan, "client gone")
            raise
        if relay.error is None:
            return response, True
        self._notes.broke(call, plan, relay.error)
        if plan.target != self._name:
            self._cluster.failed(plan.target, relay.error)
        return response, False


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


def _begins_after_ms(plan: Plan) -> float:
    cost = plan.cost
    return 0.0 if cost is None else cost.hop_ms + cost.queue_ms + cost.pull_ms + cost.prefill_ms + cost.barrier_ms
