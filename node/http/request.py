"""One request as our own server hands it to a handler: what aiohttp's handlers and responses use of a request, and no
more is worked out than they ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion10, HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from node.relay.headers import LOWER, HeaderList

if TYPE_CHECKING:
    from node.http.writer import Writer

#: Bytes of a body held before its client's socket is left alone.
READ_BUFFER = 256 * 1024


class Body:
    """The body of one request as it comes: the reading side of aiohttp's `StreamReader`."""

    __slots__ = ("_complete", "_error", "_loop", "_pause", "_paused", "_pieces", "_size", "_unwanted", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: Callable[[bool], None]) -> None:
        self._loop = loop
        #: Stops (True) and resumes reading from the client.
        self._pause = pause
        self._pieces: list[bytes] = []
        self._size = 0
        self._complete = False
        self._paused = False
        self._unwanted = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def is_eof(self) -> bool:
        """Whether all of it is here."""
        return self._complete

    def read_nowait(self) -> bytes:
        """Return what is here, b"" when nothing is."""
        if self._error is not None:
            raise self._error
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._paused:
            self._paused = False
            self._pause(False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def readany(self) -> bytes:
        """Return what came since the last call, b"" at the end.

        :raises web.RequestPayloadError: it was cut, or is framed wrongly.
        """
        while not self._pieces and not self._complete and self._error is None:
            await self._wait()
        return self.read_nowait()

    async def discard(self) -> None:
        """Drop what is here and what comes, until its end."""
        self._unwanted = True
        self.read_nowait()
        while not self._complete and self._error is None:
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def feed(self, data: bytes) -> None:
        """Take a piece."""
        if self._unwanted:
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > READ_BUFFER and not self._paused:
            self._paused = True
            self._pause(True)
        self._wake()

    def end(self) -> None:
        """All of it has come."""
        self._complete = True
        self._wake()

    def fail(self, why: str) -> None:
        """No more will come."""
        if not self._complete and self._error is None:
            self._error = web.RequestPayloadError(why)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Request(web.BaseRequest):
    """A request whose head has come."""

    def __init__(  # no call of aiohttp's own: it wants its parser's message
        self,
        *,
        method: str,
        target: str,
        http_1_1: bool,
        keep_alive: bool,
        pairs: HeaderList,
        body: Body,
        writer: Writer,
        protocol: Any,
        peername: Any,
    ) -> None:
        self._method = method
        self._version = HttpVersion11 if http_1_1 else HttpVersion10
        self._payload_writer = writer
        self._protocol = protocol
        self._transport_peername = peername
        self._cache = {}
        self._state = {}
        self._body = body
        self._target = target
        self._keep = keep_alive
        #: The headers in order, duplicates kept.
        self.pairs = pairs
        self._named: CIMultiDictProxy[str] | None = None
        #: The first value of each header by its lower-case name.
        self.first = {LOWER[name]: value for name, value in reversed(pairs)}

    def passed_on(self) -> None:
        """A worker has passed it on (`node.workers.passed`): behind Host its first header names the client."""
        host, (_, remote), *rest = self.pairs
        self.pairs = [host, *rest]
        self._transport_peername = (remote, 0) if remote else None
        self.first = {LOWER[name]: value for name, value in reversed(self.pairs)}

    @property
    def _headers(self) -> CIMultiDictProxy[str]:  # type: ignore[override]
        if self._named is None:
            self._named = CIMultiDictProxy(CIMultiDict(self.pairs))
        return self._named

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The headers by name."""
        return self._headers

    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers as they came."""
        return tuple((name.encode("utf-8", _LOSSLESS), value.encode("utf-8", _LOSSLESS)) for name, value in self.pairs)

    @property
    def raw_path(self) -> str:
        """The target as it came."""
        return self._target

    @property
    def _rel_url(self) -> URL:  # type: ignore[override]
        path, _, query = self._target.partition("#")[0].partition("?")
        return URL.build(path=path, query_string=query, encoded=True)

    @property
    def keep_alive(self) -> bool:
        """Whether the client wants the connection to stay."""
        return self._keep

    @property
    def content(self) -> Body:  # type: ignore[override]
        """The body."""
        return self._body


_LOSSLESS = "surrogateescape"
