"""Blocking I/O of transfer frames over one connection, every call with a deadline. Used in threads only.

How the bytes go, in clear or over TLS, is in `streams`.

Raises RemoteError when the other side breaks the protocol, TimeoutError when it is too slow, other OSErrors when the
connection is gone. After any of them the connection is unusable.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from . import messages, wire
from .digest import RunningDigest
from .errors import RemoteError
from .streams import PlainStream, Stream, TlsStream
from .tls import PullerTls, SourceTls

#: Large enough to keep a fast link busy between two reads, small enough that a piece is still in the L2 cache when it
#: is hashed.
PIECE_BYTES: Final = 512 << 10
_SKIPPED: Final = 64 << 10


class Deadline:
    """A whole limit, and a limit on the time without progress (both seconds; the whole one from now on)."""

    def __init__(self, clock: Callable[[], float], whole_s: float, stall_s: float) -> None:
        self._clock = clock
        self._end = clock() + whole_s
        self.stall_s = stall_s

    def left(self) -> float:
        """Seconds until the whole limit; negative when it is over."""
        return self._end - self._clock()

    def wait(self) -> float:
        """Return how long the next socket call may take; TimeoutError when the whole limit is over."""
        left = self.left()
        if left <= 0:
            raise TimeoutError("deadline over")
        return min(left, self.stall_s)

    def within(self, whole_s: float) -> Deadline:
        """Return a deadline for a part of the work."""
        return Deadline(self._clock, min(whole_s, self.left()), self.stall_s)


class Transport:
    """Frames over a connected socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream: Stream = PlainStream(sock)
        self._swapping = threading.Lock()
        self._closed = False
        self._prefix = bytearray(wire.PREFIX_BYTES)

    def encrypt(self, tls: SourceTls | PullerTls, deadline: Deadline) -> bytes:
        """Go over to TLS before anything was sent; returns the channel binding. ssl.SSLError, which is an OSError."""
        with self._swapping:
            if self._closed or not isinstance(self._stream, PlainStream):
                raise ConnectionAbortedError("closed")
            sock = tls.wrap(self._stream.socket)
            self._stream = stream = TlsStream(sock)
        stream.handshake(deadline.wait())
        return tls.binding(sock)

    def first_byte(self, deadline: Deadline) -> bytes:
        """Wait for the other side's first byte, and leave it there; nothing when it hung up."""
        return self._stream.peek(deadline.wait())

    @property
    def socket(self) -> socket.socket:
        """The socket below."""
        return self._stream.socket

    def send(self, message: messages.Message, deadline: Deadline) -> None:
        """Send a control frame."""
        self._send_all(memoryview(wire.encode(message)), deadline)

    def send_block(self, header: messages.BlockHeader, data: memoryview, deadline: Deadline) -> None:
        """Send a block straight from memory."""
        prefix = memoryview(wire.encode(header))
        sent = self._stream.send([prefix, data], deadline.wait())
        self._send_all(prefix[sent:], deadline)
        self._send_all(data[max(0, sent - len(prefix)) :], deadline)

    def receive(self, deadline: Deadline) -> messages.Message:
        """Receive a control frame, or the header of a block (then call `receive_data`)."""
        self._fill(memoryview(self._prefix), deadline)
        prefix = wire.read_prefix(self._prefix)
        if not prefix.body:
            return wire.decode(prefix, b"")
        body = bytearray(prefix.body)
        self._fill(memoryview(body), deadline)
        return wire.decode(prefix, body)

    def receive_data(self, target: memoryview, deadline: Deadline) -> bytes:
        """Receive a block's bytes into memory; returns their digest."""
        digest = RunningDigest()
        got = 0
        while got < len(target):
            piece = self._some(target[got : got + PIECE_BYTES], deadline)
            digest.update(target[got : got + piece])
            got += piece
        return digest.digest()

    def discard_data(self, nbytes: int, deadline: Deadline) -> None:
        """Receive and forget a block's bytes."""
        scrap = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
        while nbytes:
            nbytes -= self._some(scrap[: min(nbytes, len(scrap))], deadline)

    def wait_readable(self, deadline: Deadline) -> bool:
        """Wait until something arrives; False when the other side hung up instead. TimeoutError when nothing does."""
        return bool(self._stream.peek(deadline.wait()))

    def skip(self) -> None:
        """Throw away what has arrived so far."""
        self.socket.recv(_SKIPPED, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close the connection. Idempotent; wakes a thread that waits in it."""
        with self._swapping:
            self._closed = True
            self._stream.close()

    def _send_all(self, data: memoryview, deadline: Deadline) -> None:
        while data:
            data = data[self._stream.send([data], deadline.wait()) :]

    def _fill(self, target: memoryview, deadline: Deadline) -> None:
        while target:
            target = target[self._some(target, deadline) :]

    def _some(self, target: memoryview, deadline: Deadline) -> int:
        """Receive all of the target, or as much as comes in time."""
        got = self._stream.receive(target, deadline.wait())
        if not got:
            raise ConnectionResetError("the other side closed the connection")
        return got


def unexpected(message: messages.Message) -> RemoteError:
    """Return the error for a message that does not belong here."""
    return RemoteError(f"transfer: unexpected {type(message).__name__}")
