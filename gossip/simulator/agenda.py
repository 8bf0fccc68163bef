"""Virtual time: one heap of (moment, order, what). What is due at one moment happens in the order it was entered."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """What will happen, and what time it is, in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, moment: float, what: Callable[..., None], *args: Any) -> None:
        """Do something at a moment of virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (moment, self._order, what, args))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, what, args = pop(heap)
            what(*args)
        self.now = until
