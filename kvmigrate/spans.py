"""Sets of block numbers as spans: few and long, where a list of numbers would be walked again and again. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from .errors import InvariantError


class Spans:
    """Disjoint, not touching, in order. A span is (first, end)."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def add(self, first: int, end: int) -> None:
        """Put these numbers in; those that are in already stay."""
        if first >= end:
            return
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def discard(self, first: int, end: int) -> None:
        """Take these numbers out; harmless for those that are not in."""
        low, high = bisect_right(self._ends, first), bisect_left(self._firsts, end)
        if first >= end or low >= high:
            return
        kept = [(self._firsts[low], first), (end, self._ends[high - 1])]
        kept = [span for span in kept if span[0] < span[1]]
        self._firsts[low:high] = [span[0] for span in kept]
        self._ends[low:high] = [span[1] for span in kept]

    def first(self, low: int, high: int) -> tuple[int, int] | None:
        """Return the first span within [low, high), cut to it; None when there is none."""
        place = bisect_right(self._ends, low)
        if low >= high or place == len(self._firsts) or self._firsts[place] >= high:
            return None
        return max(self._firsts[place], low), min(self._ends[place], high)

    def validate(self) -> None:
        """Check what the class says; InvariantError when it is not so."""
        edges = [edge for span in self for edge in span]
        if len(set(edges)) != len(edges) or edges != sorted(edges):
            raise InvariantError("spans overlap, touch or are out of order")
