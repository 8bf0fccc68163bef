"""Cache hits by the engine's counter: shared by promise, sums kept, begun anew after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.counted_hits import MAX_WAITING, CountedHits, counter_of

PAGE = (
    b"# TYPE vllm:prefix_cache_hits_total counter\n"
    b'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0\n'
    b'vllm:prefix_cache_hits_total{engine="1",model_name="a b"} 2.0\n'
    b'vllm:prefix_cache_hits_created{engine="0"} 1.7e+09\n'
)


def test_what_was_found_is_shared_by_what_was_promised() -> None:
    hits = CountedHits()
    assert hits.wanted and hits.read(500.0) == [] and not hits.wanted
    for promised, prompt in ((0, 3000), (300, 1000), (100, 120)):
        hits.ended(promised, prompt)
    assert hits.wanted and hits.read(900.0) == [(0, 0, 3000), (300, 300, 1000), (100, 100, 120)]
    hits.ended(0, 300)
    hits.ended(0, 100)
    assert hits.read(1100.0) == [(0, 150, 300), (0, 50, 100)]


def test_an_engine_that_started_again_is_no_miss() -> None:
    hits = CountedHits()
    hits.read(500.0)
    hits.ended(400, 1000)
    assert hits.read(0.0) == []
    hits.ended(400, 1000)
    assert hits.read(400.0) == [(400, 400, 1000)]
    hits.ended(400, 1000)
    hits.afresh()
    assert hits.wanted and hits.read(9000.0) == []


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 1000)), max_size=40), st.integers(0, 1 << 40))
def test_nobody_finds_more_than_its_prompt_and_all_together_not_more_than_was_found(
    ended: list[tuple[int, int]], found: int
) -> None:
    hits = CountedHits()
    hits.read(0.0)
    for promised, prompt in ended:
        hits.ended(promised, prompt)
    shared = hits.read(float(found))
    assert [(each.promised, each.prompt) for each in shared] == ended
    assert all(0 <= each.found <= each.prompt for each in shared) and sum(each.found for each in shared) <= found


def test_it_is_bounded() -> None:
    hits = CountedHits()
    hits.read(0.0)
    for number in range(MAX_WAITING + 10):
        hits.ended(number, number)
    assert len(hits.read(1.0)) == MAX_WAITING


@pytest.mark.parametrize(
    ("page", "value"),
    [
        (PAGE, 42.0),
        (b"", None),
        (b"vllm:num_requests_running 3\n", None),
        (b"vllm:prefix_cache_hits_total nan\nvllm:prefix_cache_hits_total\nvllm:prefix_cache_hits_total inf", None),
        (b"vllm:prefix_cache_hits_total -3\n\xff\xfe\n", None),
        (b"vllm:prefix_cache_hits_total 0.0\n", 0.0),
    ],
)
def test_the_counter_is_read_and_nonsense_is_none(page: bytes, value: float | None) -> None:
    assert counter_of(page) == value
