"""Plain counts give the page that the client library's own counters would."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from node.tally import Spread, Tally

BOUNDS = (0.01, 0.1, 1.0, 10.0)
LABELS = st.sampled_from(["a", "b"])
VALUES = st.sampled_from([0.0, 0.01, 0.0100001, 0.1, 0.5, 1.0, 10.0, 11.0])


def page(registry: CollectorRegistry) -> list[str]:
    """Its lines in order, without the times of creation."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not re.search(r"_created\b", line))


@given(st.lists(st.tuples(LABELS, VALUES)))
def test_the_page_is_that_of_the_library(entries: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, spread = Tally("t", "T.", ("x",)), Spread("s_seconds", "S.", BOUNDS, ("x",))
    plain, bare = Tally("p", "P."), Spread("b_seconds", "B.", BOUNDS)
    for collector in (tally, spread, plain, bare):
        ours.register(collector)
    counter, histogram = (
        Counter("t", "T.", ("x",), registry=theirs),
        Histogram("s_seconds", "S.", ("x",), buckets=BOUNDS, registry=theirs),
    )
    lone, alone = Counter("p", "P.", registry=theirs), Histogram("b_seconds", "B.", buckets=BOUNDS, registry=theirs)
    for label, value in entries:
        tally.add((label,))
        counter.labels(label).inc()
        spread.add(value, (label,))
        histogram.labels(label).observe(value)
        plain.add()
        lone.inc()
        bare.add(value)
        alone.observe(value)
    assert page(ours) == page(theirs)
