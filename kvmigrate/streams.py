"""Bytes over one socket, in clear or over TLS, every call with a time limit in seconds. Used in threads only.

In clear the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO) instead of a poll before each call: one system call moves
a whole piece. Either way the limit holds for a whole call, so a peer that sends a byte now and then gains nothing.

They raise TimeoutError when nothing moved in time, and other OSErrors when the connection is gone.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol

_NO_PROGRESS: Final = "no progress in time"
_SHORTEST_S: Final = 0.001  # 0 would mean no limit


class Stream(Protocol):
    """A connected socket, which it owns."""

    @property
    def socket(self) -> socket.socket:
        """The socket; what is done with it beside this is in clear."""
        ...

    def send(self, parts: Sequence[memoryview], wait_s: float) -> int:
        """Send the front of the parts; returns how many bytes went."""
        ...

    def receive(self, target: memoryview, wait_s: float) -> int:
        """Receive all of the target, or as much as comes in time; 0 when the other side closed the connection."""
        ...

    def peek(self, wait_s: float) -> bytes:
        """Wait until something arrives; returns its first byte, nothing when the other side hung up instead."""
        ...

    def close(self) -> None:
        """Close the connection; wakes a thread that waits in it."""
        ...


class PlainStream:
    """Bytes in clear."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.socket = sock
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def send(self, parts: Sequence[memoryview], wait_s: float) -> int:
        """See `Stream`."""
        self._arm(socket.SO_SNDTIMEO, wait_s)
        try:
            return self.socket.sendmsg(parts)
        except BlockingIOError as error:  # what a blocking socket says when its SO_...TIMEO is over
            raise TimeoutError(_NO_PROGRESS) from error

    def receive(self, target: memoryview, wait_s: float) -> int:
        """See `Stream`."""
        self._arm(socket.SO_RCVTIMEO, wait_s)
        try:
            return self.socket.recv_into(target, len(target), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(_NO_PROGRESS) from error

    def peek(self, wait_s: float) -> bytes:
        """See `Stream`."""
        self._arm(socket.SO_RCVTIMEO, wait_s)
        try:
            return self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError as error:
            raise TimeoutError(_NO_PROGRESS) from error

    def close(self) -> None:
        """See `Stream`."""
        _close(self.socket)

    def _arm(self, option: int, wait_s: float) -> None:
        """Tell the kernel how long the next call may take, if that has changed."""
        wait = max(wait_s, _SHORTEST_S)
        if wait != self._limits[option]:
            seconds = int(wait)
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, int((wait - seconds) * 1e6)))
            self._limits[option] = wait


class TlsStream:
    """Bytes over TLS. One call of the library moves one record (16 KiB at most)."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.socket = sock

    def handshake(self, wait_s: float) -> None:
        """Agree on keys. ssl.SSLError, which is an OSError, when the other side does not speak TLS as we do."""
        self._arm(wait_s)
        self.socket.do_handshake()

    def send(self, parts: Sequence[memoryview], wait_s: float) -> int:
        """See `Stream`."""
        self._arm(wait_s)
        return self.socket.send(parts[0])

    def receive(self, target: memoryview, wait_s: float) -> int:
        """See `Stream`."""
        end, got = time.monotonic() + wait_s, 0
        self._arm(wait_s)
        try:
            while got < len(target):
                piece = self.socket.recv_into(target[got:])
                got += piece
                if not piece or time.monotonic() >= end:
                    break
        except TimeoutError:
            if not got:
                raise
        return got

    def peek(self, wait_s: float) -> bytes:
        """See `Stream`; the byte is of the cipher text, or a zero when decrypted bytes are waiting."""
        if self.socket.pending():
            return b"\0"
        self._arm(wait_s)
        return socket.socket.recv(self.socket, 1, socket.MSG_PEEK)

    def close(self) -> None:
        """See `Stream`."""
        _close(self.socket)

    def _arm(self, wait_s: float) -> None:
        wait = max(wait_s, _SHORTEST_S)
        if wait != self.socket.gettimeout():
            self.socket.settimeout(wait)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        # Not `SSLSocket.shutdown`: that forgets the TLS session first, and a thread that sends would go on in clear.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    sock.close()
