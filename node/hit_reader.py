"""Reads the cache hits of an engine without our connector off its page of metrics (`node.counted_hits`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.counted_hits import CountedHits, counter_of
from node.metrics import Metrics

#: Seconds between two readings: an alarm has time.
EVERY_S = 10.0

_log = logging.getLogger("grapevine.engine")


class HitReader:
    """``wanted``: an engine is there and no connector reports for it. ``read`` gives its page, or b""."""

    def __init__(
        self,
        hits: CountedHits,
        metrics: Metrics,
        *,
        wanted: Callable[[], bool],
        read: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._hits = hits
        self._metrics = metrics
        self._wanted = wanted
        self._read = read

    async def run(self) -> None:
        """Read for ever."""
        while True:
            try:
                await self.turn()
            except Exception:
                _log.exception("cannot read the engine's cache hits")
            await asyncio.sleep(EVERY_S)

    async def turn(self) -> None:
        """Read once, if that would tell something."""
        if not self._wanted():
            self._hits.afresh()
            return
        if not self._hits.wanted:
            return
        counter = counter_of(await self._read())
        if counter is None or not self._wanted():
            self._hits.afresh()
            return
        for found in self._hits.read(counter):
            self._metrics.started(found.promised, found.found, found.prompt)
