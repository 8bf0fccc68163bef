"""How long nothing may come: slow is not dead, so a wait that is over is prolonged while its target shows life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from node.relay.upstream import UpstreamSilentError

#: Counts the signs of life of a target's engine; None = nothing is heard of it.
Moves = Callable[[], int | None]


class _Lookout:
    """Looks every ``limit_s`` seconds whether something has moved since, and ends the time when nothing has."""

    def __init__(self, timer: asyncio.Timeout, limit_s: float, moves: Moves) -> None:
        self._timer = timer
        self._limit_s = limit_s
        self._moves = moves
        self._loop = asyncio.get_running_loop()
        self._seen = moves()
        self._next = self._loop.call_later(limit_s, self._look)

    def _look(self) -> None:
        seen = self._moves()
        if seen is None or seen == self._seen:
            if not self._timer.expired():
                self._timer.reschedule(self._loop.time())
            return
        self._seen = seen
        self._next = self._loop.call_later(self._limit_s, self._look)

    def close(self) -> None:
        self._next.cancel()


def patience(limit_s: float, most_s: float, moves: Moves) -> _Patience:
    """Give the block ``limit_s`` seconds, and as many again whenever ``moves`` has changed by then, up to ``most_s``.

    The timer that is given ends the block earlier when it is rescheduled.

    :raises UpstreamSilentError: the time is over.
    """
    return _Patience(limit_s, most_s, moves)


class _Patience:
    """An asynchronous context manager by hand: one made of a generator takes twice as long."""

    __slots__ = ("_began", "_limit_s", "_lookout", "_moves", "_timer")

    def __init__(self, limit_s: float, most_s: float, moves: Moves) -> None:
        self._limit_s = limit_s
        self._moves = moves
        self._timer = asyncio.timeout(most_s)

    async def __aenter__(self) -> asyncio.Timeout:
        self._began = asyncio.get_running_loop().time()
        await self._timer.__aenter__()
        self._lookout = _Lookout(self._timer, self._limit_s, self._moves)
        return self._timer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lookout.close()
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as late:
            waited_s = asyncio.get_running_loop().time() - self._began
            raise UpstreamSilentError(f"no first byte after {waited_s:.1f} s") from late
        if isinstance(error, TimeoutError):
            waited_s = asyncio.get_running_loop().time() - self._began
            raise UpstreamSilentError(f"no first byte after {waited_s:.1f} s") from error
