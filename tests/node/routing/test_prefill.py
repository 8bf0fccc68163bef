from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.prefill import MIN_TOKENS, NO_WORK, Owed, PrefillLearner, PrefillTime, Work

TRUE = PrefillTime(15.0, 0.1, 3.4e-6)
LENGTHS = (100, 1_000, 8_000, 80_000)


def lengths(rng: random.Random, count: int) -> list[tuple[int, int]]:
    return [
        (rng.choice((0, 0, 4_000, 20_000)), min(90_000, max(MIN_TOKENS, int(rng.lognormvariate(8, 1.3)))))
        for _ in range(count)
    ]


def test_a_prompt_takes_a_fixed_time_one_per_token_and_one_per_pair() -> None:
    assert PrefillTime(10.0, 0.5, 0.001).ms(100, 200) == pytest.approx(10 + 100 + 0.001 * 200 * 200)
    assert PrefillTime(10.0, 0.5, 0.001).ms(100, 0) == 0.0


def test_what_is_owed_is_the_sum_of_what_is_there_and_nothing_is_left_of_it() -> None:
    owed = Owed()
    assert TRUE.ms_of(owed) == 0.0
    owed.add(Work.of(100, 200))
    owed.exchange(NO_WORK, Work.of(0, 50))
    assert TRUE.ms_of(owed) == pytest.approx(TRUE.ms(100, 200) + TRUE.ms(0, 50))
    owed.exchange(Work.of(100, 200), Work.of(0, 10))
    assert TRUE.ms_of(owed) == pytest.approx(TRUE.ms(0, 10) + TRUE.ms(0, 50))
    for work in (Work.of(0, 50), Work.of(0, 10)):
        owed.exchange(work, NO_WORK)
    assert (owed.prompts, owed.tokens, owed.pairs) == (0, 0, 0.0)
    owed.add(Work.of(3, 5))
    owed.clear()
    assert TRUE.ms_of(owed) == 0.0


def test_it_learns_times_of_all_lengths_from_a_mixture_of_them() -> None:
    rng, learner = random.Random(1), PrefillLearner()
    for cached, missing in lengths(rng, 200):
        learner.completed(Work.of(cached, missing), TRUE.ms(cached, missing) * rng.uniform(0.8, 1.2))
    for tokens in LENGTHS:
        assert learner.time.ms(0, tokens) == pytest.approx(TRUE.ms(0, tokens), rel=0.2)
    one_rate = PrefillTime.of_rate(learner.time.tokens_per_s())
    assert one_rate.ms(0, 80_000) < 0.6 * TRUE.ms(0, 80_000)  # what a plain rate would say


def test_one_length_alone_is_a_rate() -> None:
    learner = PrefillLearner()
    for _ in range(20):
        learner.completed(Work.of(0, 1000), 500.0)
    assert learner.time.ms(0, 1000) == pytest.approx(500.0)
    assert learner.time.ms(0, 2000) == pytest.approx(1000.0, rel=0.05)


def test_prompts_of_one_step_are_one_observation() -> None:
    together, learner = PrefillLearner(), PrefillLearner()
    for _ in range(20):
        for ms in (400.0, 0.0, 0.2, 0.0):
            together.completed(Work.of(0, 250), ms)
        learner.completed(Work.of(0, 1000), 400.2)
    assert together.time.tokens_per_s() == pytest.approx(learner.time.tokens_per_s(), rel=0.01)


def test_an_engine_that_changes_its_speed_is_followed() -> None:
    rng, learner = random.Random(2), PrefillLearner()
    for factor in (1.0, 10.0):
        for cached, missing in lengths(rng, 150):
            learner.completed(Work.of(cached, missing), factor * TRUE.ms(cached, missing))
    assert learner.time.ms(0, 8000) == pytest.approx(10 * TRUE.ms(0, 8000), rel=0.2)


def test_what_was_forgotten_stands_until_the_next_completion_and_not_longer() -> None:
    learner = PrefillLearner()
    for _ in range(50):
        learner.completed(Work.of(0, 1000), 5000.0)
    learner.forget()
    assert learner.time.tokens_per_s(1000) == pytest.approx(200.0)
    learner.completed(Work.of(0, 1000), 500.0)
    assert learner.time.tokens_per_s(1000) == pytest.approx(2000.0)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.floats(0, 1e9)), max_size=40))
def test_whatever_is_measured_the_constants_are_finite_and_not_negative(seen: list[tuple[int, int, float]]) -> None:
    learner = PrefillLearner()
    for cached, missing, ms in seen:
        learner.completed(Work.of(cached, missing), ms)
        assert all(math.isfinite(term) and term >= 0 for term in learner.time)


@given(st.floats(0, 1e300))
def test_any_rate_is_a_time(rate: float) -> None:
    time = PrefillTime.of_rate(rate)
    assert math.isfinite(time.ms(0, 1 << 31)) and time.measured == (time.token_ms > 0)
