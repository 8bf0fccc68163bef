"""How the main process runs a worker's request: decided, admitted and watched as ours, the exchange by the worker."""

from __future__ import annotations

from collections.abc import Callable

from node.decide import decide
from node.meta import NodeMeta
from node.plan import Plan, RouteOptions
from node.prompt import ParsedRequest
from node.relay.attempts import Attempts
from node.relay.call import Call, Opened
from node.relay.dispatch import Dispatcher
from node.relay.forward import PeerRunner
from node.relay.local import LocalRunner, Work
from node.relay.upstream import UpstreamAnswer
from node.workers.asked import Answer, AskedCall
from node.workers.down import TryLocal, TryPeer
from node.workers.told import told_plan


class AskedLocal(LocalRunner):
    """Runs workers' requests on the own engine. ``beside``: the runner of our own requests, whose parts it shares."""

    def __init__(self, beside: LocalRunner) -> None:
        # One count of attempts, since the engine knows requests by it, and one watch of the engine.
        vars(self).update(vars(beside))

    async def _exchange(self, work: Work) -> tuple[UpstreamAnswer, bytes]:
        call = _asked_call(work.call)
        asked = call.asked
        answer = Answer(asked)

        def guard() -> None:
            work.sentry = self._watch.guard(answer, lambda: work.streaming)

        asked.when_slow = guard  # nearly all are over before
        asked.count = work.events
        # The connector tells us what was cached, and pulls are ours: headers that the worker does not know.
        asked.waits = asked.queued or self._kv.connected or work.pulling is not None
        insert, hold_s, ask_ids, gather = self._additions(work)

        def tell(number: int) -> TryLocal:
            plan = told_plan(work.plan)
            waits, context, block = asked.waits, call.context, call.block
            return TryLocal(asked.id, number, plan, context, block, waits, insert, hold_s, ask_ids, gather)

        await asked.attempt(tell, answer)
        return answer, asked.first


class AskedPeers(PeerRunner):
    """Runs workers' requests on peers. ``beside``: the runner of our own."""

    def __init__(self, beside: PeerRunner) -> None:
        vars(self).update(vars(beside))

    async def _exchange(self, call: Call, plan: Plan, peer: NodeMeta, leg: str) -> tuple[UpstreamAnswer, bytes]:
        made = _asked_call(call)
        asked = made.asked
        answer = Answer(asked)
        asked.waits = asked.queued

        def tell(number: int) -> TryPeer:
            told = told_plan(plan)
            return TryPeer(
                asked.id, number, told, made.context, made.block, asked.waits, leg, peer.http, peer.tls, peer.boot
            )

        await asked.attempt(tell, answer)
        return answer, asked.first


class AskedDispatcher(Dispatcher):
    """Decides for workers, which relay and carry the answers themselves."""

    async def open(self, attempt: Attempts) -> tuple[Opened, Callable[[bool], None]]:
        """Run a request as far as its first piece; what it returns has to be ended.

        :raises Refused: nobody runs it.
        """
        try:
            return await self._open(attempt)
        finally:
            attempt.leave(self._notes, self._clock())

    def elsewhere(self, parsed: ParsedRequest, options: RouteOptions) -> bool:
        """Whether somebody would be asked to go on with a request."""
        view = self._cluster.view(parsed)
        plan = decide(
            view, parsed, self._policy, self._clock(), self._rng, entry=self._name, options=options, commit=False
        )
        return isinstance(plan, Plan)


def _asked_call(call: Call) -> AskedCall:
    assert isinstance(call, AskedCall), "not a worker's call"
    return call
