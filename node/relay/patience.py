"""How long nothing may come: slow is not dead, so a wait that is over is prolonged while its target shows life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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


@asynccontextmanager
async def patience(limit_s: float, most_s: float, moves: Moves) -> AsyncIterator[asyncio.Timeout]:
    """Give the block ``limit_s`` seconds, and as many again whenever ``moves`` has changed by then, up to ``most_s``.

    The timer that is given ends the block earlier when it is rescheduled.

    :raises UpstreamSilentError: the time is over.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(most_s) as timer:
            lookout = _Lookout(timer, limit_s, moves)
            try:
                yield timer
            finally:
                lookout.close()
    except TimeoutError as error:
        raise UpstreamSilentError(f"no first byte after {loop.time() - began:.1f} s") from error
