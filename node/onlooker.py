"""Looks at an engine without our connector: how busy it is, and what it found cached.

Rules
1. Only a ready engine is asked, and only while no connector reports for it, which is exact and comes by itself.
2. One question at a time, for everything that its page of metrics tells, with the deadline and the bound of
   `node.engine_metrics`; `node.engine.pace` says when.
3. What it says of its load goes to the meter as a report of the moment of the question. It is no sign of life
   (`node.meter`).
4. Its counter of cache hits (`node.counted_hits`) is read off the same page, at most every `HITS_EVERY_S` and only
   where that would tell something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.counted_hits import CountedHits, counter_of
from node.engine.pace import EVERY_S, Pace
from node.engine.probe import parse_load
from node.meter import LoadMeter
from node.metrics import Metrics

#: Seconds between two readings of the counter: an alarm has time.
HITS_EVERY_S = 10.0

_log = logging.getLogger("grapevine.engine")


class Onlooker:
    """``wanted``: there is somebody to ask. ``read`` gives the page of metrics, b"" when there is none."""

    def __init__(
        self,
        meter: LoadMeter,
        hits: CountedHits,
        metrics: Metrics,
        *,
        wanted: Callable[[], bool],
        read: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float],
    ) -> None:
        self._meter = meter
        self._hits = hits
        self._metrics = metrics
        self._wanted = wanted
        self._read = read
        self._clock = clock
        self._pace = Pace()
        self._hits_due = float("-inf")

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                await self.turn()
            except Exception:
                _log.exception("cannot read the engine's metrics")
                self._pace.missed(self._clock())
            # Never longer than this: whether somebody is there to ask is looked at each time.
            await asyncio.sleep(min(EVERY_S, self._pace.wait_s(self._clock()) or EVERY_S))

    async def turn(self) -> None:
        """Look, if it is time."""
        if not self._wanted():
            self._afresh()
            return
        now = self._clock()
        if self._pace.wait_s(now):
            return
        self._meter.asking(now)
        page = await self._read()
        if not self._wanted():
            self._afresh()
            return
        self._take_load(page)
        if self._hits.wanted and now >= self._hits_due:
            self._hits_due = now + HITS_EVERY_S
            self._take_hits(page)

    def _afresh(self) -> None:
        """The next look is at another engine, or at one that came back."""
        self._pace.afresh()
        self._hits.afresh()
        self._hits_due = float("-inf")

    def _take_load(self, page: bytes) -> None:
        load = parse_load(page)
        if load is None:
            self._pace.missed(self._clock())
            return
        self._meter.answered(*load)
        self._pace.told(self._clock())

    def _take_hits(self, page: bytes) -> None:
        counter = counter_of(page)
        if counter is None:
            self._hits.afresh()
            return
        for found in self._hits.read(counter):
            self._metrics.started(found.promised, found.found, found.prompt)
