"""``/peer/*``: requests that other nodes forward to us. We admit on live state or refuse at once; never forward on.

Rules:
1. Authenticated: a signature by the cluster key (`node.http.signature`), or without a key the address of a member.
2. A plan that names another target is refused, so no request can go in circles.
3. A plan says up to which queue we are the better choice: with a longer one we say so, while somebody else may still
   be asked (`node.decide`).
4. Every refusal carries `REFUSED_HEADER` (or `BUSY_HEADER` with our fresh load vector), so that the entry can tell
   it from an answer of our engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from node.errors import RemoteError
from node.http.auth import check_peer
from node.http.errors import ApiError, ApiFailure
from node.http.intake import BodyRoom, Held, header_list, parse, read_body, request_id
from node.http.signature import PeerCall, PeerSigner, SignedBody
from node.load import LoadVector
from node.logs import set_request
from node.metrics import Metrics, status_label
from node.peers import BUSY_HEADER, FULL, GIST_HEADER, LOAD_HEADER, LONGER, PEER_PREFIX, PLAN_HEADER, REFUSED_HEADER
from node.plan import Plan, RouteOptions, decode_plan
from node.prompt import ParsedRequest, gist
from node.registry import Registry
from node.relay.answer import Relay
from node.relay.call import Busy, Call, Failed, Opened
from node.relay.carry import hint
from node.relay.carry.marks import CARRY_HEADER, CHUNKS_HEADER, GONE_MAX_S, GONE_PATH, MAX_LEG
from node.relay.deadlines import Deadlines
from node.relay.forward import write_load
from node.relay.handover import Handovers, Leg, PeerStream
from node.relay.headers import for_downstream, for_upstream, internal
from node.relay.ports import Runner
from node.settings import Settings

if TYPE_CHECKING:
    from node.tracing.tracing import Tracing

#: Seconds beyond a request's deadline that its target keeps working.
DEADLINE_SLACK_S = 0.5


class PeerRoutes:
    """The routes that only peers use."""

    def __init__(
        self,
        settings: Settings,
        *,
        registry: Registry,
        signer: PeerSigner,
        local: Runner,
        metrics: Metrics,
        deadlines: Deadlines,
        bodies: BodyRoom,
        handovers: Handovers,
        vector: Callable[[], LoadVector],
        queued_ms: Callable[[], float],
        tracing: Tracing | None,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._signer = signer
        self._local = local
        self._metrics = metrics
        self._deadlines = deadlines
        self._bodies = bodies
        self._handovers = handovers
        self._vector = vector
        self._queued_ms = queued_ms
        self._tracing = tracing
        self._clock = clock

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Run a forwarded request, or refuse it."""
        arrived = self._clock()
        with self._bodies.hold() as held:
            try:
                plan, signed = self._check(request)
                if request.raw_path == PEER_PREFIX + GONE_PATH:
                    return await self._gone(plan, request)
                call = await self._take(request, arrived, plan, held, signed)
            except ApiFailure as failure:
                if failure.error.status == 429:
                    return self._busy(Busy(self._settings.name), request_read=False)
                return self._refuse(failure.error)
            if self._tracing is None:
                return await self._run(call, plan, request)
            run = partial(self._run, plan=plan, request=request)
            return await self._tracing.serve(call, plan, self._clock() - arrived, run)

    async def _gone(self, plan: Plan, request: web.BaseRequest) -> web.Response:
        """An entry has closed an attempt, and begins another one elsewhere when this one has ended."""
        name = internal(header_list(request)).get(CARRY_HEADER, "")
        await self._handovers.gone((plan.entry, name), GONE_MAX_S)
        return web.Response()

    async def _run(self, call: Call, plan: Plan, request: web.BaseRequest) -> web.StreamResponse:
        if plan.patience_ms and self._queued_ms() > plan.patience_ms:
            return self._busy(Busy(plan.target, longer=True))
        # The entry ends it first; this is for an entry that cannot be reached any more.
        left_s = plan.deadline_s + DEADLINE_SLACK_S if plan.deadline_s else None
        began = self._clock()
        try:
            async with asyncio.timeout(left_s):
                outcome = await self._local.open(call, plan, predicted_ms=0.0)
        except TimeoutError:
            return self._refuse(ApiError(504, "deadline_exceeded", "The time that the request was given is over."))
        if isinstance(outcome, Busy):
            return self._busy(outcome)
        if isinstance(outcome, Failed):
            return self._refuse(ApiError(503, "target_failed", outcome.why))
        left = None if left_s is None else left_s - (self._clock() - began)
        leg = internal(header_list(request)).get(CARRY_HEADER, "")
        return await self._relay(call, outcome, request, (plan.entry, leg[:MAX_LEG]), left)

    def _check(self, request: web.BaseRequest) -> tuple[Plan, SignedBody | None]:
        rid = request.headers.get("X-Request-Id", "")
        call = PeerCall(request.method, request.raw_path, rid, internal(header_list(request)))
        return self.check(call, request.remote)

    def check(self, call: PeerCall, remote: str | None) -> tuple[Plan, SignedBody | None]:
        """What a call's plan is, and what its body has to be; each call is taken once.

        :raises ApiFailure: it is not genuine, or not for us.
        """
        try:
            signed = check_peer(self._signer, call, remote=remote, member_hosts=self._registry.member_hosts())
        except ApiFailure:
            self._metrics.remote_errors.labels("signature").inc()
            raise
        try:
            plan = decode_plan(call.ours.get(PLAN_HEADER, ""))
        except RemoteError as broken:
            self._metrics.remote_errors.labels("plan").inc()
            raise ApiFailure(ApiError(400, "bad_plan", str(broken))) from broken
        if plan.target != self._settings.name:
            raise ApiFailure(ApiError(421, "misdirected", f"This is not {plan.target}."))
        if not self._registry.serves(plan.model):
            raise ApiFailure(ApiError(503, "model_gone", f"This node does not serve {plan.model!r} now."))
        return plan, signed

    async def _take(
        self, request: web.BaseRequest, arrived: float, plan: Plan, held: Held, signed: SignedBody | None
    ) -> Call:
        target = request.raw_path.removeprefix(PEER_PREFIX)
        body = await read_body(request, self._settings.max_body_mib, held)
        if signed is not None and not signed.matches(body):
            self._metrics.remote_errors.labels("body").inc()
            raise ApiFailure(ApiError(403, "peer_body", "The body is not the one that was signed."))
        set_request(plan.rid)
        given = header_list(request)
        ours = internal(given)
        parsed = self._parsed(request, target.partition("?")[0], body, plan, ours.get(GIST_HEADER))
        if (chunks := ours.get(CHUNKS_HEADER)) is not None:
            parsed = self._continued(parsed, chunks)
        return Call(
            request.method,
            target,
            for_upstream(given),
            parsed,
            request_id(request),
            RouteOptions(rid=plan.rid),
            arrived,
            carries=CARRY_HEADER in ours,
        )

    def _parsed(self, request: web.BaseRequest, path: str, body: bytes, plan: Plan, told: str | None) -> ParsedRequest:
        """The request as its entry has read it, or as we do."""
        if told is not None and gist.plain(body):
            try:
                return gist.decode(told, path, plan.model, body)
            except RemoteError:
                self._metrics.remote_errors.labels("gist").inc()
        return parse(request, path, body)

    def _continued(self, parsed: ParsedRequest, header: str) -> ParsedRequest:
        """The rest of an answer, under the chunks of the prompt that its client sent."""
        try:
            chunks, size = hint.decode(header)
        except RemoteError:
            self._metrics.remote_errors.labels("chunks").inc()
            return parsed
        return replace(parsed, chunks=chunks, prompt_bytes=size, continues=True)

    async def _relay(
        self, call: Call, opened: Opened, request: web.BaseRequest, leg: Leg, left_s: float | None
    ) -> web.StreamResponse:
        headers = for_downstream(opened.upstream.headers) + opened.headers
        relay = Relay(
            request,
            opened.upstream,
            headers,
            idle_s=self._deadlines.idle_s,
            left_s=left_s,
            on_piece=opened.on_piece,
            marked=call.carries,
        )
        self._metrics.served.add((status_label(opened.upstream.status),))
        whole = False
        try:
            if opened.upstream.whole:
                response = await relay.run(opened.first)
            else:
                with self._handovers.runs(PeerStream(call, relay), leg if call.carries else None):
                    response = await relay.run(opened.first)
            whole = relay.error is None
        finally:
            opened.end(whole)
        return response

    def _busy(self, busy: Busy, *, request_read: bool = True) -> web.Response:
        self._metrics.served.add(("longer" if busy.longer else "busy",))
        headers = {BUSY_HEADER: LONGER if busy.longer else FULL, LOAD_HEADER: write_load(busy.load or self._vector())}
        response = ApiError(429, "node_busy", "This node is full.").response(headers)
        if not request_read:
            response.force_close()
        return response

    def _refuse(self, error: ApiError) -> web.Response:
        self._metrics.served.add(("refused",))
        why = error.message.encode("ascii", "replace").decode()[:200].replace("\n", " ").replace("\r", " ")
        response = error.response({REFUSED_HEADER: why})
        response.force_close()  # the body may not have been read
        return response
