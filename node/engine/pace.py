"""When an engine that reports nothing of itself is asked how busy it is. Pure; ``now`` is monotonic seconds.

An engine that told is asked again after `EVERY_S`, one that did not after twice as long each time, up to `MOST_S`: it
may have no such figures at all, and may get them with its next version.
"""

from __future__ import annotations

#: Seconds from an answer to the next question, and the most after questions that brought nothing.
EVERY_S = 1.0
MOST_S = 60.0


class Pace:
    """Of one engine. There is never more than one question: it ends with `told` or `missed`."""

    def __init__(self) -> None:
        self.afresh()

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next question; 0 = now."""
        return max(0.0, self._due - now)

    def told(self, now: float) -> None:
        """Take that it said how busy it is."""
        self._pause_s = EVERY_S
        self._due = now + EVERY_S

    def missed(self, now: float) -> None:
        """Take that it did not answer, or not that."""
        self._pause_s = min(MOST_S, 2 * self._pause_s)
        self._due = now + self._pause_s

    def afresh(self) -> None:
        """Forget all: the next question is to another engine, or to one that came back."""
        self._pause_s = EVERY_S
        self._due = float("-inf")
