"""A client that shows the bytes: raw request in, status line, headers and body pieces out, nothing normalised."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.waiting import PATIENCE_S


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""
    complete: bool = True

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def one(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(
        self, method: str, target: str, headers: tuple[tuple[str, str], ...] = (), body: bytes = b""
    ) -> None:
        lines = [f"{method} {target} HTTP/1.1"]
        names = {name.lower() for name, _ in headers}
        if "host" not in names:
            lines.append("Host: node")
        if body and "content-length" not in names and "transfer-encoding" not in names:
            lines.append(f"Content-Length: {len(body)}")
        lines += [f"{name}: {value}" for name, value in headers]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    def pause(self) -> None:
        """Stop taking bytes from the socket."""
        transport: Any = self.writer.transport  # uvloop's is no asyncio.Transport
        transport.pause_reading()

    async def head(self) -> RawAnswer:
        async with asyncio.timeout(PATIENCE_S):
            block = await self.reader.readuntil(b"\r\n\r\n")
        first, *rest = block.decode().split("\r\n")[:-2]
        _, status, reason = (first + " ").split(" ", 2)
        pairs = tuple((name, value.strip()) for name, _, value in (line.partition(":") for line in rest))
        return RawAnswer(int(status), reason.strip(), pairs)

    async def pieces(self, head: RawAnswer, method: str = "GET") -> AsyncIterator[bytes]:
        """Yield the body; raises IncompleteReadError when it is cut short."""
        if method == "HEAD" or head.status in {204, 304}:
            return
        if head.one("transfer-encoding") == "chunked":
            while piece := await self.chunk():
                yield piece
        elif (length := head.one("content-length")) is not None:
            async with asyncio.timeout(PATIENCE_S):
                yield await self.reader.readexactly(int(length))
        else:
            async with asyncio.timeout(PATIENCE_S):
                yield await self.reader.read()

    async def chunk(self) -> bytes:
        """Return one chunk of a chunked body, b"" for the last."""
        async with asyncio.timeout(PATIENCE_S):
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def answer(self, method: str = "GET") -> RawAnswer:
        head = await self.head()
        body = b""
        complete = True
        try:
            async for piece in self.pieces(head, method):
                body += piece
        except (asyncio.IncompleteReadError, ConnectionError):
            complete = False
        return RawAnswer(head.status, head.reason, head.headers, body, complete)

    async def ask(
        self, method: str, target: str, headers: tuple[tuple[str, str], ...] = (), body: bytes = b""
    ) -> RawAnswer:
        await self.send(method, target, headers, body)
        return await self.answer(method)


async def get(port: int, path: str, *headers: tuple[str, str]) -> RawAnswer:
    """A GET with nothing else to it."""
    return await ask(port, "GET", path, headers)


def bearer(token: str) -> tuple[str, str]:
    """The header of a client or an operator who has a key."""
    return ("Authorization", f"Bearer {token}")


@asynccontextmanager
async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname="localhost" if tls else None)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


async def ask(
    port: int,
    method: str,
    target: str,
    headers: tuple[tuple[str, str], ...] = (),
    body: bytes = b"",
    *,
    tls: ssl.SSLContext | None = None,
) -> RawAnswer:
    """One request on a connection of its own."""
    async with connect("127.0.0.1", port, tls) as client:
        return await client.ask(method, target, headers, body)
