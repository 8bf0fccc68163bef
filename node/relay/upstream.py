"""One exchange with an engine or a peer: open it, read the answer piece by piece, close it at once when it
is unwanted.

Errors, all `UpstreamError`: `UpstreamRefusedError` (no connection, so nothing was sent),
`UpstreamBrokenError` (cut or garbled), `UpstreamSilentError` (a deadline passed). Each is raised with the
exchange already closed, which aborts the work there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from node.errors import RemoteError
from node.quick import quick
from node.relay.connection import Connection
from node.relay.headers import NAMES, HeaderList, joined
from node.relay.session import Address, Session

#: Methods whose request has a length even without a body.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_BLANKS = frozenset((b" ", b"\t"))


class UpstreamError(RemoteError):
    """An engine or a peer did not answer as it should."""


class UpstreamRefusedError(UpstreamError):
    """No connection could be made: nothing was sent."""


class UpstreamBrokenError(UpstreamError):
    """The connection was cut or what came is not HTTP."""


class UpstreamSilentError(UpstreamError):
    """Nothing came within the deadline."""


class UpstreamStalledError(UpstreamError):
    """Nothing more came of a stream that had begun, and whoever should have sent it gives no sign of work."""


class UpstreamMovedError(UpstreamError):
    """Nothing is wrong: whoever runs it wants to be rid of it."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What to send: ``target`` is the raw path with its query; the framing is added."""

    method: str
    target: str
    headers: HeaderList
    body: bytes


@dataclass(frozen=True, slots=True)
class Base:
    """Where to send it: a session (TCP or Unix socket) and the scheme, authority and base path."""

    session: Session
    url: str

    def sent_target(self, target: str) -> str:
        """Return what the other side sees as its raw path: every byte as it was given, but no fragment.

        :raises ValueError: the address is none.
        """
        return self.session.address(self.url).prefix + target.partition("#")[0]


quick(UpstreamRequest, Base)


class UpstreamAnswer:
    """An answer whose status and headers have arrived."""

    __slots__ = ("_connection", "_fault", "headers", "reason", "status", "waiting_since")

    def __init__(self, connection: Connection) -> None:
        #: None once the exchange has ended: the connection may be somebody else's then.
        self._connection: Connection | None = connection
        self._fault: UpstreamError | None = None
        #: Monotonic seconds since when somebody waits for the next piece; None while nobody does.
        self.waiting_since: float | None = None
        self.status = connection.status
        self.reason = connection.reason
        self.headers: HeaderList = [
            (NAMES[name], (value.rstrip(b" \t") if value[-1:] in _BLANKS else value).decode("utf-8", "surrogateescape"))
            for name, value in connection.headers
        ]

    @property
    def whole(self) -> bool:
        """Whether all of the body came and was read."""
        return self._connection is not None and self._connection.spent

    @property
    def complete(self) -> bool:
        """Whether all of the body came, read or not."""
        return self._connection is not None and self._connection.complete

    def at_hand(self) -> bytes | None:
        """Return what has come of the body; None when nothing has, or `read` would have something else to say."""
        if self._fault is not None or self._connection is None:
            return None
        return self._connection.at_hand()

    async def read(self) -> bytes:
        """Return the next piece of the body as it came, b"" at its end.

        :raises UpstreamBrokenError: the body was cut short.
        :raises UpstreamError: what `fail` was given.
        """
        if self._fault is not None:
            raise self._fault
        if self._connection is None:
            raise UpstreamBrokenError("the exchange was ended")
        self.waiting_since = time.monotonic()
        try:
            return await self._connection.piece()
        except OSError as error:
            self.close()
            raise self._fault or UpstreamBrokenError(describe(error)) from error
        finally:
            self.waiting_since = None

    def fail(self, error: UpstreamError) -> None:
        """End the exchange, which aborts its work; whoever reads it gets this error."""
        if self._fault is None and self._connection is not None:
            self._fault = error
            self._connection.fail(ConnectionAbortedError(str(error)))
            self.close()

    async def read_all(self, limit: int) -> bytes:
        """Return a small body whole.

        :raises UpstreamBrokenError: it is cut short or longer than ``limit`` bytes.
        """
        parts: list[bytes] = []
        size = 0
        while piece := await self.read():
            size += len(piece)
            if size > limit:
                self.close()
                raise UpstreamBrokenError(f"an answer of more than {limit} bytes")
            parts.append(piece)
        self.close()
        return b"".join(parts)

    def close(self) -> None:
        """End the exchange; an answer that was not read to its end is cut, which aborts its work."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()


def describe(error: BaseException) -> str:
    """Return one line for an exception, never empty."""
    return str(error) or type(error).__name__


async def open_upstream(base: Base, request: UpstreamRequest, *, first_byte_s: float) -> UpstreamAnswer:
    """Send ``request`` and wait for the answer's headers. Cancelling the caller closes the connection.

    A kept connection that the other side closed meanwhile is replaced by a new one, once.

    :raises UpstreamRefusedError: no connection, or none is possible with that address; nothing was sent.
    :raises UpstreamBrokenError: the connection was cut before the headers were complete.
    :raises UpstreamSilentError: no headers within ``first_byte_s`` seconds; infinite where the caller has a timer.
    """
    try:
        address = base.session.address(base.url)
    except ValueError as error:  # a host or port that no URL can have: peers say themselves where they are
        raise UpstreamRefusedError(f"not an address: {describe(error)}") from error
    head = head_of(address, request, base.session.headers)
    connection = await _connected(base.session, address)
    try:
        await _asked(connection, head, request, first_byte_s)
    except ConnectionError as error:
        if connection.uses == 1 or connection.touched:
            raise UpstreamBrokenError(describe(error)) from error
        connection = await _connected(base.session, address, fresh=True)
        try:
            await _asked(connection, head, request, first_byte_s)
        except ConnectionError as again:
            raise UpstreamBrokenError(describe(again)) from again
    return UpstreamAnswer(connection)


async def _connected(session: Session, address: Address, *, fresh: bool = False) -> Connection:
    try:
        return await session.take(address, fresh=fresh)
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        raise UpstreamRefusedError(describe(error)) from error


async def _asked(connection: Connection, head: bytes, request: UpstreamRequest, first_byte_s: float) -> None:
    connection.send(head, request.body, keep=request.method != "HEAD")
    try:
        await connection.head(first_byte_s)
    except TimeoutError as error:
        raise UpstreamSilentError(f"no answer within {first_byte_s:.1f} s") from error


def head_of(address: Address, request: UpstreamRequest, more: dict[str, str]) -> bytes:
    """Return request line and headers as they go out.

    :raises UpstreamRefusedError: a header holds a line break; no parser lets one in.
    """
    target = address.prefix + request.target.partition("#")[0]
    lines = [f"{request.method} {target} HTTP/1.1", f"Host: {address.authority}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    if more:
        given = {name.lower() for name, _ in request.headers}
        lines += [f"{name}: {value}" for name, value in more.items() if name.lower() not in given]
    if request.body or request.method in _WITH_BODY:
        lines.append(f"Content-Length: {len(request.body)}")
    try:
        return joined(lines)
    except ValueError as error:
        raise UpstreamRefusedError(str(error)) from error
