"""One client's connection: requests in, one after the other, answers out in their order.

Rules:
1. The parser is llhttp's (`httptools`), strict. What it refuses, and what it lets pass but HTTP forbids (two lengths,
   codings that we do not know, no Host), is answered with 400 and the connection ends: nothing behind it is looked at,
   so no two parties can differ about where a request ends.
2. Everything is bounded: the head in bytes and in headers, requests that wait behind the one being answered, a body by
   its reader's pace.
3. A head that has begun must be whole within `HEAD_S` seconds; a connection without a request is closed after
   `KEEPALIVE_S`. The time of a body is its reader's business (`node.http.intake`).
4. A client that goes away, also by closing only its sending half, ends the work on its request at once.
5. The offer to upgrade to another protocol is ignored, as HTTP allows: the request is an ordinary one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from node.http.errors import ApiError
from node.http.request import Body, Request
from node.http.writer import Flow, Writer
from node.logs import set_request
from node.relay.headers import LOWER, NAMES, HeaderList
from node.relay.response import RawResponse

#: Header limits: one line, how many, and the whole head in bytes.
MAX_HEADER_LINE = 16 * 1024
MAX_HEADERS = 128
MAX_HEAD = 64 * 1024
#: Requests that may wait on one connection behind the one being answered.
MAX_PIPELINED = 16
#: Seconds for a head that has begun, and for a connection without a request: longer than proxies in front keep theirs.
HEAD_S = 20.0
KEEPALIVE_S = 120.0
#: Seconds that the rest of a refused body is read for, so that the client sees the answer.
LINGER_S = 2.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


_log = logging.getLogger("grapevine.http")


class Connections(Protocol):
    """Whoever counts connections; `node.http.server.HttpServer`."""

    def opened(self, connection: Connection) -> bool:
        """A client connected; False when there are too many."""
        ...

    def closed(self, connection: Connection) -> None:
        """It is gone."""
        ...


class _Refused(Exception):
    """Raised inside the parser to stop it."""


class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    def __init__(self, handler: Handler, connections: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._connections = connections
        self._loop = loop
        self._flow = Flow(loop)
        self._parser = HttpRequestParser(self)
        self._peername: Any = None
        self._waiting: deque[Request | ApiError] = deque()
        self._news: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._pauses = 0
        self._deadline = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        #: What the parser is in: bytes of the head so far, its parts, the body it fills.
        self._head_bytes = 0
        #: The head is no longer than this.
        self._most_head = 0
        self._target = b""
        self._pairs: HeaderList = []
        self._raw: list[tuple[bytes, bytes]] = []
        self._body: Body | None = None
        self._in_head = True
        #: The bytes just taken had the end of a request in them.
        self._ended = False
        #: Nothing more is read: an error was found, or this was the last request.
        self._deaf = False
        self._upgrading = False
        #: It ends with the last answer that is waited for.
        self._last = False

    # --- asyncio.Protocol

    @property
    def transport(self) -> Any:
        """The socket; None when it is gone."""
        return self._flow.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to listen."""
        self._flow.transport = transport
        self._peername = transport.get_extra_info("peername")
        if not self._connections.opened(self):
            self._deaf = True
            transport.abort()  # type: ignore[attr-defined]
            return
        self._expect(KEEPALIVE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the work on what was asked here."""
        self._flow.transport = None
        self._flow.resume()
        self._deaf = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        del self._parser  # it knows us: a cycle, that would wait for the collector
        if self._body is not None:
            self._body.fail("the client is gone")
        if self._task is not None:
            self._task.cancel()
        self._connections.closed(self)

    def pause_writing(self) -> None:
        """Hold writers back."""
        self._flow.pause()

    def resume_writing(self) -> None:
        """Let them go on."""
        self._flow.resume()

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests."""
        if self._deaf:
            return
        self._ended = False
        self._most_head = self._head_bytes + len(data)
        try:
            self._feed(data)
        except _Refused:
            pass
        except HttpParserError as error:
            if not isinstance(error.__context__, _Refused):
                self._refuse(400, "bad_http", f"This is not HTTP as we take it: {error}.")
        if self._in_head and not self._deaf and (self._target or not self._ended):
            self._head_goes_on(len(data))

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                if not self._upgrading:  # it was refused by its handler; what follows is no HTTP
                    self._deaf = True
                    return
                data = self._without_upgrade() + data[upgrade.args[0] :]

    def _without_upgrade(self) -> bytes:
        """Return the head again without its offer, for a new parser: this one takes all that follows for a tunnel."""
        method = self._parser.get_method()
        lines = [b"%b %b HTTP/%b" % (method, self._target, self._parser.get_http_version().encode())]
        lines += [
            name.encode("utf-8", "surrogateescape") + b": " + value.encode("utf-8", "surrogateescape")
            for name, value in self._pairs
            if name.lower() != "upgrade"
        ]
        self._parser = HttpRequestParser(self)
        self._target, self._pairs = b"", []
        self._upgrading = False
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _head_goes_on(self, more: int) -> None:
        """The head is not whole yet."""
        begun = self._head_bytes > 0
        self._head_bytes += more
        if self._head_bytes > MAX_HEAD:
            self._refuse(431, "head_too_large", _HEAD_TOO_LARGE)
        elif not begun and self._task_idle:
            self._expect(HEAD_S)

    # --- httptools

    def on_url(self, part: bytes) -> None:
        """Take (a part of) the target."""
        self._target += part
        if len(self._target) > MAX_HEADER_LINE:
            self._stop(414, "target_too_long", f"The target of a request may have {MAX_HEADER_LINE} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one behind a body, which says nothing to us. They are bounded by what is read at once."""
        if self._in_head:
            self._raw.append((name, value))

    def on_headers_complete(self) -> None:
        """Hand the request on; its body may still come."""
        parser = self._parser
        method = parser.get_method()
        pairs = self._pairs = self._decoded()
        upgrade = parser.should_upgrade()
        if upgrade and method != b"CONNECT" and not _offers_websocket(pairs):
            self._upgrading = True
            return
        version = parser.get_http_version()
        self._check_head(method, version)
        if len(self._waiting) >= MAX_PIPELINED:
            self._stop(400, "too_many_pipelined", f"At most {MAX_PIPELINED} requests may wait on one connection.")
        self._in_head = False
        self._head_bytes = 0
        body = self._body = Body(self._loop, self._pause)
        request = Request(
            method=method.decode("ascii"),
            target=self._target.decode("utf-8", "surrogateescape"),
            http_1_1=version == "1.1",
            keep_alive=parser.should_keep_alive() and not upgrade,
            pairs=pairs,
            body=body,
            writer=Writer(self._flow),
            protocol=self,
            peername=self._peername,
        )
        self._queue(request)

    def _decoded(self) -> HeaderList:
        raw, self._raw = self._raw, []
        if len(raw) > MAX_HEADERS:
            self._stop(431, "too_many_headers", f"A request may have {MAX_HEADERS} headers.")
        if self._most_head > MAX_HEADER_LINE:  # else no line is longer
            sizes = [len(name) + len(value) for name, value in raw]
            if max(sizes, default=0) > MAX_HEADER_LINE:
                self._stop(431, "header_too_long", f"A header may have {MAX_HEADER_LINE} bytes.")
            if sum(sizes) > MAX_HEAD:
                self._stop(431, "head_too_large", _HEAD_TOO_LARGE)
        return [
            (
                NAMES[name],
                (value.strip(b" \t") if value[:1] in _BLANKS or value[-1:] in _BLANKS else value).decode(
                    "utf-8", "surrogateescape"
                ),
            )
            for name, value in raw
        ]

    def _check_head(self, method: bytes, version: str) -> None:
        """Refuse what llhttp lets pass and HTTP/1.1 does not (RFC 9112, sections 3.2 and 6.1)."""
        if version not in ("1.0", "1.1"):
            self._stop(505, "bad_version", "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        hosts = 0
        for name, value in self._pairs:
            lower = LOWER[name]
            if lower == "host":
                hosts += 1
            elif lower == "transfer-encoding" and (value.lower() != "chunked" or version == "1.0"):
                self._stop(400, "bad_transfer_encoding", "The only transfer coding known here is `chunked`.")
        if hosts > 1 or (not hosts and version == "1.1"):
            self._stop(400, "bad_host", "A request has exactly one Host header.")

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._body is not None:
            self._body.feed(data)

    def on_message_complete(self) -> None:
        """The request is whole; the next one may begin."""
        if self._upgrading:
            return
        if self._body is not None:
            self._body.end()
        self._body, self._in_head, self._ended = None, True, True
        self._target, self._pairs = b"", []

    def _stop(self, status: int, code: str, message: str) -> None:
        self._refuse(status, code, message)
        raise _Refused

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer an error after what is being answered, and hear nothing more."""
        self._deaf = True
        if self._body is not None:  # its reader, or who has read enough of it, gives the answer
            self._body.fail(message)
            return
        self._queue(ApiError(status, code, message))

    def _pause(self, on: bool) -> None:
        """Stop or resume reading; several parties may want it stopped."""
        self._pauses += 1 if on else -1
        if self.transport is None:
            return
        if on and self._pauses == 1:
            self.transport.pause_reading()
        elif not on and self._pauses == 0:
            self.transport.resume_reading()

    # --- time

    def _expect(self, seconds: float) -> None:
        """Close the connection unless something else is expected by then."""
        self._deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        """The timer is not moved with each request: it looks whether its time has really come."""
        self._timer = None
        if self._loop.time() < self._deadline:
            if self._deadline != float("inf"):
                self._timer = self._loop.call_at(self._deadline, self._look)
        elif self.transport is not None:
            self.transport.close()

    # --- the requests, one after the other

    @property
    def _task_idle(self) -> bool:
        return self._task is None or self._news is not None

    def _queue(self, item: Request | ApiError) -> None:
        self._waiting.append(item)
        if self._task is None:
            self._task = self._loop.create_task(self._serve())
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _serve(self) -> None:
        try:
            while await self._next():
                item = self._waiting.popleft()
                self._deadline = float("inf")
                if isinstance(item, ApiError):
                    await self._write_error(item)
                    break
                if not await self._answer(item) or (self._last and self._quiet):
                    break
                self._expect(HEAD_S if self._head_bytes else KEEPALIVE_S)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("a connection broke")
        finally:
            self._task = None
            self._deaf = True
            if self.transport is not None:
                self.transport.close()

    async def _next(self) -> bool:
        while not self._waiting:
            if self._deaf:
                return False
            self._news = self._loop.create_future()
            try:
                await self._news
            finally:
                self._news = None
        return True

    async def _answer(self, request: Request) -> bool:
        """Answer one request. Returns whether the next one may follow on this connection."""
        set_request("")  # the one before it on this connection is over
        response = await self._handler(request)
        if not (isinstance(response, RawResponse) and response.over):
            await response.prepare(request)
            await response.write_eof()
        body = request.content
        if body.is_eof():
            return bool(response.keep_alive)
        try:
            async with asyncio.timeout(LINGER_S):
                await body.discard()
        except (TimeoutError, web.RequestPayloadError):
            return False
        return bool(response.keep_alive) and body.is_eof()

    async def _write_error(self, error: ApiError) -> None:
        """Answer what is no request, and wait for the client to see it: closing with bytes unread would cut it off."""
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {_REASONS.get(error.status, 'Bad Request')}\r\nContent-Type: application/json\r\n"
        )
        self._flow.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        if self.transport.can_write_eof():  # not under TLS
            self.transport.write_eof()
        await asyncio.sleep(LINGER_S)

    @property
    def _quiet(self) -> bool:
        """No request has begun that is not answered yet."""
        return not self._waiting and self._in_head and not self._head_bytes

    @property
    def waits(self) -> bool:
        """No request is here whole: nothing is lost with it that anybody works on."""
        return self._task_idle and not self._waiting

    def once(self) -> None:
        """End it with the first answer behind which no request has begun."""
        self._last = True

    def finish(self) -> None:
        """End it when every request that has begun to come is answered; an idle one now."""
        self._last = True
        if self._task_idle and self._quiet and self.transport is not None:
            self.transport.close()

    def cut(self) -> None:
        """End it now."""
        if self.transport is not None:
            self.transport.abort()


def _offers_websocket(pairs: HeaderList) -> bool:
    return any(name.lower() == "upgrade" and "websocket" in value.lower() for name, value in pairs)


_BLANKS = frozenset((b" ", b"\t"))
_HEAD_TOO_LARGE = f"The head of a request may have {MAX_HEAD} bytes."
_REASONS = {414: "URI Too Long", 431: "Request Header Fields Too Large", 505: "HTTP Version Not Supported"}
