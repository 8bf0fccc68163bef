"""The bench `fit` against an emulated engine: what it reads of it, what it sends, and its figures by hand."""

from __future__ import annotations

import random
import time

import pytest
from benches import fit, fit_load
from benches.fit_engine import emulated, there
from benches.fit_load import Ask
from benches.result import Result

from node.emulator.config import SMOLLM2_CPU, preset
from node.emulator.fitting import Seen, Times
from node.emulator.job import Job

CONFIG = preset("smollm2-cpu", kv_tokens=8192, max_num_seqs=8)


async def test_it_reads_an_engines_limits_and_takes_the_times_of_its_answers() -> None:
    async with emulated(CONFIG, 50.0) as copy, there(copy.base + "/v1/", "") as (engine, limits):
        assert (limits.block_size, limits.kv_tokens, limits.max_model_len) == (128, 8192, 4096)
        long = Ask(tuple(range(1000, 1600)), 3)
        groups = [[long], [long], [Ask((1, 2, 3), 2), Ask((4, 5, 6), 2)]]
        cold, cached, *_ = seen = await engine.groups(groups, time.perf_counter())
        assert [each.job.output_tokens for each in seen] == [3, 3, 2, 2]
        assert len(cold.job.keys) == 4 and cold.job.keys == cached.job.keys and cold.job.rid != cached.job.rid
        assert all(0 < each.first_s < each.whole_s for each in seen)
        assert 0 <= cold.at < cached.at


async def test_a_faster_clock_shows_in_the_engines_own_seconds() -> None:
    prompt = Ask(tuple(range(1000, 1500)), 1)
    async with emulated(CONFIG, 20.0) as engine:
        (seen,) = await engine.open_loop([prompt], [2.0], time.perf_counter())
    assert seen.at >= 2.0 and seen.first_s >= CONFIG.timing.prefill(0, 500)


async def test_what_an_engine_refuses_ends_the_bench_with_its_words() -> None:
    async with emulated(CONFIG, 50.0) as engine:
        with pytest.raises(RuntimeError, match=r"the engine answers 400: .*4096"):
            await engine.ask(Ask((1,) * 5000, 1), 0.0)


def test_errors_are_relative_to_the_real_times() -> None:
    result = Result("fit", fit.TARGETS)
    real = [Seen(Job(f"r{n}", 10, 2), 0.0, 1.0, 2.0) for n in range(10)]
    fit._report(result, "", real, [Times(1.0 + n / 100, 2.0 - n / 50) for n in range(10)])
    assert result.figures["ttft_error_p50"] == pytest.approx(0.045)
    assert result.figures["ttft_error_p90"] == result.figures["whole_error_p90"] == pytest.approx(0.09)
    assert result.short() == []


def test_the_mixed_load_keeps_a_slower_engine_as_busy() -> None:
    def last_moment(factor: float) -> float:
        timing = SMOLLM2_CPU.timing
        slower = {name: getattr(timing, name) * factor for name in timing.__slots__}
        config = fit.replace(SMOLLM2_CPU, timing=type(timing)(**slower))
        options = fit.argparse.Namespace(longest=1000, load=0.5)
        return fit._mixed(random.Random(3), config, options, 50)[1][-1]

    assert last_moment(2.0) == pytest.approx(2 * last_moment(1.0))
    assert fit_load.moments(random.Random(1), 3, 1.0)[2] > 0


def test_a_load_with_other_tokens_has_the_same_lengths_and_beginnings_in_common_and_nothing_of_it_is_cached() -> None:
    asks = fit_load.mixed(random.Random(2), 30, 1000)
    others = fit_load.with_other_tokens(asks)
    assert fit_load.fresh_tokens(others, 128) == fit_load.fresh_tokens(asks, 128)
    assert [ask.answer for ask in others] == [ask.answer for ask in asks]
    assert fit_load.fresh_tokens(asks + others, 16)[30:] == fit_load.fresh_tokens(others, 16)
    assert all(fit_load.IDS[0] <= token < fit_load.IDS[1] for ask in others for token in ask.prompt)
