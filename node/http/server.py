"""The HTTP server of a node: every route in one table, on one listening socket."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from aiohttp import web

from node.http.admin import Admin
from node.http.explain import Explain
from node.http.health import HealthRoutes
from node.http.openai import OpenAi
from node.http.peer import PeerRoutes
from node.http.router import Router
from node.http.state import StateRoutes
from node.peers import PEER_PREFIX
from node.relay.carry.marks import GONE_PATH

#: Header limits towards clients and peers: one line, and how many.
MAX_HEADER_LINE = 16 * 1024
MAX_HEADERS = 128
#: Seconds an idle kept-alive connection stays open: longer than the proxies in front of us keep theirs.
KEEPALIVE_S = 120.0
#: Bytes of a request held before its reader is paused.
READ_BUFFER = 256 * 1024
#: Seconds that the rest of a refused body is read for, so that the client sees the answer.
LINGER_S = 2.0
BACKLOG = 1024
#: Seconds that handlers get to end when they are cut.
CUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Routes:
    """The groups of routes of one node."""

    openai: OpenAi
    explain: Explain
    peer: PeerRoutes
    state: StateRoutes
    health: HealthRoutes
    admin: Admin

    def router(self) -> Router:
        """Return the table."""
        router = Router()
        router.add_prefix("/v1/", self.openai.serve)
        router.add_prefix(f"{PEER_PREFIX}/v1/", self.peer.serve)
        router.add("POST", PEER_PREFIX + GONE_PATH, self.peer.serve)
        for path in ("/tokenize", "/detokenize"):
            router.add_all(path, self.openai.serve)
            router.add_all(PEER_PREFIX + path, self.peer.serve)
        router.add("POST", "/route/explain", self.explain.explain)
        router.add("GET", "/gossip/state", self.state.state)
        router.add("GET", "/gossip/members", self.state.members)
        router.add("GET", "/healthz", self.health.healthz)
        router.add("GET", "/readyz", self.health.readyz)
        router.add("GET", "/metrics", self.health.metrics)
        router.add("GET", "/", self.health.page)
        self.admin.add_to(router)
        return router


class HttpServer:
    """Serves a router on a listening socket."""

    def __init__(self, router: Router) -> None:
        self._router = router
        #: Connections on which a request is being answered: one at a time each.
        self._busy: set[web.RequestHandler] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: web.ServerRunner | None = None
        self._site: web.SockSite | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on ``listener``, which is closed with the server."""
        server = web.Server(
            self._handle,
            handler_cancellation=True,  # a client that goes away ends its work at once
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            read_bufsize=READ_BUFFER,
            max_line_size=MAX_HEADER_LINE,
            max_field_size=MAX_HEADER_LINE,
            max_headers=MAX_HEADERS,
        )
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=CUT_S)
        await self._runner.setup()
        self._site = web.SockSite(self._runner, listener, backlog=BACKLOG)
        await self._site.start()

    async def stop_accepting(self) -> None:
        """Take no new connections; open ones end with the answer that they wait for, idle ones now."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection not in self._busy:  # a busy one would lose what its client still sends
                    connection.close()

    @property
    def answering(self) -> int:
        """Requests that are being answered now."""
        return len(self._busy)

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._busy.add(connection)
        self._idle.clear()
        try:
            return await self._router.handle(request)
        finally:
            self._busy.discard(connection)
            if self._site is None:
                connection.close()
            if not self._busy:
                self._idle.set()

    async def close(self) -> None:
        """Close everything and cut what still runs. Idempotent."""
        self._site = None
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
