"""Takes connections that speak TLS: as many handshakes at a time as there is room for, each within its time.

A server of the event loop knows a connection when its handshake is over, and would let any number of silent ones use
up the file descriptors until then. Here the oldest handshake makes room for a new one: who opens connections and says
nothing locks nobody out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

#: Handshakes at a time, and seconds for one, and for the end of a connection. An honest one takes milliseconds.
MAX_HANDSHAKES = 1024
HANDSHAKE_S = 10.0
#: Seconds after which accepting is tried again, when the process has too many files open.
RETRY_S = 0.1

_log = logging.getLogger("grapevine.http")


class Handshakes:
    """Agrees on TLS with whoever has connected, and hands on what has."""

    def __init__(self, tls: ssl.SSLContext, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._tls = tls
        self._protocol = protocol
        self._running: dict[asyncio.Task[None], None] = {}

    def begin(self, connection: socket.socket) -> None:
        """Begin with one; the oldest that is not over has to make room where there are too many."""
        if len(self._running) >= MAX_HANDSHAKES:
            oldest = next(iter(self._running))
            del self._running[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._greet(connection))
        self._running[task] = None
        task.add_done_callback(self._over)

    def close(self) -> None:
        """End those that are not over. What was handed on stays. Idempotent."""
        for task in tuple(self._running):
            task.cancel()

    async def _greet(self, connection: socket.socket) -> None:
        """Agree on TLS; who cannot is no news."""
        with suppress(OSError, TimeoutError, ssl.SSLError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S,
            )

    def _over(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection could not be taken", exc_info=error)


class Greeter:
    """Accepts on a listening socket and hands on what has agreed on TLS."""

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._listener = listener
        self._handshakes = Handshakes(tls, protocol)
        self._accepting = asyncio.create_task(self._accept(), name="grapevine-accept")

    def close(self) -> None:
        """Take no more; handshakes end. What was handed on stays. Idempotent."""
        self._accepting.cancel()
        self._handshakes.close()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.error("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(RETRY_S)
                continue
            self._handshakes.begin(connection)
