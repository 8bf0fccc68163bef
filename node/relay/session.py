"""Connections to one engine, or to all peers: kept while they are warm, made when none is free, bounded in number."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from node.relay.connection import Connection

#: Addresses remembered in their parsed form, far above any cluster.
MAX_ADDRESSES = 4096


class TooManyConnections(OSError):
    """The bound on open connections is reached."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a URL leads: what to connect to and what to say there."""

    host: str
    port: int
    tls: bool
    #: Value of the Host header, and what stands before every path.
    authority: str
    prefix: str


def parse_address(url: str) -> Address:
    """Read scheme, host, port and base path of a URL.

    :raises ValueError: it has none that can be connected to.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address that can be connected to")
    tls = parts.scheme == "https"
    port = parts.port if parts.port is not None else 443 if tls else 80
    if not port:
        raise ValueError(f"{url!r} names no port that can be connected to")
    return Address(parts.hostname, port, tls, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"))


class Session:
    """A pool of connections. Use it in one event loop; `close` it at the end.

    ``socket``: every address is reached over this Unix socket. ``headers`` go out with every request. ``idle_s``:
    seconds that a free connection is kept, less than the other side keeps it, so that it is not closed just when we
    use it again. ``limit`` and ``per_address`` bound open connections. ``trust`` gives what TLS is spoken with, instead
    of the host's authorities; ``name`` is asked for under TLS in place of the host's.
    """

    def __init__(
        self,
        *,
        connect_s: float,
        idle_s: float,
        limit: int,
        per_address: int | None = None,
        socket: Path | None = None,
        headers: dict[str, str] | None = None,
        trust: Callable[[], ssl.SSLContext] | None = None,
        name: str | None = None,
    ) -> None:
        self.headers = headers or {}
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._limit = limit
        self._per_address = per_address or limit
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._addresses: dict[str, Address] = {}
        self._open: dict[Connection, Address] = {}
        self._counts: dict[Address, int] = {}
        self._free: dict[Address, list[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._trust = trust
        self._name = name
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def address(self, url: str) -> Address:
        """Return the address of a URL without its path.

        :raises ValueError: it has none.
        """
        found = self._addresses.get(url)
        if found is None:
            if len(self._addresses) >= MAX_ADDRESSES:
                self._addresses.clear()
            found = self._addresses[url] = parse_address(url)
        return found

    async def take(self, address: Address, *, fresh: bool = False) -> Connection:
        """Return a connection that is free, or a new one. ``fresh``: a new one in any case.

        :raises OSError: none can be made.
        :raises TimeoutError: not within ``connect_s`` seconds.
        """
        free = self._free.get(address)
        while free and not fresh:
            connection = free.pop()
            if connection.open:
                return connection
        return await self._connect(address)

    async def close(self) -> None:
        """Cut every connection. Idempotent."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._open):
            connection.abort()
        self._free.clear()
        await asyncio.sleep(0)  # the transports tell of their end in the next turn of the loop

    async def _connect(self, address: Address) -> Connection:
        if self._closed:
            raise ConnectionError("the session is closed")
        count = self._counts.get(address, 0)
        if len(self._open) >= self._limit or count >= self._per_address:
            raise TooManyConnections(f"there are {count} connections to {address.authority} already")
        connection = Connection(self._loop, self._freed, self._lost)
        self._open[connection] = address
        self._counts[address] = count + 1
        try:
            async with asyncio.timeout(self._connect_s):
                await self._dial(connection, address)
        except BaseException:
            connection.abort()
            self._lost(connection)
            raise
        return connection

    async def _dial(self, connection: Connection, address: Address) -> None:
        if self._socket is not None:
            await self._loop.create_unix_connection(lambda: connection, str(self._socket))
        elif address.tls:
            tls = self._trust() if self._trust is not None else await self._usual_tls()
            await self._loop.create_connection(
                lambda: connection, address.host, address.port, ssl=tls, server_hostname=self._name
            )
        else:
            await self._loop.create_connection(lambda: connection, address.host, address.port)

    async def _usual_tls(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls

    def _freed(self, connection: Connection) -> None:
        address = self._open.get(connection)
        if address is None or self._closed:
            connection.abort()
            return
        connection.free_since = self._loop.time()
        self._free.setdefault(address, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_s / 2, self._close_idle)

    def _lost(self, connection: Connection) -> None:
        address = self._open.pop(connection, None)
        if address is None:
            return
        left = self._counts[address] - 1
        if left:
            self._counts[address] = left
        else:
            del self._counts[address]
        free = self._free.get(address)
        if free is not None and connection in free:
            free.remove(connection)

    def _close_idle(self) -> None:
        """Close what was free for long; goes on as long as there is anything free."""
        self._sweep = None
        before = self._loop.time() - self._idle_s / 2
        for address, free in list(self._free.items()):
            for connection in free:
                if connection.free_since <= before:
                    connection.abort()
            kept = [connection for connection in free if connection.free_since > before]
            if kept:
                self._free[address] = kept
            else:
                del self._free[address]
        if self._free:
            self._sweep = self._loop.call_later(self._idle_s / 2, self._close_idle)
