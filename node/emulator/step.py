"""One step of an emulated engine, or a run of equal ones: while only decoding goes on, many steps are one event.

In a run of pure decoding each step is longer than the one before it by a constant (every context grows by one token
per sequence), so the end of the n-th step is a square polynomial in n, and finding the step that a moment falls into
needs no loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from node.emulator.sequence import Sequence


@dataclass(slots=True)
class Step:
    """`count` steps from `start` on; the first takes `first_s`, each further one `more_s` longer."""

    start: float
    count: int
    first_s: float
    more_s: float = 0.0
    #: Sequences that decode one token a step, and those of which a piece of prompt is computed.
    decoding: list[Sequence] = field(default_factory=list)
    prefilling: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When the last of them is over."""
        return self.end_of(self.count)

    def end_of(self, count: int) -> float:
        """When the first `count` of them are over."""
        return self.start + count * self.first_s + self.more_s * (count * (count - 1) / 2)

    def boundary(self, at: float) -> int:
        """The least number of steps that are over no earlier than `at`; at least 1, at most all."""
        elapsed = at - self.start
        if self.count == 1 or elapsed <= self.first_s:
            return 1
        if self.more_s > 0:
            half = self.first_s - self.more_s / 2
            guess = (math.sqrt(half * half + 2 * self.more_s * elapsed) - half) / self.more_s
        else:
            guess = elapsed / self.first_s
        steps = max(1, min(self.count, int(guess)))
        # The root is off by a rounding at most: settle it with the formula that `end` uses.
        while steps < self.count and self.end_of(steps) < at:
            steps += 1
        while steps > 1 and self.end_of(steps - 1) >= at:
            steps -= 1
        return steps
