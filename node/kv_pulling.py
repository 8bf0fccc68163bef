"""A pull for one request, beside that request's way into the engine.

Rules
1. An engine whose connector holds requests is asked at once: the request takes its place in the engine's queue, and is
   passed over there until the pull is over. Its wait and its pull are one time and not two, and whoever needs no pull
   is computed meanwhile.
2. Any other engine is asked when the pull is over.
3. The connector hears of the end of every pull that it holds a request for, also of one that failed or was dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

#: Seconds that a request may be held beyond its pull's deadline: for the news to get there.
GRACE_S = 1.0


class Pulling:
    """One pull; `begin` makes it. `hold_s`: how long the engine is to wait for its end, 0 when it is over."""

    def __init__(self, work: asyncio.Task[int] | None, hold_s: float, came: int = 0) -> None:
        self._work = work
        self._came = came
        self.hold_s = hold_s

    async def blocks(self) -> int:
        """Wait for its end; the number of blocks that came."""
        return self._came if self._work is None else await self._work

    def drop(self) -> None:
        """Nobody waits for it any more."""
        if self._work is not None:
            self._work.cancel()


async def begin(pull: Callable[[], Awaitable[int]], deadline_s: float, over: Callable[[], None] | None) -> Pulling:
    """Begin to pull. `over` tells the connector that holds the request; None: there is none, so wait for the end."""
    if over is None:
        return Pulling(None, 0.0, await pull())

    async def work() -> int:
        return await pull()

    task = asyncio.create_task(work(), name="grapevine-pull")
    task.add_done_callback(lambda _: over())
    return Pulling(task, deadline_s + GRACE_S)
