"""A pull for one request, beside that request's way into the engine.

Rules
1. An engine whose connector holds requests is asked at once: the request takes its place in the engine's queue, and is
   passed over there until the pull is over. Its wait and its pull are one time and not two, and whoever needs no pull
   is computed meanwhile.
2. Any other engine is asked when the pull is over, and so is one that has nothing else to compute: there is no queue to
   wait in, and a vLLM that holds all it has steps without a pause, with one core in the engine and one in each worker.
3. The connector hears of the end of every pull that it holds a request for, also of one that failed or was dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

_log = logging.getLogger("grapevine.kv")

#: Seconds that a request may be held beyond its pull's deadline: for the news to get there.
GRACE_S = 1.0

#: Blocks that came, by the node that gave them.
Pulled: TypeAlias = Mapping[str, int]


class Pulling:
    """One pull; `begin` makes it. `hold_s`: how long the engine is to wait for its end, 0 when it is over."""

    def __init__(self, work: asyncio.Task[Pulled] | None, hold_s: float, came: Pulled | None = None) -> None:
        self._work = work
        self._came = came or {}
        self.hold_s = hold_s

    @property
    def came(self) -> Pulled:
        """What came; nothing while it is not over, as when the engine refused the request at once."""
        if self._work is None or not self._work.done() or self._work.cancelled():
            return self._came
        return self._work.result()

    @property
    def blocks(self) -> int:
        """Blocks that came, from all sources."""
        return sum(self.came.values())

    def when_over(self, tell: Callable[[int], None]) -> None:
        """Call with the blocks that came, once no more will come: now if it is over."""
        if self._work is None:
            tell(self.blocks)
        else:
            self._work.add_done_callback(lambda _: tell(self.blocks))

    def drop(self) -> None:
        """Nobody waits for it any more."""
        if self._work is not None:
            self._work.cancel()


async def begin(pull: Callable[[], Awaitable[Pulled]], deadline_s: float, over: Callable[[], None] | None) -> Pulling:
    """Begin to pull. `over` tells the connector that holds the request; None: there is none, so wait for the end."""

    async def work() -> Pulled:
        try:
            return await pull()
        except Exception:  # a bug of ours: it must not cost the request, whose engine needs no pull
            _log.exception("a pull failed")
            return {}

    if over is None:
        return Pulling(None, 0.0, await work())
    task = asyncio.create_task(work(), name="grapevine-pull")
    task.add_done_callback(lambda _: over())
    return Pulling(task, deadline_s + GRACE_S)
