"""Fits the emulated engine's times to a real vLLM, and says how far off it then is on other requests.

Calibration: prompts alone, cold and cached, answers in company, a mixed load, and the first again: the same engine on
the same machine is faster in one minute than in another, and a load that it is busy with makes that twice as much. From
these the constants are searched (`node.emulator.fitting`). Then another mixed load is sent, in an open loop and with
shared beginnings: to the real engine, to the emulated one in virtual time, to the emulated one behind HTTP, and, with
other tokens, to the real engine once more: how far it is from itself is what no model can be better than.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benches import fit_load
from benches.fit_engine import Engine, emulated, small_model, there
from benches.fit_load import Ask
from benches.result import Result, Target, say
from node.emulator.config import EngineConfig
from node.emulator.fitting import FITTED, Seen, Times, fitted, loss, played
from node.emulator.profile import as_json

TARGETS: dict[str, Target] = {"ttft_error_p50": ("<=", 0.15), "requests": (">=", 100)}
#: Requests of the replay when it is to be quick. As many calibrate.
QUICK = 40
#: Evaluations of the first, rough search: only the rate of the mixed load hangs on it.
ROUGH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--engine", default="", metavar="URL", help="a vLLM that is there (default: one is started)")
    parser.add_argument("--engine-key", default="", help="its API key")
    parser.add_argument("--max-num-seqs", type=int, help="what it was started with")
    parser.add_argument("--max-num-batched-tokens", type=int, help="what it was started with")
    parser.add_argument("--requests", type=int, default=120, help="of the replay (120)")
    parser.add_argument("--longest", type=int, default=1500, help="longest prompt, tokens (1500)")
    parser.add_argument(
        "--load", type=float, default=0.65, help="of the replay: share of what the engine can do (0.65)"
    )
    parser.add_argument("--speedup", type=float, default=4.0, help="of the emulated engine behind HTTP (4)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (1)")
    parser.add_argument("--name", default="mine", help="of the profile (mine)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the profile here")


def run(options: argparse.Namespace) -> Result:
    """Measure, fit and replay: five to ten minutes with an engine of our own on two cores."""
    result = Result("fit", TARGETS)
    asyncio.run(_measure(result, options))
    return result


async def _measure(result: Result, options: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # or the engine would stay behind
    rng = random.Random(options.seed)
    count = QUICK if options.quick else options.requests
    async with _engine(options) as (engine, limits):
        say(f"  the engine is ready: {engine.model}, {limits.kv_tokens} tokens of KV in blocks of {limits.block_size}")
        before = _configured(limits, options)
        calibration = await _calibrate(engine, before, rng, options, count)
        config = replace(before, timing=fitted(before, calibration))
        asks, moments = _mixed(rng, config, options, count)
        say(f"  replay: {len(asks)} requests in {moments[-1]:.0f} s")
        real = await engine.open_loop(asks, moments, time.perf_counter())
        repeated = await engine.open_loop(fit_load.with_other_tokens(asks), moments, time.perf_counter())
    _report(result, "", real, played(config, real))
    _report(result, "_repeat", real, _times(repeated))
    _report(result, "_calibration", calibration, played(config, calibration))
    _report(result, "_unfitted", real, played(before, real))
    async with emulated(config, options.speedup) as copy:
        again = await copy.open_loop(asks, moments, time.perf_counter())
    _report(result, "_http", real, _times(again))
    result.add("requests", len(real))
    result.add("ttft_p50_s", median(each.first_s for each in real))
    result.add("cached_share", _cached_share(asks, config.block_size))
    for name in FITTED:
        result.add(name, getattr(config.timing, name))
    result.note(
        f"engine: {engine.model}, {config.step_tokens} tokens a step, load {options.load:g}; errors are |emulated - "
        "real| / real of each request; _http: the emulated server, the others the same model in virtual time; "
        "_repeat: the real engine, the same load again; _unfitted: the times of the preset smollm2-cpu"
    )
    if options.save is not None:
        options.save.write_text(as_json(config))
        say(f"written: {options.save}")


def _engine(options: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[tuple[Engine, EngineConfig]]:
    return there(options.engine, options.engine_key) if options.engine else small_model()


def _configured(limits: EngineConfig, options: argparse.Namespace) -> EngineConfig:
    """What the engine tells, and what only its user knows."""
    return replace(
        limits,
        name=options.name,
        max_num_seqs=options.max_num_seqs or limits.max_num_seqs,
        step_tokens=options.max_num_batched_tokens or limits.step_tokens,
    )


async def _calibrate(
    engine: Engine, config: EngineConfig, rng: random.Random, options: argparse.Namespace, count: int
) -> list[Seen]:
    longest = min(options.longest, config.max_model_len // 2)
    for _ in range(2):  # the first requests of a process are slow
        await engine.ask(Ask(fit_load.mixed(rng, 1, fit_load.SHORT * 8)[0].prompt, 2), 0.0)
    began = time.perf_counter()
    seen = await engine.groups(fit_load.apart(rng, longest), began)
    rough = replace(config, timing=fitted(config, seen, evaluations=ROUGH))
    asks, moments = _mixed(rng, rough, options, count)
    say(f"  calibration: {len(seen)} requests apart in {time.perf_counter() - began:.0f} s, "
        f"{len(asks)} mixed in {moments[-1]:.0f} s; loss {loss(rough, seen):.3f}")  # fmt: skip
    seen += await engine.open_loop(asks, moments, began)
    return seen + await engine.groups(fit_load.apart(rng, longest), began)


def _mixed(
    rng: random.Random, config: EngineConfig, options: argparse.Namespace, count: int
) -> tuple[list[Ask], list[float]]:
    """A mixed load that keeps such an engine busy for the share that is asked for, if it computed one at a time."""
    asks = fit_load.mixed(rng, count, min(options.longest, config.max_model_len // 2))
    timing = config.timing
    busy = 0.0
    for ask, (cached, fresh) in zip(asks, fit_load.fresh_tokens(asks, config.block_size), strict=True):
        busy += timing.prefill(cached, fresh) + timing.step_s
        busy += ask.answer * (timing.decode(1, len(ask.prompt)) + timing.step_s) / 2  # two at a time share a step
    return asks, fit_load.moments(rng, count, options.load * count / busy)


def _times(seen: Sequence[Seen]) -> list[Times]:
    return [Times(each.first_s, each.whole_s) for each in seen]


def _cached_share(asks: Sequence[Ask], block: int) -> float:
    found = fit_load.fresh_tokens(asks, block)
    return sum(cached for cached, _ in found) / sum(cached + fresh for cached, fresh in found)


def _report(result: Result, suffix: str, real: Sequence[Seen], emulated_: Sequence[Times]) -> None:
    """The errors of both times: the middle one, and the one that nine of ten stay below."""
    pairs = list(zip(real, emulated_, strict=True))
    first = sorted(abs(times.first_s / each.first_s - 1) for each, times in pairs)
    whole = sorted(abs(times.whole_s / each.whole_s - 1) for each, times in pairs)
    for name, errors in (("ttft_error", first), ("whole_error", whole)):
        result.add(f"{name}_p50{suffix}", median(errors))
        result.add(f"{name}_p90{suffix}", errors[len(errors) * 9 // 10])
