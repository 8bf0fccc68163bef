"""Do entries that decide on old vectors herd? The wait for a slot, against best-of-two by live probes."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from benches.herding import Herd, Placing, Setting, live_best_of_two, ours, random_peer, stale_least_loaded
from benches.result import Result, Target, say

#: Suffix of the figures, what differs, and how much longer than live probing the wait may be.
VARIANTS: tuple[tuple[str, dict[str, object], float], ...] = (
    ("", {}, 1.0),
    ("_slow_third", {"slow": 5}, 1.5),
    ("_one_entry", {"one_entry": True}, 1.5),
)
TARGETS: dict[str, Target] = {
    f"{name}{suffix}": ("<=", most)
    for suffix, _, most in VARIANTS
    for name in ("wait_mean_over_live_p2c", "wait_p99_over_live_p2c")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--runs", type=int, help="runs with different seeds, averaged (default 5; quick 2)")


def run(options: argparse.Namespace) -> Result:
    """Every variant, then the classic mistake."""
    result = Result("herd", TARGETS)
    runs = options.runs or (2 if options.quick else 5)
    setting = Setting(requests=8_000 if options.quick else 20_000)
    live: dict[str, tuple[float, float]] = {}
    for suffix, changed, _ in VARIANTS:
        where = replace(setting, **changed)  # type: ignore[arg-type]
        live[suffix] = _measure(result, f"live_p2c{suffix}", live_best_of_two, where, runs)
        mean, p99 = _measure(result, f"ours{suffix}", ours, where, runs)
        result.add(f"wait_mean_over_live_p2c{suffix}", mean / live[suffix][0])
        result.add(f"wait_p99_over_live_p2c{suffix}", p99 / live[suffix][1])
    stale, _ = _measure(result, "stale_least_loaded", stale_least_loaded, setting, runs)
    result.add("stale_least_loaded_over_live_p2c", stale / live[""][0])
    _measure(result, "random", random_peer, setting, runs)
    result.note(
        f"{setting.peers} peers with {setting.slots} slots, lognormal service of {setting.service_s:g} s (sigma "
        f"{setting.sigma:g}), {setting.load:.0%} load, gossip every {setting.gossip_s:g} s with 10 % jitter; "
        f"{runs} runs of {setting.requests} requests each, the first fifth left out; slow third: 5 of 16, four times "
        "slower; live probes cost nothing here and see requests, not speeds"
    )
    return result


def _measure(result: Result, name: str, placing: Placing, setting: Setting, runs: int) -> tuple[float, float]:
    """Mean and p99 of the wait, averaged over the runs."""
    began = time.process_time()
    found = [Herd(setting, placing, seed).run() for seed in range(1, runs + 1)]
    mean, p99 = (sum(values) / runs for values in zip(*found, strict=True))
    result.add(f"{name}_wait_mean_s", mean)
    result.add(f"{name}_wait_p99_s", p99)
    say(f"  ({time.process_time() - began:.0f} CPU s)")
    return mean, p99
