"""Traces of the requests that pass through a node.

| span | where | what |
|---|---|---|
| `request` | entry | a client's request, until its answer is over |
| `queue` | entry | a stay in the waiting room |
| `decide` | entry | one decision, with its reason |
| `forward` | entry | an attempt on a peer |
| `serve` | target | a peer's request |
| `pull` | target | KV blocks that are pulled for it |
| `lookup` | source | what the source has of them |
| `engine` | entry or target | an attempt on the own engine, which goes on in vLLM's own trace |
| `carry` | entry | a stream between the loss of one leg and the first piece of the next |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from node import __version__
from node.plan import Plan, Refusal
from node.relay.call import Call
from node.relay.carry.lost import Lost
from node.relay.dispatch import HOPS_HEADER, REASON_HEADER, TARGET_HEADER
from node.relay.local import Kv
from node.relay.ports import Notes, Peers, Runner
from node.relay.refused import Refused
from node.tracing.runners import TracedKv, TracedPeers, TracedRunner
from node.tracing.trace import Attributes, begin, parent_in, traceparent

_TOLD = {TARGET_HEADER: "grapevine.target", REASON_HEADER: "grapevine.reason", HOPS_HEADER: "grapevine.hops"}

Run = Callable[[Call], Awaitable[web.StreamResponse]]


class Tracing:
    """Makes the spans of one node."""

    def __init__(self, name: str, provider: TracerProvider) -> None:
        self._name = name
        self._provider = provider
        self._tracer = provider.get_tracer("grapevine", __version__)

    async def request(self, call: Call, age_s: float, run: Run) -> web.StreamResponse:
        """Run a client's request within a span; it came ``age_s`` seconds ago."""
        return await self._within("request", call, age_s, run)

    async def serve(self, call: Call, plan: Plan, age_s: float, run: Run) -> web.StreamResponse:
        """Run a peer's request within a span of the peer's trace."""
        return await self._within("serve", call, age_s, run, {"grapevine.entry": plan.entry})

    def looked_up(self, tag: str, peer: str, blocks: int, seconds: float) -> None:
        """Note that ``peer`` has asked for KV blocks of ours, within its trace. Any thread."""
        attributes: Attributes = {"grapevine.node": self._name, "peer": peer, "blocks": blocks}
        parent = traceparent(tag)
        begin(self._tracer, "lookup", attributes, parent=parent, kind=SpanKind.SERVER, ago_s=seconds).end()

    async def close(self) -> None:
        """Send what is left, for as long as the exporter may take (`node.tracing.export`)."""
        await asyncio.to_thread(self._provider.shutdown)

    def runner(self, runner: Runner) -> Runner:
        """The runner on the own engine, with spans."""
        return TracedRunner(runner)

    def peers(self, peers: Peers) -> Peers:
        """The runner on peers, with spans."""
        return TracedPeers(peers)

    def kv(self, kv: Kv) -> Kv:
        """The KV side, with spans."""
        return TracedKv(kv)

    def notes(self, notes: Notes) -> Notes:
        """Who is told what happened, with spans."""
        return TracedNotes(notes)

    async def _within(
        self, name: str, call: Call, age_s: float, run: Run, more: Attributes = MappingProxyType({})
    ) -> web.StreamResponse:
        attributes = {
            "http.request.method": call.method,
            "url.path": call.target.partition("?")[0],
            "gen_ai.request.model": call.parsed.model or "",
            "grapevine.node": self._name,
            "grapevine.request_id": call.rid,
            **more,
        }
        parent = parent_in(call.headers)
        trace = begin(self._tracer, name, attributes, parent=parent, kind=SpanKind.SERVER, ago_s=age_s)
        try:
            response = await run(replace(call, trace=trace))
        except Refused as refused:
            trace.end({"http.response.status_code": refused.refusal.status}, error=refused.refusal.message)
            raise
        except BaseException as error:
            gone = isinstance(error, ConnectionError | asyncio.CancelledError)
            trace.end(error="the client is gone" if gone else type(error).__name__)
            raise
        headers = response.headers
        told = {key: headers[header] for header, key in _TOLD.items() if header in headers}
        failed = response.status >= 500
        trace.end(
            {"http.response.status_code": response.status, **told}, error=f"status {response.status}" if failed else ""
        )
        return response


class TracedNotes:
    """`node.relay.ports.Notes` that also tells what happened to the span of its request."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.retried = notes.retried
        self.denied = notes.denied
        self.gathered = notes.gathered

    def decided(self, call: Call, plan: Plan | Refusal, seconds: float) -> None:
        """A decision was made."""
        self._notes.decided(call, plan, seconds)
        if call.trace is None:
            return
        if isinstance(plan, Refusal):
            call.trace.past("decide", seconds, {"refused": plan.code})
            return
        told: dict[str, str | int] = {
            "target": plan.target,
            "reason": plan.reason,
            "policy": plan.policy,
            "candidates": len(plan.costs),
        }
        expected = {"prompt_tokens": plan.prompt_tokens, "cached_tokens": plan.matched_tokens}
        call.trace.past("decide", seconds, {**told, **expected, "source": plan.source or ""})

    def waited(self, call: Call, seconds: float) -> None:
        """A request left the waiting room."""
        self._notes.waited(call, seconds)
        if call.trace is not None:
            call.trace.past("queue", seconds, {})

    def answered(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A request was answered or refused."""
        self._notes.answered(call, plan, status, first_byte_s=first_byte_s, told=told)
        if call.trace is not None and first_byte_s is not None:
            call.trace.event("first byte", {"seconds": round(first_byte_s, 6)})

    def carried(self, call: Call, lost: Lost, seconds: float, failed: str) -> None:
        """A stream that lost its leg goes on, or failed to."""
        self._notes.carried(call, lost, seconds, failed)
        if call.trace is not None:
            call.trace.past("carry", seconds, {"cause": lost.cause, "from": lost.target, "failed": failed})

    def broke(self, call: Call, plan: Plan, why: str) -> None:
        """A stream broke after its first byte."""
        self._notes.broke(call, plan, why)
        if call.trace is not None:
            call.trace.event("broken", {"why": why})
