"""Cache hits by the engine's counter: shared by promise, sums kept, begun anew after a restart."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.counted_hits import MAX_WAITING, CountedHits, counter_of
from node.hit_reader import HitReader
from node.hits import ENOUGH
from node.metrics import Metrics

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


class Engine:
    """An engine of which only the page of metrics is seen."""

    def __init__(self) -> None:
        self.hits: int | None = 100
        self.asked = 0
        self.there = True
        self.counted = CountedHits()
        self.metrics = Metrics(lambda: 0.0)
        self.reader = HitReader(self.counted, self.metrics, wanted=lambda: self.there, read=self.page)

    async def page(self) -> bytes:
        self.asked += 1
        return b"" if self.hits is None else b'vllm:prefix_cache_hits_total{engine="0"} %d\n' % self.hits


async def test_an_engine_that_finds_nothing_raises_the_alarm_without_a_connector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    await engine.reader.turn()
    for _ in range(ENOUGH):
        engine.counted.ended(1000, 1200)
    with caplog.at_level(logging.WARNING, "grapevine"):
        await engine.reader.turn()
    assert engine.metrics.hits.alarm and "0 %" in caplog.text
    page = engine.metrics.page()
    for line in (b"silent_zero_hits 1.0", b"predicted_cached_tokens_total 16000.0", b"actual_cached_tokens_total 0.0"):
        assert line in page
    for _ in range(4 * ENOUGH):
        engine.counted.ended(1000, 1200)
        engine.hits = (engine.hits or 0) + 1000
    await engine.reader.turn()
    assert not engine.metrics.hits.alarm and b"actual_cached_tokens_total 64000.0" in engine.metrics.page()


async def test_an_engine_is_asked_only_for_what_it_can_tell() -> None:
    engine = Engine()
    await engine.reader.turn()
    await engine.reader.turn()
    assert engine.asked == 1  # nothing was run since
    engine.counted.ended(1000, 1200)
    engine.there = False  # our connector tells by now, or the engine is gone
    await engine.reader.turn()
    assert engine.asked == 1 and engine.counted.wanted
    engine.there, engine.hits = True, None  # no vLLM: it counts nothing
    engine.counted.ended(1000, 1200)
    await engine.reader.turn()
    assert engine.asked == 2 and not engine.metrics.hits.snapshot()["requests"]
