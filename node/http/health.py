"""``/healthz`` (the node lives), ``/readyz`` (somebody can serve), ``/metrics``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from node.http.errors import json_response
from node.http.readiness import Readiness
from node.metrics import Metrics

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthRoutes:
    """What monitors ask for."""

    def __init__(self, readiness: Readiness, metrics: Metrics, engine_metrics: Callable[[], Awaitable[bytes]]) -> None:
        self._readiness = readiness
        self._metrics = metrics
        self._engine_metrics = engine_metrics

    async def healthz(self, request: web.BaseRequest) -> web.Response:
        """200 while the node's loop turns."""
        return json_response({"status": "ok"})

    async def readyz(self, request: web.BaseRequest) -> web.Response:
        """200 when any node, this one or a peer, can take a request, and this one is not about to leave."""
        serving = self._readiness.ask(request.remote or "")
        told = {"ready": bool(serving), "leaving": self._readiness.leaving, "nodes": serving}
        return json_response(told, status=200 if serving else 503)

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        """Our metrics, then the engine's own."""
        body = self._metrics.page() + await self._engine_metrics()
        return web.Response(body=body, headers={"Content-Type": _METRICS_TYPE})
