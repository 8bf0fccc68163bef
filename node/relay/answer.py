"""The client's side of a relayed answer: bytes as they come, back-pressure by pausing the reader, one
watchdog.

Rules:
1. Status, reason, headers and body are the upstream's. Framing alone is made anew: a Content-Length goes
   on as it is, otherwise HTTP/1.1 gets chunks and HTTP/1.0 the end of the connection.
2. Nothing is written before the first piece of the body is here, so that a target that dies before it can
   be replaced.
3. A piece is read only after the last one was taken by the client's socket: a slow reader slows its own
   engine stream and holds no more than the two socket buffers.
4. What breaks after the first byte ends an event stream with an error event and anything else with a cut
   connection: a truncated answer never looks complete.
5. An entry that understands our marks (`node.relay.carry.marks`) hears them between two events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from node.relay.carry.marks import ALIVE, ALIVE_EVERY_S, LATE, code_of, error_event
from node.relay.headers import LOWER, HeaderList
from node.relay.response import RawResponse
from node.relay.upstream import UpstreamAnswer, UpstreamError, UpstreamSilentError

#: The watchdog moves at most this often, in seconds: a timer per piece would cost more than the piece.
_WATCH_STEP_S = 1.0

#: Longest JSON answer that is held back until it is whole, bytes.
MAX_WHOLE = 4 * 1024 * 1024

_NO_BODY_STATUS = frozenset({204, 304})


def is_event_stream(headers: HeaderList) -> bool:
    """Say whether an answer is a stream of server-sent events that we may add an event to."""
    events = False
    for name, value in headers:
        lower = LOWER[name]
        if lower == "content-encoding":
            return False
        if lower == "content-type":
            events = events or value.lower().startswith("text/event-stream")
    return events


class Watchdog:
    """One timer for a whole relay: fires when neither side moved for ``idle_s`` seconds, and at ``end`` (loop time)."""

    __slots__ = ("_end", "_idle_s", "_loop", "_moved", "_timer")

    def __init__(self, timer: asyncio.Timeout, idle_s: float, end: float = float("inf")) -> None:
        self._timer = timer
        self._idle_s = idle_s
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._moved = float("-inf")

    def moved(self) -> None:
        """Note that bytes came or went."""
        now = self._loop.time()
        if now - self._moved >= _WATCH_STEP_S:
            self._moved = now
            self._timer.reschedule(min(now + self._idle_s + _WATCH_STEP_S, self._end))

    def hurry(self, grace_s: float) -> None:
        """Fire after ``grace_s`` seconds unless something moves before. Too late is no error: it has fired."""
        if self._timer.expired():
            return
        self._moved = float("-inf")
        self._timer.reschedule(min(self._loop.time() + grace_s, self._end))


class Relay:
    """Writes one upstream answer to one client. ``marked``: that is an entry, which hears our marks."""

    def __init__(
        self,
        request: web.BaseRequest,
        upstream: UpstreamAnswer,
        headers: HeaderList,
        *,
        idle_s: float,
        on_piece: Callable[[bytes], None],
        marked: bool = False,
        left_s: float | None = None,
    ) -> None:
        self._request = request
        self._upstream = upstream
        self._headers = headers
        self._idle_s = idle_s
        self._on_piece = on_piece
        self._tail = b"\n\n"
        self._writing = False
        self._watchdog: Watchdog | None = None
        #: It is a stream whose reader hears our marks.
        self.marked = marked and is_event_stream(headers)
        self._mark = b""
        self._response: RawResponse | None = None
        self._saying: asyncio.Task[None] | None = None
        #: Loop time at which the client's deadline passes.
        self._end = float("inf") if left_s is None else asyncio.get_running_loop().time() + left_s
        self.error: str | None = None
        #: It was the client's deadline that ended the answer, not a fault of the upstream.
        self.late = False

    async def run(self, first: bytes) -> web.StreamResponse:
        """Relay everything; ``first`` is the piece already read (b"" when the body is empty).

        A failure of the upstream ends the answer as rule 4 says and is left in ``error``; a client that
        goes away raises ConnectionError or CancelledError, with the upstream closed.
        """
        upstream = self._upstream
        response = RawResponse(status=upstream.status, reason=upstream.reason, headers=self._headers)
        try:
            response.begin(self._request)
            if upstream.whole:
                await self._write_whole(response, first)
                return response
            self._response = response
            if self.marked:
                self._beat()
            await self._copy(response, first)
        except UpstreamError as error:
            self.error = str(error)
            await self._end_broken(response, error)
        finally:
            self._response = None
            self._upstream.close()
        return response

    async def _write_whole(self, response: RawResponse, body: bytes) -> None:
        """Nothing more will come: no watch is needed, but where the client does not take it at once."""
        if body:
            self._on_piece(body)
        if response.end(body):
            return
        try:
            async with asyncio.timeout(self._idle_s):
                await response.drain()
        except TimeoutError as error:
            raise ConnectionResetError("the client took nothing for too long") from error

    def say(self, mark: bytes) -> None:
        """Tell the entry something between two events, as soon as there is such a moment."""
        if not self.marked or self._response is None:
            return
        self._mark = mark
        if self._upstream.waiting_since is not None and self._saying is None:
            self._saying = asyncio.ensure_future(self._say(self._response))
            self._saying.add_done_callback(self._said)

    async def _say(self, response: RawResponse) -> None:
        if self._mark and self._response is response and not self._writing and self._between_events:
            mark, self._mark = self._mark, b""
            await response.write(mark)

    def _said(self, saying: asyncio.Task[None]) -> None:
        self._saying = None
        if not saying.cancelled():
            saying.exception()  # an entry that is gone: whoever writes the next piece finds out

    def _beat(self) -> None:
        """Show an entry that waits with us that this node lives."""
        if self._response is None:
            return
        since = self._upstream.waiting_since
        loop = asyncio.get_running_loop()
        if since is not None and time.monotonic() - since >= ALIVE_EVERY_S:
            self.say(self._mark or ALIVE)
        loop.call_later(ALIVE_EVERY_S / 2, self._beat)  # so that one is never much later than that

    @property
    def _between_events(self) -> bool:
        return self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    async def _copy(self, response: RawResponse, piece: bytes) -> None:
        try:
            async with asyncio.timeout(self._idle_s) as timer:
                watchdog = self._watchdog = Watchdog(timer, self._idle_s, self._end)
                while piece:
                    watchdog.moved()
                    self._on_piece(piece)
                    self._tail = piece[-4:]
                    self._writing = True
                    await response.write(piece)
                    self._writing = False
                    if self._mark:
                        await self._say(response)
                    piece = await self._upstream.read()
                self._writing = True
                await response.write_eof()  # waits for the client like any other write
        except TimeoutError as error:
            if self._writing:
                raise ConnectionResetError("the client took nothing for too long") from error
            if asyncio.get_running_loop().time() >= self._end:
                self.late = True
                raise UpstreamSilentError("the time that the request was given is over") from error
            raise UpstreamSilentError("nothing came for too long") from error
        finally:
            self._watchdog = None

    def hurry(self, grace_s: float) -> None:
        """Give the upstream ``grace_s`` more seconds to move: it was declared dead."""
        if self._watchdog is not None:
            self._watchdog.hurry(grace_s)

    async def _end_broken(self, response: RawResponse, error: UpstreamError) -> None:
        if is_event_stream(self._headers) and response.length is None:
            boundary = b"" if self._between_events else b"\n\n"
            code = LATE if self.late else code_of(error)
            event = error_event(f"The stream broke off: {error}", code)
            try:
                async with asyncio.timeout(self._idle_s):
                    await response.write(boundary + event)
                    await response.write_eof()
            except TimeoutError:
                cut(self._request)
            return
        cut(self._request)


def cut(request: web.BaseRequest) -> None:
    """Cut the client's connection, so that a truncated answer cannot look complete."""
    if request.transport is not None:
        request.transport.abort()


async def first_part(upstream: UpstreamAnswer, *, method: str, deadline_s: float, idle_s: float) -> bytes:
    """Wait for what makes an answer worth relaying: its first piece, or of a JSON answer of known length all of it.

    The client of such an answer can do nothing with a part, and as long as it has none the request can run elsewhere.
    Raises what `first_piece` raises; each further piece may take ``idle_s`` seconds.
    """
    first = upstream.at_hand() if method != "HEAD" else None  # usual answers come with their head
    if first is None:
        first = await first_piece(upstream, method=method, deadline_s=deadline_s)
    if not first or upstream.whole:
        return first
    length = _json_length(upstream.headers)
    if not 0 < length <= MAX_WHOLE:
        return first
    parts = [first]
    left = length - len(first)
    while left > 0:
        piece = await first_piece(upstream, method=method, deadline_s=idle_s)
        if not piece:
            break
        parts.append(piece)
        left -= len(piece)
    return b"".join(parts)


def _json_length(headers: HeaderList) -> int:
    """The length of a JSON body, 0 where it is something else or not known."""
    given = {LOWER[name]: value for name, value in headers}
    length = given.get("content-length", "")
    json = given.get("content-type", "").lower().startswith("application/json")
    return int(length) if json and length.isascii() and length.isdecimal() and len(length) < 16 else 0


async def first_piece(upstream: UpstreamAnswer, *, method: str, deadline_s: float) -> bytes:
    """Wait for the first piece of the body, b"" when there is none.

    :raises UpstreamSilentError: nothing within ``deadline_s`` seconds.
    :raises UpstreamBrokenError: cut before it.
    """
    if method == "HEAD" or upstream.status in _NO_BODY_STATUS:
        return b""
    try:
        async with asyncio.timeout(deadline_s):
            return await upstream.read()
    except TimeoutError as error:
        upstream.close()
        raise UpstreamSilentError(f"no first byte within {deadline_s:.1f} s") from error
    except BaseException:  # the client may go away just now: cancelled, and nobody else would close it
        upstream.close()
        raise
