"""Counts of what happens to every request, as plain numbers that are turned into Prometheus' form at the scrape.

The client library's own counters take a lock and several calls each time. Used from the event loop only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Tally(Collector):
    """A counter by labels; whoever counts sees to it that they are few."""

    def __init__(self, name: str, text: str, names: Labels = (), first: Iterable[Labels] = ()) -> None:
        """``first``: values of the labels that are there from the start, at nought."""
        self._name = name
        self._text = text
        self._names = names
        self.counts: dict[Labels, int] = dict.fromkeys(first, 0) if names else {(): 0}

    def add(self, labels: Labels = ()) -> None:
        """Count one."""
        self.counts[labels] = self.counts.get(labels, 0) + 1

    def collect(self) -> Iterable[Metric]:
        """Give the family."""
        family = CounterMetricFamily(self._name, self._text, labels=self._names)
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family


class Spread(Collector):
    """A histogram by labels; `bounds` ascend, each is the largest value of its bucket."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], names: Labels = ()) -> None:
        self._name = name
        self._text = text
        self._names = names
        self._bounds = bounds
        #: Values in each bucket, the last one has no bound; and their sum.
        self.counts: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}
        if not names:
            self._begin(())

    def add(self, value: float, labels: Labels = ()) -> None:
        """Enter a value."""
        if labels not in self.sums:
            self._begin(labels)
        self.counts[labels][bisect_left(self._bounds, value)] += 1
        self.sums[labels] += value

    def _begin(self, labels: Labels) -> None:
        self.counts[labels] = [0] * (len(self._bounds) + 1)
        self.sums[labels] = 0.0

    def collect(self) -> Iterable[Metric]:
        """Give the family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, counts in self.counts.items():
            below, buckets = 0, []
            for name, count in zip(names, counts, strict=True):
                below += count
                buckets.append((name, float(below)))
            family.add_metric(labels, buckets, self.sums[labels])
        yield family
