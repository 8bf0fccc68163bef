from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.learnt import FADE_S, FRESH_S
from node.load import LoadVector, decode
from node.meter import (
    FORGET_S,
    GLANCE_S,
    MAX_REPORTED,
    MAX_REQUESTS,
    PRIOR_DECODE_TPS,
    REPORT_S,
    LoadMeter,
)
from node.prefill import PRIOR, PrefillTime
from node.window import Rate, Window


def vector(meter: LoadMeter, now: float) -> LoadVector:
    meter.validate()
    return meter.vector(now, ready=True, draining=False)


def test_a_request_goes_through_waiting_running_and_out() -> None:
    meter = LoadMeter(slots=8)
    meter.dispatched("x", 0.0, 1000)
    meter.started("x", 0.5, 1000, 200)
    meter.dispatched("r", 1.0, 1000, 400)
    load = vector(meter, 1.0)
    assert (load.running, load.waiting) == (1, 1)
    meter.finished("x", 1.0)
    load = vector(meter, 1.0)
    assert (load.running, load.waiting, load.queued_tokens, load.slots) == (0, 1, 600, 8)
    meter.started("r", 2.0, 1100, 300)
    load = vector(meter, 2.0)
    assert (load.running, load.waiting, load.queued_tokens) == (1, 0, 800)
    meter.prefilled("r", 4.0, 2.0)
    meter.first_byte("r", 4.1)
    assert vector(meter, 4.1).queued_tokens == 0
    meter.chunk("r", 4.2)
    meter.chunk("r", 4.3)
    meter.finished("r", 4.4, 3)
    load = vector(meter, 4.5)
    assert (load.running, load.waiting, load.queued_tokens) == (0, 0, 0)
    assert load.prefill_tps == pytest.approx(400.0)  # 800 uncached tokens in 2 s
    assert load.decode_tps == pytest.approx(10.0)  # 2 tokens after the first in 0.2 s
    assert load.ttft_p50_ms == pytest.approx(3100.0)
    assert load.itl_p50_ms == pytest.approx(100.0)
    assert load.e2e_p95_ms == pytest.approx(3400.0)
    assert meter.counts.cached_tokens == 500 and meter.counts.predicted_cached_tokens == 400


def test_nothing_measured_is_sent_as_nothing_and_used_as_a_prior() -> None:
    meter = LoadMeter()
    load = vector(meter, 0.0)
    assert (load.prefill_tps, load.decode_tps, load.ttft_p50_ms, load.e2e_p50_ms) == (0, 0, 0, 0)
    assert (meter.prefill, meter.decode_tps) == (PRIOR, PRIOR_DECODE_TPS)


def test_quantiles_are_over_the_last_hundred() -> None:
    meter = LoadMeter()
    for index in range(250):
        meter.dispatched(str(index), float(index), 10)
        meter.finished(str(index), index + 0.001 * (index + 1))
    load = vector(meter, 300.0)
    assert load.e2e_p50_ms == pytest.approx(200.0, abs=0.01)  # of 151..250
    assert load.e2e_p95_ms == pytest.approx(245.0, abs=0.01)


def test_events_that_come_twice_count_once() -> None:
    meter = LoadMeter()
    for _ in range(2):
        meter.dispatched("r", 0.0, 100)
    for _ in range(2):
        meter.started("r", 1.0, 100, 0)
    for _ in range(2):
        meter.prefilled("r", 2.0, 1.0)
    for _ in range(2):
        meter.first_byte("r", 2.0)
    for _ in range(2):
        meter.finished("r", 3.0, 5)
    meter.failed("r", 3.0)
    load = vector(meter, 3.0)
    assert (meter.active, meter.counts.finished, meter.counts.failed) == (0, 1, 0)
    assert load.prefill_tps == pytest.approx(100.0) and meter.counts.prompt_tokens == 100


def test_events_in_the_wrong_order_do_no_harm() -> None:
    meter = LoadMeter()
    meter.dispatched("r", 0.0, 100)
    meter.first_byte("r", 1.0)
    meter.started("r", 1.1, 100, 0)
    meter.prefilled("r", 1.2, 1.0)
    assert vector(meter, 1.3).queued_tokens == 0
    meter.finished("r", 2.0, 5)
    meter.chunk("r", 2.1)
    meter.started("never", 2.2, 5, 0)
    assert meter.counts.unknown == 2 and vector(meter, 2.3).running == 0


def test_an_engine_without_a_connector_teaches_prefill_by_requests_that_found_a_free_slot() -> None:
    for slots, teaches in ((0, False), (1, False), (4, True)):
        meter = LoadMeter(slots=slots)
        meter.dispatched("r", 0.0, 1000)
        meter.first_byte("r", 2.0)
        assert vector(meter, 2.0).prefill_tps == pytest.approx(500.0)
        meter.dispatched("s", 2.0, 1000)  # beside r
        meter.first_byte("s", 6.0)
        assert vector(meter, 6.0).prefill_tps == pytest.approx(1000 / 3.0 if teaches else 500.0, rel=0.02)


def test_a_prompt_that_waited_for_another_ones_computation_is_not_charged_with_it() -> None:
    meter = LoadMeter(slots=8)
    for rid, at in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        meter.dispatched(rid, at, 1000)
        meter.started(rid, at, 1000, 0)
    meter.prefilled("a", 1.0, 1.0)
    meter.prefilled("b", 3.0, 3.0)  # behind a
    meter.prefilled("c", 3.0, 2.5)  # in the same step as b
    load = vector(meter, 3.0)
    assert load.prefill_tps == pytest.approx(1000.0, rel=0.05) and load.queued_ms == 0


def test_a_first_byte_that_overtakes_the_engines_report_does_not_take_its_place() -> None:
    meter = LoadMeter(slots=8)
    for number in range(3):
        at = 10.0 * number
        meter.dispatched("r", at, 1000)
        meter.started("r", at + 1.9, 1000, 0)  # reported late, with the step
        meter.first_byte("r", at + 2.0)
        meter.prefilled("r", at + 2.1, 2.0)
        meter.finished("r", at + 2.2)
    assert vector(meter, 30.0).prefill_tps == pytest.approx(500.0)


def test_the_queue_in_milliseconds_knows_how_long_each_prompt_is() -> None:
    true = PrefillTime(20.0, 0.1, 2e-6)
    meter, now = LoadMeter(slots=8), 0.0
    for number in range(120):
        tokens = (200, 2_000, 40_000)[number % 3]
        meter.dispatched("r", now, tokens)
        meter.started("r", now, tokens, 0)
        now += true.ms(0, tokens) / 1000
        meter.prefilled("r", now, true.ms(0, tokens) / 1000)
        meter.finished("r", now)
    for rid, tokens in (("short", 500), ("long", 60_000)):
        meter.dispatched(rid, now, tokens)
    assert meter.queued_ms(now) == pytest.approx(true.ms(0, 500) + true.ms(0, 60_000), rel=0.05)
    meter.started("long", now, 60_000, 50_000)
    assert meter.queued_ms(now) == pytest.approx(true.ms(0, 500) + true.ms(50_000, 10_000), rel=0.1)


def taught(meter: LoadMeter, count: int, seconds: float, now: float) -> float:
    """So many requests one after the other, half of each the prompt."""
    for number in range(count):
        rid = f"{now}.{number}"
        meter.dispatched(rid, now, 1000)
        meter.first_byte(rid, now + seconds)
        now += 2 * seconds
        meter.finished(rid, now)
    return now


def test_what_was_learnt_loses_weight_when_nothing_ends_any_more() -> None:
    meter = LoadMeter()
    now = taught(meter, 8, 1.0, 0.0)
    assert vector(meter, now).samples == 8
    assert vector(meter, now + FRESH_S).samples == 8
    assert vector(meter, now + FRESH_S + FADE_S).samples == pytest.approx(4)
    late = vector(meter, now + FRESH_S + 20 * FADE_S)
    assert late.samples < 0.01 and late.e2e_p50_ms == pytest.approx(2000.0)  # still shown


def test_what_has_faded_is_not_mixed_with_what_is_learnt_anew() -> None:
    meter = LoadMeter()
    now = taught(meter, 50, 10.0, 0.0)
    now = taught(meter, 1, 1.0, now + FRESH_S + 10 * FADE_S)
    load = vector(meter, now)
    assert (load.samples, load.e2e_p50_ms, load.prefill_tps) == (1, pytest.approx(2000.0), pytest.approx(1000.0))


def test_without_starts_slots_tell_who_waits() -> None:
    meter = LoadMeter(slots=4)
    for index in range(6):
        meter.dispatched(str(index), 0.0, 10)
    load = vector(meter, 0.0)
    assert (load.running, load.waiting) == (4, 2)


def test_what_a_running_prefill_has_done_is_no_longer_queued() -> None:
    meter = LoadMeter()
    meter.dispatched("r", 0.0, 1000)
    meter.started("r", 0.0, 4000, 0)
    assert meter.queued_tokens(1.0) == 3000  # prior: 1000 a second
    assert meter.queued_tokens(100.0) == 0
    meter.dispatched("s", 100.0, 500)
    assert meter.queued_tokens(100.0) == 500


def test_the_engines_report_wins_and_is_corrected_by_what_happened_since() -> None:
    meter = LoadMeter(slots=8)
    meter.engine_load(0.0, running=8, waiting=3, kv_use=0.7)  # an engine that serves others too
    load = vector(meter, 1.0)
    assert (load.running, load.waiting) == (8, 3) and load.kv_use == pytest.approx(0.7)
    meter.dispatched("r", 1.0, 10)
    meter.finished("r", 2.0)
    assert vector(meter, 2.0).active == 11  # what the engine did not have then cannot have gone from it
    assert vector(meter, REPORT_S + 0.1).active == 0


def test_an_answer_is_as_old_as_the_question_and_hides_nothing_that_came_since() -> None:
    meter = LoadMeter(slots=8)
    meter.dispatched("before", 0.0, 10)
    meter.dispatched("done", 0.0, 10)
    meter.asking(1.0)
    meter.dispatched("meanwhile", 1.5, 10)
    meter.finished("done", 1.6)
    meter.answered(running=5, waiting=0, kv_use=0.7)  # two of ours and three of others
    assert vector(meter, 2.0).active == 5
    meter.dispatched("after", 2.0, 10)
    load = vector(meter, 2.0)
    assert (load.running, load.waiting, load.active) == (6, 0, 6) and load.kv_use == pytest.approx(0.7)
    meter.failed("after", 2.5)
    meter.finished("meanwhile", 2.5)
    assert vector(meter, 2.5).active == 4
    assert vector(meter, 1.0 + REPORT_S).active == 4
    load = vector(meter, 1.0 + REPORT_S + 0.1)  # nobody answers any more: what it said means nothing now
    assert (load.active, load.kv_use) == (1, 0)


def test_the_last_word_of_a_connector_about_its_cache_holds_until_the_next() -> None:
    meter = LoadMeter()
    meter.engine_load(0.0, 1, 0, 0.5)
    assert vector(meter, REPORT_S + 0.1).kv_use == 0.5  # a step may take long


def test_an_answer_that_something_overtook_counts_for_nothing() -> None:
    meter = LoadMeter()
    meter.answered(9, 9, 0.9)  # nobody asked
    meter.asking(0.0)
    meter.engine_load(0.5, 2, 1, 0.25)
    meter.answered(9, 9, 0.9)
    load = vector(meter, 1.0)
    assert (load.running, load.waiting, load.kv_use) == (2, 1, 0.25)
    meter.asking(1.0)
    meter.engine_lost(1.1)
    meter.answered(9, 9, 0.9)
    assert (vector(meter, 1.2).active, vector(meter, 1.2).kv_use) == (0, 0)


def test_a_report_out_of_range_is_brought_into_it() -> None:
    meter = LoadMeter()
    meter.engine_load(0.0, running=-5, waiting=-1, kv_use=float("nan"))
    load = vector(meter, 0.0)
    assert (load.running, load.waiting, load.kv_use) == (0, 0, 0)
    meter.engine_load(0.0, 1, 0, 7.0)
    assert vector(meter, 0.0).kv_use == 1.0
    meter.engine_load(0.0, 1 << 70, 1 << 70, 0.5)
    meter.dispatched("r", 0.0, 10)
    assert decode(vector(meter, 0.0).encode()).active == 2 * MAX_REPORTED + 1


def test_a_failure_frees_the_place_and_teaches_nothing() -> None:
    meter = LoadMeter()
    meter.dispatched("r", 0.0, 100)
    meter.failed("r", 50.0)
    load = vector(meter, 50.0)
    assert (load.active, load.queued_tokens, load.e2e_p50_ms, meter.counts.failed) == (0, 0, 0, 1)


def test_an_engine_that_is_lost_takes_its_requests_and_leaves_its_rates() -> None:
    meter = LoadMeter()
    meter.dispatched("r", 0.0, 100)
    meter.started("r", 0.0, 100, 0)
    meter.prefilled("r", 1.0, 1.0)
    meter.dispatched("s", 0.0, 100)
    meter.engine_load(0.0, 2, 0, 0.5)
    meter.engine_lost(1.0)
    load = vector(meter, 1.0)
    assert (load.active, load.queued_tokens, load.kv_use, meter.counts.failed) == (0, 0, 0, 2)
    assert load.prefill_tps == pytest.approx(100.0)


def test_requests_whose_end_is_lost_are_given_up_and_their_number_is_bounded() -> None:
    meter = LoadMeter()
    for index in range(MAX_REQUESTS + 10):
        meter.dispatched(str(index), 0.0, 7)
    assert meter.active == MAX_REQUESTS and meter.counts.forgotten == 10
    meter.chunk("20", FORGET_S)
    load = vector(meter, FORGET_S + 1)
    assert load.active == 1 and meter.counts.forgotten == MAX_REQUESTS + 9


class Meter(RuleBasedStateMachine):
    """Any events in any order: the books stay right, and everything ends at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = LoadMeter(slots=2)
        self.now = 0.0

    rids = st.sampled_from("abcd")
    count = st.integers(0, 500)

    @rule(rid=rids, tokens=count, cached=count)
    def dispatched(self, rid: str, tokens: int, cached: int) -> None:
        self.meter.dispatched(rid, self.now, tokens, cached)

    @rule(rid=rids, tokens=count, cached=count)
    def started(self, rid: str, tokens: int, cached: int) -> None:
        self.meter.started(rid, self.now, tokens, cached)

    @rule(rid=rids, seconds=st.floats(0, 5))
    def prefilled(self, rid: str, seconds: float) -> None:
        self.meter.prefilled(rid, self.now, seconds)

    @rule(rid=rids)
    def byte(self, rid: str) -> None:
        self.meter.first_byte(rid, self.now)

    @rule(rid=rids, tokens=count)
    def chunk(self, rid: str, tokens: int) -> None:
        self.meter.chunk(rid, self.now, tokens)

    @rule(rid=rids, tokens=st.none() | count)
    def finished(self, rid: str, tokens: int | None) -> None:
        self.meter.finished(rid, self.now, tokens)

    @rule(rid=rids)
    def failed(self, rid: str) -> None:
        self.meter.failed(rid, self.now)

    @rule(running=count, waiting=count)
    def report(self, running: int, waiting: int) -> None:
        self.meter.engine_load(self.now, running, waiting, 0.5)

    @rule()
    def asking(self) -> None:
        self.meter.asking(self.now)

    @rule(running=count, waiting=count)
    def answered(self, running: int, waiting: int) -> None:
        self.meter.answered(running, waiting, 0.5)

    @rule()
    def lost(self) -> None:
        self.meter.engine_lost(self.now)

    @rule(seconds=st.floats(0, 2000))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def books(self) -> None:
        load = vector(self.meter, self.now)
        assert 0 <= load.queued_tokens <= 500 * 4
        assert load.active >= self.meter.active
        load.encode()

    def teardown(self) -> None:
        for rid in "abcd":
            self.meter.failed(rid, self.now)
        load = vector(self.meter, self.now + REPORT_S + 1)
        assert (load.running, load.waiting, load.queued_tokens) == (0, 0, 0)


TestMeter = Meter.TestCase
TestMeter.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_quantiles_of_few_values() -> None:
    window = Window(3)
    assert window.quantile(0.5) == 0
    for value in (9.0, 1.0, 5.0, 7.0):
        window.add(value)
    assert (len(window), window.quantile(0.5), window.quantile(0.95), window.quantile(0.0)) == (3, 5.0, 7.0, 1.0)


def test_a_rate_forgets_and_ignores_nothing_in_no_time() -> None:
    rate = Rate(0.5)
    rate.add(5, 0)
    rate.add(0, 5)
    assert rate.per_second == 0
    rate.add(100, 1)
    assert rate.per_second == 100
    rate.add(100, 3)
    assert rate.per_second == pytest.approx(150 / 3.5)


def test_whatever_the_engine_does_is_a_sign_of_life_and_what_we_do_is_none() -> None:
    meter, seen = LoadMeter(), [0]

    def moved() -> bool:
        seen.append(meter.moves)
        return seen[-1] != seen[-2]

    meter.dispatched("r", 1.0, 100)
    assert not moved()
    for step in (
        lambda: meter.started("r", 2.0, 100, 0),
        lambda: meter.prefilled("r", 3.0, 1.0),
        lambda: meter.first_byte("r", 3.1),
        lambda: meter.chunk("r", 3.2),
        lambda: meter.engine_load(3.3, 1, 0, 0.5),
        lambda: meter.finished("r", 3.4),
    ):
        step()
        assert moved()
    meter.dispatched("s", 4.0, 100)
    meter.failed("s", 5.0)
    meter.asking(5.0)
    meter.answered(1, 0, 0.5)  # the HTTP server of a hung engine goes on answering
    meter.vector(6.0, ready=True, draining=False)
    assert not moved()
    assert meter.vector(6.0, ready=True, draining=False).moves == meter.moves


def test_a_glance_knows_what_is_here_now_and_what_was_learnt_a_moment_ago() -> None:
    def glance(now: float) -> LoadVector:
        return meter.glance(now, ready=True, draining=False)

    meter = LoadMeter(slots=8)
    meter.dispatched("x", 0.0, 1000)
    assert glance(0.0) == vector(meter, 0.0)
    meter.first_byte("x", 1.0)
    before = vector(meter, 1.0)
    meter.dispatched("y", 1.0, 500)
    meter.finished("x", 1.01, 2)
    seen, exact = glance(1.02), meter.glance(1.02, ready=True, draining=False)
    assert seen == exact and (seen.running, seen.queued_tokens, seen.moves) == (1, 480, meter.moves)
    assert (seen.e2e_p50_ms, seen.ttft_p50_ms) == (before.e2e_p50_ms, before.ttft_p50_ms) == (0.0, 1000.0)
    later = glance(1.01 + GLANCE_S + 0.01)
    assert later.e2e_p50_ms == pytest.approx(1010.0) and later == vector(meter, 1.01 + GLANCE_S + 0.01)
