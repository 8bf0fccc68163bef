"""``/peer/kv/take``: a node that is about to go asks us to take over KV blocks. We pull what there is room for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from aiohttp import web

from kvmigrate.pull_types import Reason
from node.errors import RemoteError
from node.http.errors import ApiError, ApiFailure
from node.http.intake import header_list, read_small_body
from node.http.peer import PeerRoutes
from node.http.signature import PeerCall
from node.kv_offer import Offer, Taken, decode_offer
from node.metrics import Metrics
from node.relay.headers import internal

#: Offers under way at a time; the pool's side makes one copy, the others are told that it is busy.
MAX_TAKING: Final = 8


class TakesOver(Protocol):
    """What the route needs of `node.kv.KvSide`."""

    async def take(self, source: str, offer: Offer) -> Taken:
        """Copy what is offered."""
        ...


class TakeRoute:
    """The handler. Who asks is in the signed plan, and where its blocks are only in the membership."""

    def __init__(self, peer: PeerRoutes, kv: TakesOver, *, draining: Callable[[], bool], metrics: Metrics) -> None:
        self._peer = peer
        self._kv = kv
        self._draining = draining
        self._metrics = metrics
        self._taking: set[asyncio.Task[Taken]] = set()

    async def serve(self, request: web.BaseRequest) -> web.Response:
        """Take what is offered, and tell what came of it."""
        rid = request.headers.get("X-Request-Id", "")
        call = PeerCall(request.method, request.raw_path, rid, internal(header_list(request)))
        plan, signed = self._peer.check(call, request.remote)
        body = await read_small_body(request)
        if signed is not None and not signed.matches(body):
            self._metrics.remote_errors.labels("body").inc()
            raise ApiFailure(ApiError(403, "peer_body", "The body is not the one that was signed."))
        try:
            offer = decode_offer(body)
        except RemoteError as broken:
            self._metrics.remote_errors.labels("offer").inc()
            raise ApiFailure(ApiError(400, "bad_offer", str(broken))) from broken
        taken = await self._take(plan.entry, offer)
        return web.Response(body=taken.encode(), content_type="application/msgpack")

    async def _take(self, source: str, offer: Offer) -> Taken:
        if self._draining():
            return Taken(Reason.BUSY, "it is drained itself")
        if len(self._taking) >= MAX_TAKING:
            return Taken(Reason.BUSY, "it takes over from others")
        # In a task of its own: what has come is announced even if whoever asked is gone meanwhile.
        work = asyncio.create_task(self._kv.take(source, offer), name="grapevine-take")
        self._taking.add(work)
        work.add_done_callback(self._taking.discard)
        return await asyncio.shield(work)
