"""The engine's side of the link: never blocks, never raises into the engine.

Rules:
1. Every call returns at once. A node that is away, slow or gone costs its messages, never the engine's time.
2. The send buffer is bounded. A message that does not fit is refused (`send` returns False) and not half sent.
3. Nothing is sent, and nothing survives, across connections: after a reconnect the hello goes first, and the caller
   hears `Disconnected` before anything of the new connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvmigrate.errors import RemoteError

from .codec import FrameSplitter, encode
from .instant import Room, recv_now, send_now
from .messages import Disconnected, Hello, Message

#: Bytes waiting for a node that does not read; the largest frame fits twice.
MAX_SEND_BUFFER: Final = 8 << 20
#: Bytes taken from the socket by one `poll`, so that a flood cannot hold up a scheduler step for long.
MAX_POLL_BYTES: Final = 8 << 20
#: Bytes of one call.
_CHUNK_BYTES: Final = 256 << 10
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0


class LinkClient:
    """One half of the connector, connected to its node. For use by one thread.

    `hello` is called for each connection and gives the first message. `clock` gives monotonic seconds.
    """

    def __init__(
        self, path: Path | str, hello: Callable[[], Hello], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = str(path)
        self._hello = hello
        self._clock = clock
        self._socket: socket.socket | None = None
        self._splitter = FrameSplitter()
        self._room = Room(_CHUNK_BYTES)
        self._out = bytearray()
        self._backoff = BACKOFF_FIRST_S
        self._retry_at = clock()
        self._lost: Disconnected | None = None
        self._closed = False
        self.refused = 0  #: messages that `send` refused, for the connector's log

    @property
    def connected(self) -> bool:
        """Whether there is a connection as far as is known."""
        return self._socket is not None

    def send(self, message: Message) -> bool:
        """Queue a message and send what the socket takes. False: not connected or buffer full, message dropped."""
        if not self._connect():
            self.refused += 1
            return False
        try:
            frame = encode(message)
        except (ValueError, TypeError, OverflowError):
            frame = b""
        if not frame or len(self._out) + len(frame) > MAX_SEND_BUFFER:
            self.refused += 1
            return False
        self._out += frame
        self._flush()
        return self._socket is not None

    def poll(self) -> list[Message | Disconnected]:
        """Connect if it is time to, push out what is queued, and return what has arrived."""
        found: list[Message | Disconnected] = []
        if self._connect():
            self._flush()
            self._receive(found)
        if self._lost is not None:  # everything received before the loss is void with it
            found = [self._lost]
            self._lost = None
        return found

    def close(self) -> None:
        """Close for good; later calls do nothing. Idempotent."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> bool:
        if self._socket is not None:
            return True
        if self._closed or self._lost is not None or self._clock() < self._retry_at:
            return False
        self._retry_at = self._clock() + self._backoff
        self._backoff = min(self._backoff * 2, BACKOFF_MAX_S)
        sock = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.connect(self._path)  # a Unix connect succeeds or fails at once: EAGAIN = backlog full
            self._out = bytearray(encode(self._hello()))
        except (OSError, ValueError):
            if sock is not None:
                sock.close()
            return False
        self._socket = sock
        self._splitter = FrameSplitter()
        self._flush()
        return self.connected

    def _flush(self) -> None:
        while self._out and self._socket is not None:
            try:
                sent = send_now(self._socket, bytes(self._out[:_CHUNK_BYTES]))
            except OSError as error:
                self._drop(f"node went away: {error.strerror}")
                return
            if not sent:
                return
            del self._out[:sent]

    def _receive(self, found: list[Message | Disconnected]) -> None:
        taken = 0
        while self._socket is not None and taken < MAX_POLL_BYTES:
            try:
                data = recv_now(self._socket, self._room)
                if data:
                    found += self._splitter.feed(data)
            except OSError as error:
                self._drop(f"node went away: {error.strerror}")
                return
            except RemoteError as error:
                self._drop(f"node broke the protocol: {error}")
                return
            if data is None:
                return
            if not data:
                self._drop("node closed the link")
                return
            taken += len(data)
            self._backoff = BACKOFF_FIRST_S  # it answers: the next loss starts with short waits again

    def _drop(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._out.clear()
        self._retry_at = self._clock() + self._backoff
        self._lost = Disconnected(why)
