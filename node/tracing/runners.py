"""Spans around what runs requests, by wrapping it: the code that is wrapped knows nothing of traces.

Rules
1. Each attempt has a span: `forward` on a peer, `engine` on our own. It ends with its answer, whole or not.
2. Whoever runs the attempt gets the attempt's context in place of the client's.
3. A call without a trace (a probe of our own) is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from node.plan import Plan
from node.relay.call import Busy, Call, Opened, Outcome
from node.relay.ports import Peers, Runner, unnoticed
from node.tracing.trace import Attributes, Trace, without_context

if TYPE_CHECKING:
    from node.kv_pulling import Pulling
    from node.relay.local import Kv


class TracedRunner:
    """The runner on our own engine; its span begins when the engine gets the request (`TracedKv.begin`)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Try the plan's target once."""
        trace = call.trace
        if trace is None:
            return await self._runner.open(call, plan, predicted_ms=predicted_ms, admitted=admitted)
        own = replace(call, headers=without_context(call.headers))
        try:
            outcome = await self._runner.open(own, plan, predicted_ms=predicted_ms, admitted=admitted)
        except BaseException as error:
            _end_engine(trace, type(error).__name__)
            raise
        if isinstance(outcome, Opened):
            if (engine := trace.engine) is not None:
                trace.engine = None
                _end_with(outcome, engine)
        else:
            _end_engine(trace, told(outcome))
            trace.event("not run", {"target": plan.target, "why": told(outcome)})
        return outcome


class TracedPeers:
    """The runner on peers."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Try the plan's target once."""
        if call.trace is None:
            return await self._peers.open(call, plan, predicted_ms=predicted_ms, admitted=admitted)
        span = call.trace.child("forward", {"target": plan.target}, kind=SpanKind.CLIENT)
        sent = replace(call, headers=[*without_context(call.headers), *span.carried()])
        try:
            outcome = await self._peers.open(sent, plan, predicted_ms=predicted_ms, admitted=admitted)
        except BaseException as error:
            span.end(error=type(error).__name__)
            raise
        if isinstance(outcome, Opened):
            _end_with(outcome, span)
        else:
            span.end(error=told(outcome))
        return outcome

    async def settled(self, opened: Opened) -> None:
        """Wait, bounded, until the peer has ended an attempt that was closed here."""
        await self._peers.settled(opened)


class TracedKv:
    """The KV side as the runner on our own engine uses it."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        self.end = kv.end
        self.cached = kv.cached

    @property
    def connected(self) -> bool:
        """Our connector runs in the engine."""
        return self._kv.connected

    def begin(self, rid: str, call: Call, plan: Plan) -> None:
        """The engine is about to get this request, within a span of its own."""
        self._kv.begin(rid, call, plan)
        if call.trace is not None:
            attributes: Attributes = {"prompt_tokens": plan.prompt_tokens, "engine.request_id": rid}
            engine = call.trace.engine = call.trace.child("engine", attributes, kind=SpanKind.CLIENT)
            call.headers.extend(engine.carried())  # the list is this attempt's own (`TracedRunner`)

    async def begin_pull(self, rid: str, plan: Plan, call: Call) -> Pulling:
        """Begin to pull what the plan's source has; the span ends with the pull."""
        if call.trace is None:
            return await self._kv.begin_pull(rid, plan, call)
        span = call.trace.child("pull", {"source": plan.source or "", "chunks": plan.chunks}, kind=SpanKind.CLIENT)
        try:
            pulling = await self._kv.begin_pull(rid, plan, replace(call, trace=span))
        except BaseException as error:
            span.end(error=type(error).__name__)
            raise
        pulling.when_over(lambda blocks: span.end({"blocks": blocks}))
        return pulling


def told(outcome: Outcome) -> str:
    """Why an attempt has not begun."""
    if isinstance(outcome, Busy):
        return "its queue is longer" if outcome.longer else "it is full"
    return "" if isinstance(outcome, Opened) else outcome.why


def _end_engine(trace: Trace, error: str) -> None:
    engine, trace.engine = trace.engine, None
    if engine is not None:
        engine.end(error=error)


def _end_with(opened: Opened, span: Trace) -> None:
    """End a span with the attempt that it is of."""
    span.event("first byte", {"status": opened.upstream.status})
    end = opened.on_end

    def ended(whole: bool) -> None:
        end(whole)
        span.end({"http.response.status_code": opened.upstream.status}, error="" if whole else "not whole")

    opened.on_end = ended
