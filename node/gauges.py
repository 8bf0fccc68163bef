"""Asks an engine without our connector how busy it is: requests running and waiting, KV cache in use.

Rules
1. Only a ready engine is asked, and only while no connector reports for it, which is exact and comes by itself.
2. One question at a time, with the deadline and the bound of `node.engine_metrics`; `node.engine.pace` says when.
3. An answer goes to the meter as a report of the moment of the question. It is no sign of life (`node.meter`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from node.engine.pace import EVERY_S, Pace
from node.engine.probe import parse_load
from node.meter import LoadMeter

_log = logging.getLogger("grapevine.engine")


class Gauges:
    """``wanted``: there is somebody to ask. ``read`` gives the page of metrics, b"" when there is none."""

    def __init__(
        self,
        meter: LoadMeter,
        *,
        wanted: Callable[[], bool],
        read: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float],
    ) -> None:
        self._meter = meter
        self._wanted = wanted
        self._read = read
        self._clock = clock
        self._pace = Pace()

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            try:
                await self.turn()
            except Exception:
                _log.exception("cannot read the engine's metrics")
                self._pace.missed(self._clock())
            # Never longer than this: whether somebody is there to ask is looked at each time.
            await asyncio.sleep(min(EVERY_S, self._pace.wait_s(self._clock()) or EVERY_S))

    async def turn(self) -> None:
        """Ask, if it is time."""
        if not self._wanted():
            self._pace.afresh()
            return
        if self._pace.wait_s(self._clock()):
            return
        self._meter.asking(self._clock())
        load = parse_load(await self._read())
        if load is None or not self._wanted():
            self._pace.missed(self._clock())
            return
        self._meter.answered(*load)
        self._pace.told(self._clock())
