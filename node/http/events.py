"""Server-sent events to any number of pages, within bounds: one picture per tick for all of them.

Rules
1. Nothing is computed while nobody listens. With listeners, one task builds and encodes one tick for all.
2. At most `MAX_LISTENERS`; whoever comes then is refused with 503 and may come again.
3. A listener holds at most one message. One that is too slow misses ticks and gets the whole picture next, which is
   encoded at most once per tick too.
4. A write that does not end within `WRITE_S` ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from node.http.errors import ApiError, ApiFailure

MAX_LISTENERS = 32
#: Seconds between ticks: at least the first, and longer in a large cluster (nodes / NODES_PER_S).
TICK_S = 1.0
NODES_PER_S = 250
#: Seconds that one write may take, and after which a page that lost its connection tries again.
WRITE_S = 20.0
RETRY_S = 1

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # a proxy that holds events back until its buffer is full shows a frozen page
    "X-Content-Type-Options": "nosniff",
}

_log = logging.getLogger("grapevine.page")


class Source(Protocol):
    """What is told; `node.picture.Picture` is it."""

    def nodes(self) -> int:
        """How large a tick is."""
        ...

    def first(self) -> bytes:
        """The whole, as JSON."""
        ...

    def tick(self) -> bytes:
        """What changed since the last tick, as JSON."""
        ...


class _Listener:
    """The mailbox of one page: one message, or the note that it has missed some."""

    def __init__(self) -> None:
        self.message: bytes | None = None
        self.missed = False
        self.wake = asyncio.Event()

    def offer(self, message: bytes) -> None:
        self.missed = self.missed or self.message is not None
        self.message = message
        self.wake.set()


class EventHub:
    """The listeners and the task that ticks for them. ``interval`` is for tests."""

    def __init__(self, source: Source, *, interval: Callable[[], float] | None = None) -> None:
        self._source = source
        self._interval = interval or self._usual
        self._listeners: set[_Listener] = set()
        self._first: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def listeners(self) -> int:
        """Pages that listen now."""
        return len(self._listeners)

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Tell one page, until it goes away or the node stops."""
        if self._closed or len(self._listeners) >= MAX_LISTENERS:
            message = f"This node tells {MAX_LISTENERS} pages at once, or is stopping: try again, or ask another node."
            raise ApiFailure(ApiError(503, "too_many_pages", message, retry_after_s=5))
        listener = _Listener()
        self._listeners.add(listener)
        try:
            return await self._tell(listener, request)
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._rest()

    def close(self) -> None:
        """End all connections: an open page must not hold up the end of its node."""
        self._closed = True
        self._rest()
        self._wake_all()

    async def _tell(self, listener: _Listener, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS)
        response.force_close()
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="grapevine-page")
        message = f"retry: {RETRY_S * 1000}\n".encode() + self._whole()
        while True:
            async with asyncio.timeout(WRITE_S):
                await response.write(message)
            await listener.wake.wait()
            if self._closed or listener.message is None:
                return response
            message = self._whole() if listener.missed else listener.message
            listener.message, listener.missed = None, False
            listener.wake.clear()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval())
            try:
                message = _event("tick", self._source.tick())
            except Exception:
                _log.exception("the page's picture could not be made")
                self._wake_all()  # without a message: the pages come again
                return
            self._first = None
            for listener in self._listeners:
                listener.offer(message)

    def _whole(self) -> bytes:
        if self._first is None:
            self._first = _event("first", self._source.first())
        return self._first

    def _usual(self) -> float:
        return max(TICK_S, self._source.nodes() / NODES_PER_S)

    def _rest(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._first = None

    def _wake_all(self) -> None:
        for listener in self._listeners:
            listener.message = None
            listener.wake.set()


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
