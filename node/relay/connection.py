"""One connection to an engine or a peer: a request out, an answer in, and the next one after it.

Rules:
1. The parser is llhttp's (`httptools`), strict: what it does not take is no answer. Nothing is guessed.
2. An answer is read as it comes. When its reader falls behind by `HIGH_WATER` bytes, the socket is not read on until
   it has taken them all: a slow client slows its own stream and nobody else's.
3. A connection is used again only when its answer ended as HTTP says, its request was sent whole, and neither side
   wants to close it. Bytes that nobody asked for end it.
4. Every failure is an `OSError`: `ConnectionError` for what was cut or garbled, `TimeoutError` for a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from node.relay.headers import LOWER, NAMES

#: Bytes of status line and headers taken from an engine or a peer; a cookie or a plan fits, a flood does not.
MAX_HEAD = 64 * 1024
#: Bytes of an answer that are held for its reader before the socket is left alone.
HIGH_WATER = 128 * 1024

#: Headers as they came: name and value, in order.
RawHeaders = list[tuple[bytes, bytes]]


class Connection(asyncio.Protocol):
    """Made by `node.relay.session.Session`, which is told by ``on_free`` and ``on_lost`` what becomes of it."""

    __slots__ = (
        "_complete",
        "_end",
        "_error",
        "_extra",
        "_head_bytes",
        "_head_done",
        "_keep",
        "_loop",
        "_on_free",
        "_on_lost",
        "_parser",
        "_paused",
        "_pieces",
        "_reading",
        "_size",
        "_sized",
        "_transport",
        "_waiter",
        "free_since",
        "headers",
        "on_body",
        "reason",
        "status",
        "touched",
        "uses",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_free: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: Any = None  # uvloop's is no asyncio.Transport
        self._pieces: list[bytes] = []
        #: The parser's call for each piece of the body: a streamed answer has thousands, this is C all the way.
        self.on_body = self._pieces.append
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        #: Requests sent on it, and when it was last given back (loop time).
        self.uses = 0
        self.free_since = 0.0
        self._begin()
        self._reading = False

    def _begin(self) -> None:
        self.status = 0
        self.reason = ""
        self.headers: RawHeaders = []
        #: Whether any byte of the answer came.
        self.touched = False
        self._reading = True
        del self._pieces[:]
        #: Pieces that the answer ended with, in the bytes just taken; whether another answer began behind it.
        self._end = 0
        self._extra = False
        self._size = 0
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._paused = False
        self._keep = True
        self._sized = False
        self._error: Exception | None = None

    # --- what its user does

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, *, keep: bool = True) -> None:
        """Send a request. ``keep`` False: its answer has a body by its headers only, the connection ends with it."""
        self._begin()
        self.uses += 1
        self._keep = keep
        if len(body) > _JOINED:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)

    async def head(self, deadline_s: float) -> None:
        """Wait for status and headers.

        :raises OSError: see rule 4. The connection is closed then, and when the caller is cancelled.
        """
        timer = None if deadline_s == inf else self._loop.call_later(deadline_s, self._late)
        try:
            while not self._head_done and self._error is None:
                await self._wait()
        except BaseException:
            self.close()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not self._head_done and self._error is not None:
            self.close()
            raise self._error

    async def piece(self) -> bytes:
        """Return what came of the body since the last call, b"" at its end. Nothing may be asked of it after that.

        :raises OSError: the body was cut short. The caller closes.
        """
        while not self._pieces:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._taken()

    @property
    def spent(self) -> bool:
        """Whether the answer is whole and all of its body was taken."""
        return self._complete and not self._pieces and self._error is None

    @property
    def complete(self) -> bool:
        """Whether all of the answer came."""
        return self._complete and self._error is None

    def at_hand(self) -> bytes | None:
        """Return what `piece` would return at once; None when it would wait, say that the body is over, or fail."""
        return self._taken() if self._pieces and self._error is None else None

    def _taken(self) -> bytes:
        pieces, self._size = self._pieces, 0
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        del pieces[:]
        if self._paused:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return data

    def fail(self, error: Exception) -> None:
        """Let the reader of the answer fail with ``error``, now or when it asks next; what came is dropped."""
        if self._error is None and not self._complete:
            self._error = error
            del self._pieces[:]
            self._wake()

    def close(self) -> None:
        """End the exchange: gives the connection back when its answer is whole, else cuts it. Idempotent."""
        if not self._reading:
            return
        self._reading = False
        del self._pieces[:]
        if self._complete and self._error is None and self._keep and self.open and not self._unsent():
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._on_free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    def _unsent(self) -> bool:
        return bool(self._transport.get_write_buffer_size())

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _late(self) -> None:
        if not self._head_done:
            self.fail(TimeoutError("no answer in time"))

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """End an answer whose length is the connection's, fail any other that is not whole."""
        self._transport = None
        del self._parser  # it knows us: a cycle, that would wait for the collector
        if self._reading and not self._complete and self._error is None:
            if exc is None and self._head_done and not self._sized:
                self._complete = True
            else:
                self._error = ConnectionResetError(str(exc) if exc is not None else "the connection was closed")
        self._wake()
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes of an answer."""
        if not self._reading or self._complete:
            self.abort()  # nobody asked for these
            return
        self.touched = True
        size = len(data)
        if not self._head_done:
            self._head_bytes += size
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._broken(f"the answer is no HTTP: {error}")
        if self._extra:
            del self._pieces[self._end :]
        self._size += size
        if not self._head_done and self._head_bytes > MAX_HEAD:
            self._broken(_HEAD_TOO_LONG)
        if self._size > HIGH_WATER and self._pieces and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _broken(self, why: str) -> None:
        self._keep = False
        if self._error is None and not self._complete:
            self._error = ConnectionError(why)
        self.abort()

    # --- httptools

    def on_message_begin(self) -> None:
        """Note an answer that nobody asked for, behind the one that is whole."""
        self._extra = self._complete

    def on_status(self, reason: bytes) -> None:
        """Take (a part of) the reason."""
        if self._complete:
            self._keep = False
            return
        self.reason += reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those behind the body say nothing that goes on."""
        if self._head_done:
            return
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole, unless it only announces another one."""
        if self._complete:
            return
        if self._head_bytes > MAX_HEAD and sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            self._broken(_HEAD_TOO_LONG)
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers, self.reason = [], ""
            return
        self.status = status
        self._head_done = True
        for name, _ in self.headers:
            if LOWER[NAMES[name]] in _FRAMING:
                self._sized = True
        self._sized = self._sized or status in _NO_BODY

    def on_message_complete(self) -> None:
        """The answer is whole; a second one, that nobody asked for, ends the connection."""
        if not self._head_done:
            return  # 1xx
        if self._complete:
            self._keep = False
            return
        self._keep = self._keep and self._parser.should_keep_alive()
        self._complete, self._end = True, len(self._pieces)


#: A body up to this many bytes goes out in one piece with its head; a longer one is not copied for that.
_JOINED = 64 * 1024
_FRAMING = frozenset(("content-length", "transfer-encoding"))
_NO_BODY = (204, 304)
_HEAD_TOO_LONG = f"the head of the answer is longer than {MAX_HEAD} bytes"
