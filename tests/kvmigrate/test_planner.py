from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate import planner
from kvmigrate.errors import LocalError
from kvmigrate.planner import Costs, RateBook, decide, kv_bytes_per_token

SMOLLM2 = kv_bytes_per_token(layers=30, kv_heads=3, head_dim=64, element_bytes=2)
EIGHT_B = kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, element_bytes=2)
HERE = Costs(bytes_per_token=SMOLLM2, net_bytes_s=2e9, memory_bytes_s=4e9, prefill_tokens_s=400, fixed_s=0.05)
RATES = st.floats(1e-3, 1e12)
COSTS = st.builds(
    Costs,
    bytes_per_token=st.floats(1, 1e7),
    net_bytes_s=RATES,
    memory_bytes_s=RATES,
    prefill_tokens_s=st.floats(1e-3, 1e7),
    fixed_s=st.floats(0, 100),
    margin=st.floats(0.01, 1),
)


def test_the_notes_sizes_are_reproduced() -> None:
    assert SMOLLM2 == 23_040 and EIGHT_B == 128 * 1024


def test_a_small_model_on_a_slow_engine_migrates() -> None:
    verdict = decide(HERE, 3500)
    assert verdict.migrate and verdict.migrate_s < 0.1 * verdict.recompute_s and "saves" in verdict.reason


def test_an_8b_model_on_ten_gigabit_ethernet_never_migrates() -> None:
    costs = Costs(
        bytes_per_token=EIGHT_B, net_bytes_s=1.1e9, memory_bytes_s=20e9, prefill_tokens_s=12_000, fixed_s=0.01
    )
    for tokens in (1, 1000, 100_000, 10_000_000):
        assert not decide(costs, tokens).migrate
    assert math.isinf(costs.crossover_tokens)
    assert decide(replace(costs, net_bytes_s=50e9), 10_000).migrate  # and on RDMA it does


def test_short_prefixes_are_recomputed_and_the_crossover_is_named() -> None:
    verdict = decide(replace(HERE, prefill_tokens_s=20_000), 500)
    assert not verdict.migrate and str(math.ceil(verdict.crossover_tokens)) in verdict.reason
    assert not decide(HERE, 0).migrate


@given(COSTS, st.integers(0, 10_000_000))
def test_migrating_is_said_exactly_when_it_is_cheaper_by_the_margin(costs: Costs, tokens: int) -> None:
    verdict = decide(costs, tokens)
    limit = costs.margin * costs.recompute_s(tokens)
    if math.isclose(costs.migrate_s(tokens), limit, rel_tol=1e-6):
        return
    assert verdict.migrate == (costs.migrate_s(tokens) < limit)


@given(COSTS, st.integers(1, 1_000_000))
def test_more_tokens_never_turn_yes_into_no(costs: Costs, tokens: int) -> None:
    if decide(costs, tokens).migrate:
        assert decide(costs, tokens * 2).migrate


@pytest.mark.parametrize(
    "bad",
    [
        {"net_bytes_s": 0},
        {"prefill_tokens_s": -1},
        {"memory_bytes_s": math.nan},
        {"bytes_per_token": math.inf},
        {"fixed_s": -1},
        {"fixed_s": math.nan},
        {"margin": 0},
        {"margin": 1.5},
    ],
)
def test_rates_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(LocalError):
        replace(HERE, **bad)  # type: ignore[arg-type]


def test_rates_are_learnt_per_peer_and_small_transfers_teach_only_the_fixed_time() -> None:
    book = RateBook()
    book.pulled("fast", 1 << 30, 1.0 + 0.002, 0.002)
    book.pulled("slow", 1 << 27, 1.0 + 0.1, 0.1)
    assert book.peer("fast").net_bytes_s == pytest.approx(1 << 30)
    assert book.peer("slow").lookup_s == pytest.approx(0.1)
    book.pulled("fast", 1000, 0.5, 0.4)
    assert book.peer("fast").net_bytes_s == pytest.approx(1 << 30)
    assert 0.002 < book.peer("fast").lookup_s < 0.4
    assert book.peer("unknown").samples == 0
    # The prior is no measurement: small pulls do not tell it to the peers, and the first large one replaces it.
    book.pulled("new", 1000, 0.5, 0.4)
    assert set(book.network()) == {"fast", "slow"}
    book.pulled("new", 1 << 33, 1.0, 0.0)
    assert book.network()["new"] == 1 << 33


def test_averages_follow_a_change_within_a_few_pulls() -> None:
    book = RateBook()
    for rate in [2e9] * 5 + [2e8] * 10:
        book.pulled("p", int(rate), 1.0, 0.0)
        book.loaded(int(rate), 1.0)
    assert book.peer("p").net_bytes_s == pytest.approx(2e8, rel=0.5)
    assert book.copy_bytes_s == pytest.approx(2e8, rel=0.5)


def test_the_copy_rate_is_a_measurement_or_none_and_the_first_one_counts_fully() -> None:
    book = RateBook()
    costs = book.costs("p", bytes_per_token=4e9, prefill_tokens_s=1)
    assert book.copy_bytes_s == 0 and costs.memory_bytes_s == planner.PRIOR_MEMORY_BYTES_S
    book.loaded(planner.MIN_RATE_BYTES - 1, 1.0)
    assert book.copy_bytes_s == 0
    book.loaded(planner.MIN_RATE_BYTES, 0.5)
    assert book.copy_bytes_s == 2 * planner.MIN_RATE_BYTES
    assert book.costs("p", bytes_per_token=1, prefill_tokens_s=1).memory_bytes_s == book.copy_bytes_s


def test_the_book_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_PEERS", 3)
    book = RateBook()
    for n in range(10):
        book.pulled(str(n), 1 << 20, 1.0, 0.0)
    assert book.peer("9").samples == 1 and book.peer("0").samples == 0
    book.forget("9")
    assert book.peer("9").samples == 0


def test_costs_add_up_all_fixed_parts() -> None:
    book = RateBook()
    book.pulled("p", 1 << 20, 0.5, 0.25)
    costs = book.costs("p", bytes_per_token=1, prefill_tokens_s=1, rtt_s=1, queue_s=2, step_s=4)
    assert costs.fixed_s == pytest.approx(7.25)
