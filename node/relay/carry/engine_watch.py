"""Watches this node's own engine through the streams that it runs: the shell around `silence.py`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from node.engine.vitals import Look, works
from node.meter import LoadMeter
from node.relay.carry.sentry import Sentry
from node.relay.carry.silence import EngineSigns, judge_engine
from node.relay.upstream import UpstreamAnswer

#: Seconds of silence before the processes are looked at; between the two looks that show whether they work; and
#: between two that find them stopped: something else may stop them for a moment.
LOOK_AFTER_S = 0.5
LOOK_APART_S = 0.7
STOPPED_APART_S = 0.4
#: Seconds between two looks: one is a pass over /proc.
LOOK_EVERY_S = 0.2


class WatchedEngine(Protocol):
    """What is asked of the engine."""

    def look(self) -> Look | None:
        """Look at its processes; None when it has none of ours."""
        ...

    def note_stall(self, why: str) -> None:
        """Learn that one of its streams was given up for its silence."""
        ...


class EngineWatch:
    """One for each node."""

    def __init__(self, engine: WatchedEngine, meter: LoadMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._meter = meter
        self._clock = clock
        self._heard = float("-inf")
        self._looks: deque[Look] = deque(maxlen=32)

    def heard(self, now: float) -> None:
        """Bytes of a stream came, or a report of its connector: its loop turns."""
        self._heard = now

    def guard(self, upstream: UpstreamAnswer, streaming: Callable[[], bool]) -> Sentry:
        """Watch one answer until the sentry is closed. ``streaming``: it has begun to show tokens one by one."""
        return Sentry(
            upstream, lambda silent_s: self.judge(silent_s, streaming=streaming()), on_stall=self._engine.note_stall
        )

    def judge(self, silent_s: float, *, streaming: bool = True) -> str:
        """Why the engine is taken to hang, when one of its answers is silent for so long; empty while it is not."""
        if silent_s < LOOK_AFTER_S:
            return ""
        now = self._clock()
        return judge_engine(
            EngineSigns(
                silent_s=silent_s,
                others_s=now - self._heard,
                gap_s=self._meter.gap_s,
                owed_s=self._meter.owed_s,
                working=self._working(now, silent_s),
                streaming=streaming,
            )
        )

    def _working(self, now: float, silent_s: float) -> bool | None:
        looks = self._looks
        if not looks or now - looks[-1].at >= LOOK_EVERY_S:
            look = self._engine.look()
            if look is None:
                looks.clear()
                return None
            looks.append(look)
        latest, within = looks[-1], [look for look in looks if now - look.at <= silent_s]
        if latest.stopped:
            # Until the second look it is not known; it has the benefit of the doubt.
            return not any(look.stopped and latest.at - look.at >= STOPPED_APART_S for look in within)
        before = [look for look in within if latest.at - look.at >= LOOK_APART_S]
        # Without processor time it may still wait for a long step of its device: that alone is no hang.
        return True if before and works(before[-1], latest) else None
