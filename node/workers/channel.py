"""One stream socket between the main process and a worker: length, message, length, message."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any

from node.errors import RemoteError
from node.workers.packing import MAX_MESSAGE, decode, encode

#: Bytes that may wait for the other side to read them: beyond, it is taken to hang.
MAX_WAITING = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")

_log = logging.getLogger("grapevine.workers")


class Channel(asyncio.Protocol):
    """One end. ``take`` is called with each message, ``lost`` once, when there will be none any more."""

    def __init__(self, take: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._take = take
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._out: list[bytes] = []
        self._in = bytearray()

    @property
    def open(self) -> bool:
        """Whether something can be said."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Any) -> None:
        """Say something, with everything else that is said in this turn of the loop; a closed channel says nothing."""
        if not self.open:
            return
        packed = encode(message)
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out += (_LENGTH.pack(len(packed)), packed)

    def flush(self) -> None:
        """Say now what waits."""
        out, self._out = self._out, []
        if not out or not self.open:
            return
        self._transport.write(b"".join(out))
        if self._transport.get_write_buffer_size() > MAX_WAITING:
            _log.error("the other side of a worker's channel takes nothing any more")
            self._transport.abort()

    def close(self) -> None:
        """Say what waits, and nothing more. Idempotent."""
        if self.open:
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone."""
        self._transport = None
        self._out.clear()
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        self._in += data
        try:
            self._cut()
        except RemoteError as error:
            _log.error("what came over a worker's channel makes no sense: %s", error)
            self.abort()

    def _cut(self) -> None:
        """Take the whole messages that are here."""
        held, begin = self._in, 0
        while len(held) - begin >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(held, begin)
            if size > MAX_MESSAGE:
                raise RemoteError(f"worker: a message of {size} bytes")
            end = begin + _LENGTH.size + size
            if end > len(held):
                break
            with memoryview(held) as view:
                message = decode(view[begin + _LENGTH.size : end])
            begin = end
            self._take(message)
        del held[:begin]
