"""Spans against plain sets of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.spans import Spans

Steps = list[tuple[bool, int, int]]
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 40)), max_size=40)


@given(STEPS, st.integers(0, 40), st.integers(0, 40))
def test_spans_are_a_set_of_numbers(steps: Steps, low: int, high: int) -> None:
    spans, numbers = Spans(), set[int]()
    for adds, first, end in steps:
        if adds:
            spans.add(first, end)
            numbers |= set(range(first, end))
        else:
            spans.discard(first, end)
            numbers -= set(range(first, end))
        spans.validate()
    assert {number for first, end in spans for number in range(first, end)} == numbers
    assert bool(spans) == bool(numbers)
    within = sorted(number for number in numbers if low <= number < high)
    found = spans.first(low, high)
    assert (found is None) == (not within)
    if found is not None:
        first, end = found
        assert set(range(first, end)) <= set(within) and first == within[0]
        assert end not in within, "the span is whole"
