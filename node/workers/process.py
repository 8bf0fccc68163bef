"""One worker as a process, seen from the main process: started, spoken to, given sockets, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from node.errors import RemoteError
from node.workers import down, up
from node.workers.channel import Channel
from node.workers.desk import Desk, Parts

#: Seconds for a worker to be ready; of silence from which it gets no more connections, and is taken to hang.
START_S = 60.0
LATE_S = 3.0
HANGS_S = 30.0

_log = logging.getLogger("grapevine.workers")


class WorkerProcess:
    """One worker. `start` it once; ``lost`` is called once, when it is gone."""

    def __init__(self, number: int, parts: Parts, lost: Callable[[WorkerProcess], None]) -> None:
        self.number = number
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self.desk = Desk(parts, self.send)
        #: What it said last: requests that it answers, and connections.
        self.answering = 0
        self.connections = 0
        #: Connections that it was given, and those that it said it has taken.
        self._given = self._taken = 0
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._sockets: socket.socket | None = None
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._ping = 0
        self._heard = self._loop.time()

    @property
    def pid(self) -> int:
        """Its process id, 0 before it has one."""
        return self._process.pid if self._process is not None else 0

    @property
    def load(self) -> int:
        """How much it has to do: connections, and those with a request twice."""
        return self.connections + self._given - self._taken + len(self.desk)

    @property
    def serves(self) -> bool:
        """Whether it is there."""
        return self.ready.is_set() and not self.gone.is_set()

    @property
    def takes(self) -> bool:
        """Whether it should be given connections: it is there, and its loop turns."""
        return self.serves and self._loop.time() - self._heard < LATE_S

    @property
    def hangs(self) -> bool:
        """Whether it has said nothing for so long that its connections are lost anyway."""
        limit = HANGS_S if self.ready.is_set() else START_S
        return not self.gone.is_set() and self._loop.time() - self._heard > limit

    async def start(self, hello: down.Hello) -> None:
        """Begin; it says that it is `ready` later."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets, sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.setblocking(False)
        ours.setblocking(False)
        passed = (theirs.fileno(), sockets.fileno())
        arguments = [str(number) for number in (*passed, os.getpid())]
        try:
            # In this thread: the kernel ends a worker when the thread that started it does.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - some milliseconds
                [sys.executable, "-m", "node.workers", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        except BaseException:
            ours.close()
            self._sockets.close()
            raise
        finally:
            theirs.close()
            sockets.close()
        channel = self._channel = Channel(self._take, self._end)
        await self._loop.create_unix_connection(lambda: channel, sock=ours)
        self.send(hello)

    def send(self, message: Any) -> None:
        """Tell it something; one that is gone hears nothing."""
        if self._channel is not None:
            self._channel.send(message)

    def give(self, connection: socket.socket) -> bool:
        """Hand over a connection; False when it cannot take one now. The caller closes its own handle."""
        if self._sockets is None:
            return False
        try:
            socket.send_fds(self._sockets, [b"c"], [connection.fileno()])
        except OSError:
            return False
        self._given += 1
        return True

    def ping(self, load: bytes, heard: asyncio.Future[None] | None = None) -> None:
        """Ask whether its loop turns; ``heard`` is set when all that it said before is taken in, or it is gone."""
        self._asks(lambda number: down.Ping(number, load), heard)

    def reread(self, what: str, heard: asyncio.Future[None]) -> None:
        """Let it read a file again; ``heard`` is set when it has, or is gone."""
        self._asks(lambda number: down.Reread(number, what), heard)

    def _asks(self, make: Callable[[int], Any], heard: asyncio.Future[None] | None) -> None:
        if not self.serves:
            if heard is not None:
                heard.set_result(None)
            return
        self._ping += 1
        if heard is not None:
            self._pings[self._ping] = heard
        self.send(make(self._ping))

    def kill(self) -> None:
        """End it now."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def reap(self) -> None:
        """Wait for its end; it must have been told to."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    def _take(self, message: Any) -> None:
        self._heard = self._loop.time()
        match message:
            case up.Pong():
                heard = self._pings.pop(message.number, None)
                self.answering, self.connections, self._taken = message.answering, message.connections, message.taken
                if heard is not None and not heard.done():
                    heard.set_result(None)
            case up.Ready():
                self.ready.set()
            case _:
                try:
                    self.desk.take(message)
                except RemoteError:
                    raise
                except Exception as error:
                    _log.exception("what worker %s said could not be taken", self.number)
                    raise RemoteError("worker: it was not understood") from error

    def _end(self) -> None:
        if self.gone.is_set():
            return
        self.gone.set()
        self.kill()
        self.answering = self.connections = 0
        for heard in self._pings.values():
            if not heard.done():
                heard.set_result(None)
        self._pings.clear()
        if self._sockets is not None:
            with contextlib.suppress(OSError):
                self._sockets.close()
            self._sockets = None
        self.desk.lost()
        self._lost(self)
