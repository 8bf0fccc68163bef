"""A worker process: serves connections that the main process hands to it, and ends with it.

Rules
1. It holds sockets and bytes. Whatever is counted, decided or limited is asked of the main process (`link.py`).
2. It ends when the main process says so, when its channel closes, and when the main process dies in any other way (the
   kernel tells by a signal): none is ever left behind.
3. Signals of a terminal reach it too: it ignores them, since the main process ends it when its answers are over.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import uvloop

from gossip import ClusterKey, Keyring
from node import load as load_vector
from node import logs
from node.clients import Access
from node.collector import spare_collector
from node.engine.client import EngineAddress, open_session
from node.engine.guard import PR_SET_PDEATHSIG
from node.errors import LocalError
from node.http.intake import BodyRoom
from node.http.router import Router
from node.http.server import HttpServer
from node.http.signature import PeerSigner
from node.load import LoadVector
from node.peers import PEER_PREFIX, PeerClient
from node.policy import make_policy
from node.relay.carry.marks import GONE_PATH
from node.relay.deadlines import Deadlines
from node.relay.downs import Downs
from node.relay.handover import Handovers
from node.reload import CLIENTS, TLS
from node.room import WaitingRoom
from node.settings import Settings
from node.tls import ClusterTrust, ServerTls
from node.workers import down, up
from node.workers.channel import Channel
from node.workers.entry import EntryApi, EntryDispatcher, Exchanges, Names, Notes, Settling, Sights
from node.workers.guests import Counted, GuestRoutes, Guests
from node.workers.link import Link
from node.workers.passed import PassedOn

#: Seconds for the first word of the main process.
HELLO_S = 60.0
#: Sockets taken over at once before something else gets its turn.
SOCKETS_AT_ONCE = 32

_log = logging.getLogger("grapevine.workers")


class Worker:
    """The parts of one worker."""

    def __init__(self, hello: down.Hello, link: Link) -> None:
        self._link = link
        self._number = hello.number
        self.settings = settings = settings_of(hello.settings)
        self.deadlines = deadlines = Deadlines(**orjson.loads(hello.deadlines))
        self._ring = Keyring(ClusterKey.from_root(root) for root in hello.keys)
        self._trust = ClusterTrust(self._ring, settings.run_dir)
        self._signer = PeerSigner(self._ring)
        self._client = PeerClient(settings.name, self._signer, deadlines, self._trust)
        self._access = Access(settings, time.monotonic)
        self._tls = server_tls(settings, self._trust)
        socket_path = Path(hello.engine_socket) if hello.engine_socket is not None else None
        self._engine = EngineAddress(hello.engine_base, socket_path, hello.engine_key)
        self._load = LoadVector()
        self._handovers = Handovers()
        self._downs = Downs()
        self._sights = Sights(link)
        self._dispatcher: EntryDispatcher
        self._server: HttpServer
        self._serving = False
        #: Connections taken over so far.
        self._taken = 0
        self.ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, sockets: socket.socket) -> None:
        """Serve what comes over ``sockets``."""
        if self._access.path is not None:
            await asyncio.to_thread(self._access.load)
        tls = await asyncio.to_thread(self._tls.start) if self._tls is not None else None
        await self._client.start()
        settings, link, deadlines = self.settings, self._link, self.deadlines
        exchanges = Exchanges(link, self._engine, open_session(self._engine), self._client, deadlines)
        self._dispatcher = EntryDispatcher(
            settings.name,
            link=link,
            exchanges=exchanges,
            keyed=lambda: not self._access.open,
            cluster=self._sights,
            policy=make_policy(settings.policy),
            local=None,  # whoever decides runs it
            peers=Settling(link),
            room=WaitingRoom(0, time.monotonic),
            downs=self._downs,
            deadlines=deadlines,
            handovers=self._handovers,
            notes=Notes(link),
            rng=random.Random(),
            clock=time.monotonic,
        )
        self._server = HttpServer(self._router(exchanges), share=settings.workers)
        adopt = self._server.adopt(tls)
        sockets.setblocking(False)
        asyncio.get_running_loop().add_reader(sockets, self._take_over, sockets, adopt)
        self._serving = True
        spare_collector()
        link.send(up.Ready(os.getpid()))

    def _router(self, exchanges: Exchanges) -> Router:
        settings, link = self.settings, self._link
        bodies = BodyRoom(settings.max_body_mib, settings.workers)
        api = EntryApi(
            settings,
            names := Names(link),
            self._dispatcher,
            link=link,
            names=names,
            bodies=bodies,
            access=self._access,
            tracing=None,
            clock=time.monotonic,
        )
        guests = GuestRoutes(
            settings,
            link=link,
            registry=None,
            signer=self._signer,
            local=Guests(link, exchanges),
            metrics=Counted(link),
            deadlines=self.deadlines,
            bodies=bodies,
            handovers=self._handovers,
            vector=lambda: self._load,
            queued_ms=lambda: 0.0,  # looked at where it is admitted
            tracing=None,
            clock=time.monotonic,
        )
        passed = PassedOn(settings.inner_socket, self.deadlines, bodies, settings.max_body_mib)
        router = Router()
        router.add_all("/v1/models", passed.serve)
        router.add_prefix("/v1/models/", passed.serve)
        router.add_prefix("/v1/", api.serve)
        router.add_prefix(f"{PEER_PREFIX}/v1/", guests.serve)
        router.add_all(PEER_PREFIX + GONE_PATH, passed.serve)
        for path in ("/tokenize", "/detokenize"):
            router.add_all(path, api.serve)
            router.add_all(PEER_PREFIX + path, guests.serve)
        router.add_prefix("", passed.serve)
        return router

    def _take_over(self, sockets: socket.socket, adopt: Any) -> None:
        """Take connections that the main process has accepted."""
        for _ in range(SOCKETS_AT_ONCE):
            try:
                data, numbers, _, _ = socket.recv_fds(sockets, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, numbers = b"", []
            if not data:  # the main process is gone, its channel will say so too
                asyncio.get_running_loop().remove_reader(sockets)
                return
            self._taken += 1
            if not numbers:
                _log.error("a connection is lost: this worker may have no more files open (ulimit -n)")
            for number in numbers:
                connection = socket.socket(fileno=number)
                connection.setblocking(False)
                adopt(connection)

    def hear(self, message: Any) -> None:
        """Take news of the main process."""
        match message:
            case down.Ping():
                self._load = load_vector.decode(message.load)
                self._answer(message.number)
            case down.Ages():
                self._sights.heard(message.at, message.ages)
            case down.Down():
                self._downs.down(message.name)
            case down.MoveAll() if self._serving:
                self._dispatcher.move_all()
            case down.EndStreams() if self._serving:
                self._dispatcher.end_streams(message.why)
            case down.Keys():
                self._ring.fill([ClusterKey.from_root(root) for root in message.keys])
                self._trust.rekey()
            case down.Reread():
                self._keep(asyncio.get_running_loop().create_task(self._reread(message.number, message.what)))
            case down.Finish() if self._serving:
                self._keep(asyncio.get_running_loop().create_task(self._server.stop_accepting()))
            case down.Close():
                if not self._serving:
                    os._exit(0)
                self._keep(asyncio.get_running_loop().create_task(self._close()))
            case down.MoveAll() | down.EndStreams() | down.Finish():
                pass  # there is nothing yet
            case _:
                raise KeyError(type(message).__name__)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self, number: int) -> None:
        self._link.send(up.Pong(number, self._server.answering, self._server.connections, self._taken))

    async def _reread(self, number: int, what: str) -> None:
        """Read a file again that the main process could use."""
        try:
            if what == TLS and self._tls is not None:
                await asyncio.to_thread(self._tls.reload)
            elif what == CLIENTS:
                await asyncio.to_thread(self._access.load)
        except LocalError as error:
            _log.error("%s; what was read before stays in use", error)
        finally:
            if self._serving:
                self._answer(number)

    async def _close(self) -> None:
        await self._server.close()
        self.ended.set()


async def _run(channel_fd: int, sockets_fd: int) -> int:
    loop = asyncio.get_running_loop()
    hello: asyncio.Future[down.Hello] = loop.create_future()
    worker: Worker | None = None
    early: list[Any] = []  # said while this process started

    def hear(message: Any) -> None:
        if worker is not None:
            worker.hear(message)
        elif isinstance(message, down.Hello) and not hello.done():
            hello.set_result(message)
        else:
            early.append(message)

    def lost() -> None:
        os._exit(0)  # the main process is gone, and what it was asked for with it

    link = Link(lambda take: Channel(take, lost), hear)
    await loop.create_unix_connection(lambda: link.channel, sock=socket.socket(fileno=channel_fd))
    async with asyncio.timeout(HELLO_S):
        greeting = await hello
    settings = settings_of(greeting.settings)
    logs.set_up(settings, worker=greeting.number)
    worker = Worker(greeting, link)
    for message in early:
        worker.hear(message)
    try:
        await worker.start(socket.socket(fileno=sockets_fd))
    except LocalError as error:  # a file was in order when the main process read it
        _log.error("%s; until that is mended this worker does not start", error)
        return 1
    await worker.ended.wait()
    link.channel.close()
    return 0


def main() -> int:
    """Run a worker whose two sockets are the arguments."""
    channel_fd, sockets_fd, parent = (int(word) for word in sys.argv[1:4])
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return uvloop.run(_run(channel_fd, sockets_fd))


def _end_with(parent: int) -> None:
    """Be killed when the process that started this one dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # it died before


def settings_of(packed: bytes) -> Settings:
    """The settings in a greeting."""
    values: dict[str, Any] = orjson.loads(packed)
    for name in ("state_dir", "run_dir"):
        values[name] = Path(values[name])
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return Settings(**values)


def server_tls(settings: Settings, trust: ClusterTrust) -> ServerTls | None:
    """The TLS side of the HTTP port, None where that speaks none."""
    if not settings.tls_cert:
        return None
    return ServerTls(Path(settings.tls_cert), Path(settings.tls_key or settings.tls_cert), trust)
