"""A relayed answer on its way to the client: the upstream's status and headers, and the framing of this hop."""

from __future__ import annotations

from typing import Protocol, cast

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from node.relay.headers import LOWER, HeaderList

_NO_BODY_STATUS = frozenset({204, 304})


class BodyWriter(Protocol):
    """The client's side; `node.http.writer.Writer` is it."""

    @property
    def waits(self) -> bool:
        """The client takes nothing more now."""
        ...

    def begin(self, lines: list[str], *, length: int | None, chunked: bool) -> None:
        """Keep the lines of the head for the first write."""
        ...

    def put(self, chunk: bytes) -> bool:
        """Send a piece; True when it is time to wait until the client takes more."""
        ...

    def end(self, chunk: bytes = b"") -> None:
        """Send the last piece and the end."""
        ...

    async def drain(self) -> None:
        """Wait until the client takes more."""
        ...


class RawResponse(web.StreamResponse):
    """An answer of aiohttp's in its type alone: nothing of its machinery runs, and no header is added or looked up."""

    def __init__(self, *, status: int, reason: str, headers: HeaderList) -> None:
        self._status = status
        self._reason = reason
        self._given = headers
        self._length: int | None = None
        self._writer: BodyWriter | None = None

    @property
    def headers(self) -> CIMultiDict[str]:
        """What the upstream sent, in a form of its own: nothing that is put there reaches the client."""
        return CIMultiDict(self._given)

    @property
    def length(self) -> int | None:
        """Bytes that the body has, None where it is framed in chunks or by the end of the connection."""
        return self._length

    @property
    def over(self) -> bool:
        """All of it was written and taken."""
        return self._eof_sent and self._writer is not None and not self._writer.waits

    async def prepare(self, request: web.BaseRequest) -> None:
        """Hand the head to the client's writer, which sends it with the first piece. Idempotent."""
        if self._writer is None:
            self.begin(request)

    def begin(self, request: web.BaseRequest) -> None:
        """Do what `prepare` does, once."""
        writer = self._writer = cast(BodyWriter, request.writer)
        newer = request.version >= HttpVersion11
        keep_alive, empty, chunked = request.keep_alive, request.method == "HEAD", False
        lines = [f"HTTP/1.1 {self._status} {self._reason}" if newer else f"HTTP/1.0 {self._status} {self._reason}"]
        lines += [f"{name}: {value}" for name, value in self._given]
        if not empty and self._status not in _NO_BODY_STATUS:
            self._length = length_of(self._given)
            if self._length is None and newer:
                chunked = True
                lines.append("Transfer-Encoding: chunked")
            elif self._length is None:
                keep_alive = False
        self._keep_alive = keep_alive
        if keep_alive != newer:
            lines.append("Connection: keep-alive" if keep_alive else "Connection: close")
        writer.begin(lines, length=self._length, chunked=chunked)

    async def write(self, data: bytes) -> None:  # type: ignore[override]
        """Send a piece; waits while the client takes nothing. :raises ConnectionResetError: the client is gone."""
        assert self._writer is not None, "the response has not begun"
        if self._writer.put(data):
            await self._writer.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the last piece and the end, and wait until the client has taken what it must. Idempotent."""
        if not self._eof_sent:
            self.end(data)
            await self.drain()

    def end(self, data: bytes = b"") -> bool:
        """Send the last piece and the end; False while the client has not taken enough of it, see `drain`."""
        assert self._writer is not None, "the response has not begun"
        self._eof_sent = True
        self._writer.end(data)
        return not self._writer.waits

    async def drain(self) -> None:
        """Wait until the client takes more."""
        assert self._writer is not None, "the response has not begun"
        await self._writer.drain()


def length_of(headers: HeaderList) -> int | None:
    """The Content-Length of an answer that a parser has taken."""
    for name, value in headers:
        if LOWER[name] == "content-length":
            return int(value)
    return None
