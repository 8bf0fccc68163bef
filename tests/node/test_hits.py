from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.hits import ENOUGH, MIN_TOKENS, WINDOW, HitWatch
from node.metrics import Metrics


def fed(watch: HitWatch, count: int, promised: int, found: int) -> list[bool]:
    return [watch.started(promised, found) for _ in range(count)]


def test_promises_that_keep_being_broken_raise_the_alarm_once() -> None:
    watch = HitWatch()
    assert fed(watch, ENOUGH + 5, 1000, 0) == [False] * (ENOUGH - 1) + [True] + [False] * 5
    assert watch.alarm and watch.snapshot()["promised_tokens"] == 1000 * (ENOUGH + 5)


def test_hits_that_come_back_end_it() -> None:
    watch = HitWatch()
    fed(watch, WINDOW, 1000, 0)
    changes = fed(watch, WINDOW, 1000, 1000)
    assert changes.count(True) == 1 and not watch.alarm and watch.share == 1.0
    fed(watch, WINDOW, 1000, 0)
    assert watch.alarm and watch.alarms == 2


def test_small_promises_partial_hits_and_few_requests_are_no_alarm() -> None:
    for count, promised, found in ((100, MIN_TOKENS - 1, 0), (100, 1000, 100), (ENOUGH - 1, 1000, 0), (100, 0, 0)):
        watch = HitWatch()
        assert not any(fed(watch, count, promised, found)) and not watch.alarm


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=300))
def test_the_share_is_one_and_the_window_is_bounded(seen: list[tuple[int, int]]) -> None:
    watch = HitWatch()
    for promised, found in seen:
        watch.started(promised, found)
        assert 0 <= watch.share <= 1 and len(watch._seen) <= WINDOW


def test_the_alarm_is_a_metric_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(lambda: 0.0)
    with caplog.at_level(logging.INFO, logger="grapevine"):
        for _ in range(ENOUGH + 9):
            metrics.started(2000, 0, 2500)
        assert len(caplog.records) == 1 and "prefix caching" in caplog.text
        assert b"grapevine_silent_zero_hits 1.0" in metrics.page()
        for _ in range(WINDOW):
            metrics.started(2000, 2000, 2500)
    assert b"grapevine_silent_zero_hits 0.0" in metrics.page() and len(caplog.records) == 2
