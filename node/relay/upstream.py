"""One exchange with an engine or a peer: open it, read the answer piece by piece, close it at once when it
is unwanted.

Errors, all `UpstreamError`: `UpstreamRefusedError` (no connection, so nothing was sent),
`UpstreamBrokenError` (cut or garbled), `UpstreamSilentError` (a deadline passed). Each is raised with the
exchange already closed, which aborts the work there.
"""

from __future__ import annotations

import asyncio
import io
import time
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from node.errors import RemoteError
from node.relay.headers import HeaderList

#: Header block limits towards engines and peers, in bytes of one line; a cookie or a plan fits, a flood
#: does not.
MAX_HEADER_LINE = 64 * 1024

#: Bytes held per answer before its reader is paused (aiohttp pauses at twice this).
READ_BUFFER = 64 * 1024

#: Bytes of a body from which it is written in pieces (aiohttp warns beyond).
LARGE_BODY = 512 * 1024

_NOT_OURS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


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
    """Where to send it: a session (TCP or Unix socket) and the scheme and authority before the path."""

    session: aiohttp.ClientSession
    url: str

    def join(self, target: str) -> URL:
        """Return the URL of a raw path, without normalising a byte of it."""
        return URL(self.url + target, encoded=True)

    def sent_target(self, target: str) -> str:
        """Return what the other side sees as its raw path: no fragment, no question mark without a query."""
        return self.join(target).raw_path_qs


class UpstreamAnswer:
    """An answer whose status and headers have arrived."""

    __slots__ = ("_fault", "_response", "headers", "reason", "status", "waiting_since")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._fault: UpstreamError | None = None
        #: Monotonic seconds since when somebody waits for the next piece; None while nobody does.
        self.waiting_since: float | None = None
        self.status = response.status
        self.reason = response.reason or ""
        self.headers: HeaderList = [
            (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
            for name, value in response.raw_headers
        ]

    async def read(self) -> bytes:
        """Return the next piece of the body as it came, b"" at its end.

        :raises UpstreamBrokenError: the body was cut short.
        :raises UpstreamError: what `fail` was given.
        """
        if self._fault is not None:
            raise self._fault
        self.waiting_since = time.monotonic()
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            self.close()
            raise self._fault or UpstreamBrokenError(describe(error)) from error
        finally:
            self.waiting_since = None

    def fail(self, error: UpstreamError) -> None:
        """End the exchange, which aborts its work; whoever reads it gets this error."""
        if self._fault is None:
            self._fault = error
            self._response.content.set_exception(error)
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
        return b"".join(parts)

    def close(self) -> None:
        """End the exchange; an answer that was not read to its end is cut, which aborts its work."""
        self._response.close()


def describe(error: BaseException) -> str:
    """Return one line for an exception, never empty."""
    return str(error) or type(error).__name__


def make_session(
    connector: aiohttp.BaseConnector, *, connect_s: float, headers: dict[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session that passes bytes through: no decompression, cookies, redirects or defaults."""
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s),
        read_bufsize=READ_BUFFER,
        max_line_size=MAX_HEADER_LINE,
        max_field_size=MAX_HEADER_LINE,
    )


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """A large body as a file, which is written piece by piece: in one piece it would be copied and stop the loop."""
    return io.BytesIO(body) if len(body) > LARGE_BODY else body or None


async def open_upstream(base: Base, request: UpstreamRequest, *, first_byte_s: float) -> UpstreamAnswer:
    """Send ``request`` and wait for the answer's headers. Cancelling the caller closes the connection.

    :raises UpstreamRefusedError: no connection, or none is possible with that address; nothing was sent.
    :raises UpstreamBrokenError: the connection was cut before the headers were complete.
    :raises UpstreamSilentError: no headers within ``first_byte_s`` seconds.
    """
    try:
        async with asyncio.timeout(first_byte_s):
            response = await base.session.request(
                request.method,
                base.join(request.target),
                headers=CIMultiDict(request.headers),
                data=_payload(request.body),
                skip_auto_headers=_NOT_OURS,
                allow_redirects=False,
            )
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UpstreamRefusedError(describe(error)) from error
    except TimeoutError as error:
        raise UpstreamSilentError(f"no answer within {first_byte_s:.1f} s") from error
    except (aiohttp.ClientError, ConnectionError, OSError) as error:
        raise UpstreamBrokenError(describe(error)) from error
    except ValueError as error:  # a host or port that no URL can have: peers say themselves where they are
        raise UpstreamRefusedError(f"not an address: {describe(error)}") from error
    return UpstreamAnswer(response)
