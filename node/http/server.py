"""The HTTP server of a node: every route in one table, on one listening socket."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from node.http.admin import Admin
from node.http.connection import Connection
from node.http.explain import Explain
from node.http.greeter import Greeter, Handshakes
from node.http.health import HealthRoutes
from node.http.openai import OpenAi
from node.http.page import PageRoutes
from node.http.peer import PeerRoutes
from node.http.router import Router
from node.http.state import StateRoutes
from node.http.take import TakeRoute
from node.kv_offer import TAKE_PATH
from node.peers import PEER_PREFIX
from node.relay.carry.marks import GONE_PATH

#: Connections of clients and peers at a time. A new one takes the place of one without a request, if there is one
#: among the oldest `LOOKED_AT`, else it is cut at once.
MAX_CONNECTIONS = 16_384
LOOKED_AT = 64
BACKLOG = 1024
#: Seconds that handlers get to end when they are cut.
CUT_S = 1.0


class Handles(Protocol):
    """Whoever answers requests; `node.http.router.Router`."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one."""
        ...


@dataclass(frozen=True, slots=True)
class Routes:
    """The groups of routes of one node."""

    openai: OpenAi
    explain: Explain
    peer: PeerRoutes
    take: TakeRoute
    state: StateRoutes
    health: HealthRoutes
    admin: Admin
    page: PageRoutes

    def router(self) -> Router:
        """Return the table."""
        router = Router()
        router.add_prefix("/v1/", self.openai.serve)
        router.add_prefix(f"{PEER_PREFIX}/v1/", self.peer.serve)
        router.add("POST", PEER_PREFIX + GONE_PATH, self.peer.serve)
        router.add("POST", PEER_PREFIX + TAKE_PATH, self.take.serve)
        for path in ("/tokenize", "/detokenize"):
            router.add_all(path, self.openai.serve)
            router.add_all(PEER_PREFIX + path, self.peer.serve)
        router.add("POST", "/route/explain", self.explain.explain)
        router.add("GET", "/route/recent", self.explain.recent)
        router.add("GET", "/gossip/state", self.state.state)
        router.add("GET", "/gossip/members", self.state.members)
        router.add("GET", "/healthz", self.health.healthz)
        router.add("GET", "/readyz", self.health.readyz)
        router.add("GET", "/metrics", self.health.metrics)
        self.page.add_to(router)
        self.admin.add_to(router)
        return router


class Plainly:
    """Hands on connections that speak no TLS."""

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, connection: socket.socket) -> None:
        """Begin with one."""
        task = self._loop.create_task(self._take(connection))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def close(self) -> None:
        """What was handed on stays."""

    async def _take(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it is gone again
            await self._loop.connect_accepted_socket(self._protocol, connection)


class HttpServer:
    """Serves a router on a listening socket."""

    def __init__(self, router: Handles, *, share: int = 1) -> None:
        self._router = router
        #: It may have one of so many parts of all connections.
        self._share = share
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        #: In the order in which they came.
        self._connections: dict[Connection, None] = {}
        self._gone = asyncio.Event()
        self._closed = self._stopped = False
        self._server: asyncio.Server | Greeter | Handshakes | Plainly | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve on ``listener``, which is closed with the server."""
        loop = asyncio.get_running_loop()

        def connected() -> Connection:
            return Connection(self._handle, self, loop)

        if tls is None:
            self._server = await loop.create_server(connected, sock=listener, backlog=BACKLOG)
            return
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._server = Greeter(listener, tls, connected)

    def adopt(self, tls: ssl.SSLContext | None = None) -> Callable[[socket.socket], None]:
        """Serve connections that somebody else accepts: give each to what is returned."""
        loop = asyncio.get_running_loop()

        def connected() -> Connection:
            return Connection(self._handle, self, loop)

        greeted = self._server = Handshakes(tls, connected) if tls is not None else Plainly(connected)
        return greeted.begin

    async def start_inside(self, listener: socket.socket) -> None:
        """Serve on a Unix socket, which is closed with the server."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Connection(self._handle, self, loop), sock=listener)

    async def stop_accepting(self) -> None:
        """Take no new connections; open ones end with the answers that they wait for, idle ones now."""
        self._stopped = True
        if self._server is not None:
            server, self._server = self._server, None
            server.close()
        for connection in list(self._connections):
            connection.finish()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    @property
    def answering(self) -> int:
        """Requests that are being answered now."""
        return self._active

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._active += 1
        self._idle.clear()
        try:
            return await self._router.handle(request)
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    # --- `node.http.connection.Connections`

    def opened(self, connection: Connection) -> bool:
        """Count a connection; False when there are too many, or it was accepted just before we closed."""
        if self._closed or (len(self._connections) >= -(-MAX_CONNECTIONS // self._share) and not self._make_room()):
            return False
        self._connections[connection] = None
        if self._stopped:  # it was accepted before, and handed over just now
            connection.once()
        return True

    def _make_room(self) -> bool:
        """Cut the connection that has had no request for longest: who holds many open locks nobody out."""
        for connection in tuple(itertools.islice(self._connections, LOOKED_AT)):
            del self._connections[connection]
            if connection.waits:
                connection.cut()
                return True
            self._connections[connection] = None  # at the end: it is looked at last
        return False

    def closed(self, connection: Connection) -> None:
        """Count it no more."""
        self._connections.pop(connection, None)
        if not self._connections:
            self._gone.set()

    async def close(self) -> None:
        """Close everything and cut what still runs. Idempotent."""
        self._closed = True
        await self.stop_accepting()
        for connection in list(self._connections):
            connection.cut()
        if self._connections:
            self._gone.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await self._gone.wait()
                    await self._idle.wait()
