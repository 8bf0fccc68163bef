"""The alarm for silent zero hits: the engine keeps finding nothing cached where the digest promised much.

Such a fault costs no error, only time: prefix caching that was switched off, prompts that the engine renders otherwise
than the router reads them, a pool that loses its blocks. Rules:
1. Only requests of which at least `MIN_TOKENS` were promised count, the last `WINDOW` of them.
2. The alarm goes on when `ENOUGH` of these together found less than `ALARM_SHARE` of what was promised, and off when
   they found more than `CALM_SHARE`.
"""

from __future__ import annotations

from collections import deque

#: Promised tokens below which a miss may be a rounding: chunks are bytes, blocks are tokens.
MIN_TOKENS = 256
WINDOW = 64
ENOUGH = 16
ALARM_SHARE = 0.05
CALM_SHARE = 0.25


class HitWatch:
    """Fed with what was promised and what was found, in tokens."""

    def __init__(self) -> None:
        self.alarm = False
        self.alarms = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def started(self, promised: int, found: int) -> bool:
        """The engine started a request. True when that changed the alarm."""
        if promised < MIN_TOKENS:
            return False
        self._seen.append((promised, min(found, promised)))
        share = self.share
        if not self.alarm and len(self._seen) >= ENOUGH and share < ALARM_SHARE:
            self.alarm = True
            self.alarms += 1
            return True
        if self.alarm and share > CALM_SHARE:
            self.alarm = False
            return True
        return False

    @property
    def share(self) -> float:
        """Found tokens of those promised, over the window; 1 when nothing was promised."""
        promised = sum(promised for promised, _ in self._seen)
        return sum(found for _, found in self._seen) / promised if promised else 1.0

    def snapshot(self) -> dict[str, object]:
        """The state as plain JSON values."""
        return {
            "alarm": self.alarm,
            "alarms": self.alarms,
            "requests": len(self._seen),
            "promised_tokens": sum(promised for promised, _ in self._seen),
            "found_tokens": sum(found for _, found in self._seen),
        }
