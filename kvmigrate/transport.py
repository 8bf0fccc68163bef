"""Blocking I/O of transfer frames over one socket, every call with a deadline. Used in threads only.

The kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO) instead of a poll before each call: one system call moves a whole
piece, and the time limit holds for the whole call, so a peer that sends a byte now and then gains nothing by it.

Raises RemoteError when the other side breaks the protocol, TimeoutError when it is too slow, other OSErrors when the
connection is gone. After any of them the connection is unusable.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final

from . import messages, wire
from .digest import RunningDigest
from .errors import RemoteError

#: Large enough to keep a fast link busy between two reads, small enough that a piece is still in the L2 cache when it
#: is hashed.
PIECE_BYTES: Final = 256 << 10
_NO_PROGRESS: Final = "no progress in time"
_SHORTEST_S: Final = 0.001  # 0 would mean no limit


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
        self.socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        self._prefix = bytearray(wire.PREFIX_BYTES)

    def send(self, message: messages.Message, deadline: Deadline) -> None:
        """Send a control frame."""
        self._send_all(memoryview(wire.encode(message)), deadline)

    def send_block(self, header: messages.BlockHeader, data: memoryview, deadline: Deadline) -> None:
        """Send a block straight from memory."""
        prefix = memoryview(wire.encode(header))
        self._arm(socket.SO_SNDTIMEO, deadline)
        try:
            sent = self.socket.sendmsg([prefix, data])
        except BlockingIOError as error:
            raise TimeoutError(_NO_PROGRESS) from error
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
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError as error:
            raise TimeoutError(_NO_PROGRESS) from error

    def close(self) -> None:
        """Close the connection. Idempotent; wakes a thread that waits in it."""
        with contextlib.suppress(OSError):  # the other side was faster
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _send_all(self, data: memoryview, deadline: Deadline) -> None:
        while data:
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError as error:
                raise TimeoutError(_NO_PROGRESS) from error

    def _fill(self, target: memoryview, deadline: Deadline) -> None:
        while target:
            target = target[self._some(target, deadline) :]

    def _some(self, target: memoryview, deadline: Deadline) -> int:
        """Receive all of the target, or as much as comes in time."""
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            got = self.socket.recv_into(target, len(target), socket.MSG_WAITALL)
        except BlockingIOError as error:  # what a blocking socket says when its SO_...TIMEO is over
            raise TimeoutError(_NO_PROGRESS) from error
        if not got:
            raise ConnectionResetError("the other side closed the connection")
        return got

    def _arm(self, option: int, deadline: Deadline) -> None:
        """Tell the kernel how long the next call may take, if that has changed."""
        wait = max(deadline.wait(), _SHORTEST_S)
        if wait != self._limits[option]:
            seconds = int(wait)
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, int((wait - seconds) * 1e6)))
            self._limits[option] = wait


def unexpected(message: messages.Message) -> RemoteError:
    """Return the error for a message that does not belong here."""
    return RemoteError(f"transfer: unexpected {type(message).__name__}")
