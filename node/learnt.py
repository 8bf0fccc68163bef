"""What an engine's finished requests taught, and how much that still weighs.

The weight is the number of recent requests it rests on, at most `WINDOW`. It stands for `FRESH_S` after the last of
them, then halves every `FADE_S`. Nothing is thrown away by that: the reader of the load vector mixes what weighs little
with what is usual among the peers. When something is learnt again after less than one request of weight is left, it
begins anew.
"""

from __future__ import annotations

import math

from node.prefill import PrefillLearner, Work
from node.window import Rate, Window

#: Requests that quantiles are taken over (the seed's latency policy: last 100).
WINDOW = 100

#: Share of the past that one more finished request leaves.
KEEP = 0.9

#: Seconds without a finished request after which what was learnt loses weight, and in which it then halves.
FRESH_S = 60.0
FADE_S = 60.0


class Learnt:
    """Times of prompts, rates and latencies. Milliseconds in the windows; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.prefill = PrefillLearner()
        self._samples = 0.0
        self._ended_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.ttft, self.gap, self.whole = Window(WINDOW), Window(WINDOW), Window(WINDOW)
        self.decode = Rate(KEEP)

    def prompt(self, work: Work, seconds: float, now: float) -> None:
        """A prompt was computed, `seconds` after the one before it."""
        self._refresh(now)
        self.prefill.completed(work, seconds * 1000)

    def ended(self, now: float) -> None:
        """One more request is done and about to be entered."""
        self._refresh(now)
        self._samples, self._ended_at = min(float(WINDOW), self.weight(now) + 1), now

    def weight(self, now: float) -> float:
        """Requests that all this rests on, as far as they are recent."""
        idle_s = now - self._ended_at - FRESH_S
        if not idle_s > 0 or not self._samples:
            return self._samples
        return self._samples * math.pow(0.5, idle_s / FADE_S)

    def _refresh(self, now: float) -> None:
        if self._samples and self.weight(now) < 1:
            self._samples = 0.0
            self._begin()
            self.prefill.forget()

    def validate(self) -> None:
        """Every invariant, for tests."""
        assert 0 <= self._samples <= WINDOW
        assert all(len(window) <= WINDOW for window in (self.ttft, self.gap, self.whole))
