"""The engine in virtual time: hand-computed times, and a run in leaps that equals the run step by step."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.emulator import (
    Action,
    Done,
    EmulatedEngine,
    EngineConfig,
    Evicted,
    Job,
    Preempted,
    Started,
    Stored,
    Timing,
    Tokens,
)
from node.emulator.config import PRESETS, coarser, preset
from node.errors import LocalError

T = TypeVar("T")
PLAIN = EngineConfig(
    name="t",
    timing=Timing(step_s=0.1, prefill_s=0.001, decode_s=0.01),
    block_size=4,
    kv_tokens=400,
    max_num_seqs=4,
    step_tokens=100,
    max_model_len=300,
)


def run(engine: EmulatedEngine, until: float = 1e9) -> list[Action]:
    actions: list[Action] = []
    while (due := engine.due) is not None and due <= until:
        actions += engine.advance(due)
        engine.validate()
    return actions


def keys(first: int, count: int) -> list[int]:
    return [first * 1000 + index for index in range(count)]


def of(kind: type[T], actions: list[Action]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    engine = EmulatedEngine(PLAIN, every_step=True)
    engine.submit(Job("a", 50, 3), 1.0)
    actions = run(engine)
    assert of(Started, actions) == [Started("a", 1.0, 0, 0)]
    assert [round(token.at, 6) for token in of(Tokens, actions)] == [1.15, 1.26, 1.37]
    assert [token.first for token in of(Tokens, actions)] == [True, False, False]
    assert of(Done, actions)[0].at == pytest.approx(1.37)


def test_a_long_prompt_is_cut_into_pieces_beside_decoding() -> None:
    engine = EmulatedEngine(PLAIN, every_step=True)
    engine.submit(Job("a", 10, 50), 0.0)
    engine.submit(Job("b", 250, 1), 0.05)
    actions = run(engine)
    done = {action.rid: action.at for action in of(Done, actions)}
    # a: 0.11; then three steps with a's token and 99, 99, 52 tokens of b.
    assert done["b"] == pytest.approx(0.11 + (0.1 + 0.01 + 0.099) * 2 + 0.1 + 0.01 + 0.052)


def test_attention_and_context_cost_what_the_formula_says() -> None:
    timing = Timing(step_s=0.1, prefill_s=0.0, attention_s=1e-4, context_s=1e-3)
    engine = EmulatedEngine(EngineConfig(name="t", timing=timing, step_tokens=512), every_step=True)
    engine.submit(Job("a", 20, 2), 0.0)
    first, second = (token.at for token in of(Tokens, run(engine)))
    assert first == pytest.approx(0.1 + 20 * 10 * 1e-4)
    assert second - first == pytest.approx(0.1 + 21e-3)


def test_a_second_prompt_with_the_same_beginning_computes_only_the_rest() -> None:
    engine = EmulatedEngine(PLAIN)
    engine.submit(Job("a", 43, 2, keys(1, 11)), 0.0)
    first = run(engine)
    assert of(Stored, first)[0].keys == tuple(keys(1, 10))
    engine.submit(Job("b", 42, 1, keys(1, 10)), 10.0)
    actions = run(engine)
    assert of(Started, actions) == [Started("b", 10.0, 40, 0)]
    assert of(Done, actions)[0].at == pytest.approx(10.102)
    assert (engine.counts.queried, engine.counts.hit) == (85, 40)


def test_at_least_one_token_is_computed() -> None:
    engine = EmulatedEngine(PLAIN)
    for number in range(2):
        engine.submit(Job(f"r{number}", 40, 1, keys(1, 10)), 10.0 * number)
        actions = run(engine)
    assert of(Started, actions)[0].cached_tokens == 36


def test_blocks_in_use_stay_and_the_least_recently_used_go() -> None:
    engine = EmulatedEngine(PLAIN)
    for number in range(4):
        engine.submit(Job(f"r{number}", 120, 1, keys(number, 30)), 10.0 * number)
        actions = run(engine)
    gone = [key for action in of(Evicted, actions) for key in action.keys]
    assert gone and set(gone) <= set(keys(0, 30))
    assert gone[0] == keys(0, 30)[-1]


def test_no_more_than_max_num_seqs_run_and_the_rest_waits_in_order() -> None:
    engine = EmulatedEngine(PLAIN)
    for number in range(6):
        engine.submit(Job(f"r{number}", 8, 5), 0.0)
    engine.advance(0.15)  # the first one has a step of its own
    assert (engine.running, engine.waiting) == (4, 2)
    assert [action.rid for action in of(Done, run(engine))] == [f"r{number}" for number in range(6)]


def test_a_full_cache_preempts_the_last_one_and_everybody_finishes() -> None:
    config = EngineConfig(
        name="t",
        timing=Timing(step_s=0.1, prefill_s=0.001),
        block_size=4,
        kv_tokens=64,
        step_tokens=256,
        max_model_len=64,
    )
    engine = EmulatedEngine(config)
    for name in "abc":
        engine.submit(Job(name, 16, 40), 0.0)
    actions = run(engine)
    assert "c" in {action.rid for action in of(Preempted, actions)}
    assert {action.rid for action in of(Done, actions)} == {"a", "b", "c"}
    assert sum(action.count for action in of(Tokens, actions)) == 120
    assert engine.cache.use == 0.0


def test_a_prompt_waits_until_all_of_it_has_room_and_whoever_comes_later_behind_it() -> None:
    engine = EmulatedEngine(PLAIN)
    for name, tokens, answer in (("a", 200, 50), ("b", 220, 5), ("c", 20, 5)):
        engine.submit(Job(name, tokens, answer), 0.0)
    actions = run(engine)
    assert not of(Preempted, actions)
    ended = {action.rid: action.at for action in of(Done, actions)}
    began = {action.rid: action.at for action in of(Started, actions)}
    assert ended["a"] <= began["b"] <= began["c"]


def test_an_aborted_request_gives_back_everything_at_the_end_of_the_step() -> None:
    engine = EmulatedEngine(PLAIN)
    engine.submit(Job("a", 40, 200), 0.0)
    engine.submit(Job("b", 40, 3), 0.0)
    engine.advance(0.5)
    assert engine.abort("a", 0.55) and not engine.abort("a", 0.55)
    actions = run(engine)
    assert all(action.at <= 0.55 for action in of(Tokens, actions) if action.rid == "a")
    assert [action.rid for action in of(Done, actions)] == ["b"]
    assert engine.running == engine.waiting == 0 and engine.cache.use == 0.0


def test_a_request_that_waits_or_has_not_arrived_can_be_aborted_too() -> None:
    engine = EmulatedEngine(preset("smollm2-cpu", max_num_seqs=1))
    for name in "abc":
        engine.submit(Job(name, 40, 3), 0.0)
    engine.advance(0.02)
    assert engine.abort("b", 0.02)
    engine.submit(Job("d", 40, 3), 0.03)
    assert engine.abort("d", 0.03)
    assert [action.rid for action in of(Done, run(engine))] == ["a", "c"]


class Shelf:
    """A pool that holds some keys and counts what is taken."""

    def __init__(self, held: list[int], *, fails: bool = False) -> None:
        self.held, self.fails, self.loads = set(held), fails, 0

    def find(self, job: Job, start: int, stop: int) -> int:
        count = start
        while count < stop and job.keys[count] in self.held:
            count += 1
        return count - start

    def load(self, job: Job, start: int, count: int) -> int:
        self.loads += 1
        return 0 if self.fails else count


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_of_the_pool_are_loaded_once_and_a_failed_load_is_computed(fails: bool) -> None:
    config = EngineConfig(
        name="t",
        timing=Timing(step_s=0.1, prefill_s=0.001, load_block_s=0.01),
        block_size=4,
        kv_tokens=400,
        max_model_len=300,
    )
    shelf = Shelf(keys(1, 10), fails=fails)
    engine = EmulatedEngine(config, pool=shelf)
    engine.submit(Job("a", 50, 1, keys(1, 12)), 0.0)
    actions = run(engine)
    assert shelf.loads == 1
    assert of(Started, actions) == [Started("a", pytest.approx(0.1), 0, 0 if fails else 40)]
    assert of(Done, actions)[0].at == pytest.approx(0.2 + (0.05 if fails else 0.01))


def test_what_was_pulled_into_the_cache_counts_as_cached() -> None:
    engine = EmulatedEngine(PLAIN)
    engine.insert(keys(1, 5), 0.0)
    engine.submit(Job("a", 22, 1, keys(1, 5)), 1.0)
    assert of(Started, run(engine))[0].cached_tokens == 20


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 60), st.integers(0, 3), st.booleans()), max_size=12
)


@settings(max_examples=60)
@given(ARRIVALS)
def test_leaps_give_the_same_times_as_single_steps(arrivals: list[tuple[float, int, int, int, bool]]) -> None:
    """Blocks are plenty here: a leap reserves ahead, which may evict earlier when they are not."""
    timing = Timing(step_s=0.013, prefill_s=0.001, attention_s=1e-6, decode_s=0.002, context_s=1e-4, accept_s=0.004)
    config = EngineConfig(
        name="t", timing=timing, block_size=4, kv_tokens=1 << 16, max_num_seqs=3, step_tokens=64, max_model_len=400
    )
    stories = []
    for every_step in (True, False):
        engine = EmulatedEngine(config, every_step=every_step)
        actions: list[Action] = []
        for number, (at, prompt, output, group, aborts) in enumerate(sorted(arrivals)):
            engine.submit(Job(f"r{number}", prompt, output, keys(group, prompt // 4)), at)
            if aborts and number:
                engine.abort(f"r{number - 1}", at)
        actions += run(engine)
        first = {a.rid: a.at for a in of(Tokens, actions) if a.first}
        done = {a.rid: a.at for a in of(Done, actions)}
        hits = {a.rid: a.cached_tokens for a in of(Started, actions)}
        stories.append((first, done, hits))
    single, leaps = stories
    assert single[2] == leaps[2]
    for times, same in zip(single[:2], leaps[:2], strict=True):
        assert times == pytest.approx(same, abs=1e-6)


@settings(max_examples=40)
@given(ARRIVALS)
def test_whatever_comes_every_request_is_done_once_and_no_block_is_lost(
    arrivals: list[tuple[float, int, int, int, bool]],
) -> None:
    config = EngineConfig(
        name="t",
        timing=Timing(step_s=0.02, prefill_s=0.001),
        block_size=4,
        kv_tokens=200,
        max_num_seqs=3,
        step_tokens=32,
        max_model_len=200,
    )
    engine = EmulatedEngine(config)
    for number, (at, prompt, output, group, _) in enumerate(sorted(arrivals)):
        engine.submit(Job(f"r{number}", prompt, output, keys(group, (prompt + output) // 4)), at)
    actions = run(engine)
    assert sorted(action.rid for action in of(Done, actions)) == sorted(f"r{n}" for n in range(len(arrivals)))
    assert engine.cache.use == 0.0 and engine.due is None


def test_presets_are_valid_and_a_wrong_config_says_why() -> None:
    for name in PRESETS:
        assert preset(name).name == name
    with pytest.raises(LocalError, match="known are"):
        preset("h100")
    with pytest.raises(LocalError, match="max_model_len"):
        preset("8b-gpu", kv_tokens=1000)
    with pytest.raises(LocalError, match="step_s"):
        Timing(step_s=0, prefill_s=1)


def test_a_coarser_engine_takes_as_long_for_a_prompt_and_holds_as_much() -> None:
    fine = preset("8b-gpu")
    coarse = coarser(fine, 8)
    assert coarse.timing.prefill(0, 1000) == pytest.approx(fine.timing.prefill(0, 8000))
    assert coarse.timing.prefill(500, 1000) == pytest.approx(fine.timing.prefill(4000, 8000))
    assert coarse.timing.decode(3, 1000) == pytest.approx(8 * fine.timing.decode(3, 8000))
    assert (coarse.kv_tokens, coarse.max_model_len, coarse.step_tokens) == (1 << 17, 1 << 14, 1024)
    assert coarser(fine, 64).max_num_seqs <= coarser(fine, 64).step_tokens
