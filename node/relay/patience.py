"""How long nothing may come: slow is not dead, so a wait that is over is prolonged while its target shows life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from node.relay.upstream import UpstreamSilentError

#: Counts the signs of life of a target's engine; None = nothing is heard of it.
Moves = Callable[[], int | None]


def patience(limit_s: float, most_s: float, moves: Moves) -> _Patience:
    """Give the block ``limit_s`` seconds, and as many again whenever ``moves`` has changed by then, up to ``most_s``.

    The timer that is given ends the block earlier when it is rescheduled.

    :raises UpstreamSilentError: the time is over.
    """
    return _Patience(limit_s, most_s, moves)


class _Patience:
    """Looks every ``limit_s`` seconds whether something has moved since, and ends the time when nothing has.

    An asynchronous context manager by hand, with one timer: nearly all blocks end long before it, and begin often.
    """

    __slots__ = ("_began", "_limit_s", "_loop", "_moves", "_next", "_seen", "_timer", "_until")

    def __init__(self, limit_s: float, most_s: float, moves: Moves) -> None:
        self._limit_s = limit_s
        self._moves = moves
        self._timer = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._until = self._began + most_s

    async def __aenter__(self) -> asyncio.Timeout:
        await self._timer.__aenter__()
        self._seen = self._moves()
        self._next = self._loop.call_at(min(self._began + self._limit_s, self._until), self._look)
        return self._timer

    def _look(self) -> None:
        seen, now = self._moves(), self._loop.time()
        if seen is None or seen == self._seen or now >= self._until:
            if not self._timer.expired():
                self._timer.reschedule(now)
            return
        self._seen = seen
        self._next = self._loop.call_at(min(now + self._limit_s, self._until), self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next.cancel()
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._silent() from late
        if isinstance(error, TimeoutError):
            raise self._silent() from error

    def _silent(self) -> UpstreamSilentError:
        return UpstreamSilentError(f"no first byte after {self._loop.time() - self._began:.1f} s")
