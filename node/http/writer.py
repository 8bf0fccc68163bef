"""The way back to the client: status, headers and body of one answer, in as few writes as possible."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from node.relay.headers import joined

#: Bytes written before the socket is asked whether the client takes them.
DRAIN_AFTER = 64 * 1024
#: Headers that tell a browser what pages of other origins may do begin with this.
_CROSS_ORIGIN = "access-control-"


class Flow:
    """Whether a client takes what is written to it; told by the protocol, waited for by writers."""

    __slots__ = ("_loop", "_paused", "_waiter", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        #: None before it is connected and after it was lost.
        self.transport: Any = None

    def pause(self) -> None:
        """The socket's buffer is full."""
        self._paused = True

    def resume(self) -> None:
        """It has room, or is gone."""
        self._paused = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def write(self, data: bytes) -> None:
        """Send. :raises ConnectionResetError: the client is gone."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(data)

    @property
    def paused(self) -> bool:
        """The client takes nothing more now."""
        return self._paused

    async def drain(self) -> None:
        """Wait until the client takes more. :raises ConnectionResetError: it is gone."""
        while self._paused and self.transport is not None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.transport is None:
            raise ConnectionResetError("the client is gone")


class Writer(AbstractStreamWriter):
    """Writes one answer; aiohttp's responses are its users."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._head = b""
        self._chunked = False
        self._ended = False
        #: What pages of other origins are told, in place of what the answer says of it; None where none asks.
        self.cross_origin: tuple[tuple[str, str], ...] | None = None
        #: Bytes that the answer still may have, None without a Content-Length.
        self.length: int | None = None
        self.buffer_size = 0
        self.output_size = 0

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Keep the head until the first bytes of the body are there, so that both leave in one write.

        :raises ValueError: a header holds a line break.
        """
        lines = [status_line]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = joined(self._for_origin(lines))

    def _for_origin(self, lines: list[str]) -> list[str]:
        """The head's lines, with what a page of another origin is told in place of what the engine says of it."""
        if self.cross_origin is None:
            return lines
        kept = [line for line in lines if not line.lower().startswith(_CROSS_ORIGIN)]
        return kept + [f"{name}: {value}" for name, value in self.cross_origin]

    # --- a relayed answer (`node.relay.response.BodyWriter`)

    @property
    def waits(self) -> bool:
        """The client takes nothing more now."""
        return self._flow.paused

    def begin(self, lines: list[str], *, length: int | None, chunked: bool) -> None:
        """Keep the head as `write_headers` does; the body is framed as is said here.

        :raises ValueError: a header holds a line break.
        """
        self._head = joined(self._for_origin(lines))
        self.length = length
        self._chunked = chunked

    def end(self, chunk: bytes = b"") -> None:
        """Send the last piece and the end, and do not wait. Idempotent.

        :raises ConnectionResetError: the client is gone.
        """
        if self._ended:
            return
        self._ended = True
        if self.length is not None:
            chunk = chunk[: self.length]
        if self._chunked:
            self._send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk) if chunk else b"0\r\n\r\n")
        elif chunk or self._head:
            self._send(chunk)

    # --- both

    def send_headers(self) -> None:
        """Send the head now."""
        if self._head:
            self._send(b"")

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send a piece; waits while the client takes nothing.

        :raises ConnectionResetError: the client is gone.
        """
        if self.put(chunk):
            await self._flow.drain()

    def put(self, chunk: bytes | bytearray | memoryview) -> bool:
        """Send a piece; True when it is time to ask whether the client takes more (`drain`).

        :raises ConnectionResetError: the client is gone.
        """
        if self.length is not None:
            chunk = chunk[: self.length]
            self.length -= len(chunk)
        data = chunk if type(chunk) is bytes else bytes(chunk)
        if not data:
            return False
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self.buffer_size <= DRAIN_AFTER:
            return False
        self.buffer_size = 0
        return True

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Send the last piece and the end."""
        if not self._ended:
            self.end(chunk)
        await self._flow.drain()

    def _send(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        size = len(data)
        self.buffer_size += size
        self.output_size += size
        self._flow.write(data)

    async def drain(self) -> None:
        """Wait until the client takes more."""
        await self._flow.drain()

    def enable_chunking(self) -> None:
        """Frame the body in chunks."""
        self._chunked = True

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Refuse: nothing here compresses."""
        raise NotImplementedError("answers are not compressed")
