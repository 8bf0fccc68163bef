"""What a hop through a node costs, beside other routers in the same run: latency, requests, CPU, memory.

Everything shares the cores of one machine: generator, router and two backends. So only ratios mean anything, each
between two measurements of the same round, one right after the other; the figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benches.child import Child
from benches.peers import PEERS
from benches.proxy.figures import Table, report
from benches.proxy.footprint import footprint
from benches.proxy.measure import Measure, idle_streams, soak
from benches.proxy.subjects import NotStarted, Stage, Subject
from benches.result import Result, Target, say

TARGETS: dict[str, Target] = {
    "local_added_p50_c1_over_sglang": ("<=", 1.0),
    "local_rps_c16_over_sglang": (">=", 1.0),
    "local_cpu_per_request_over_sglang": ("<=", 1.0),
    "local_sessions_rps_over_sglang": (">=", 1.0),
    "local_sessions_affinity": ("=", 1.0),
    "forwarded_cpu_per_request_over_smg": ("<=", 1.3),
    "forwarded_added_p50_c1_over_sglang": ("<=", 2.0),
    "local_paced_ttft_p50_over_best_router": ("<=", 1.0),
    "local_paced_ttft_p99_over_best_router": ("<=", 1.0),
    "local_cpu_per_chunk_over_sglang": ("<=", 1.0),
    "local_burst_tokens_over_best_router": (">=", 1.0),
    "local_rps_c16_over_litellm": (">=", 20.0),
    "local_rps_c16_over_production_stack": (">=", 4.0),
    "workers2_rps_scale": (">=", 1.6),
    "added_ttft_220kb_c20_ms": ("<=", 5.0),
    "rss_growth_mb_per_million": ("<=", 1.0),
    "start_s": ("<=", 1.0),
    "idle_core_share_n1": ("<=", 0.005),
    "idle_core_share_n3": ("<=", 0.005),
    "idle_core_share_n12": ("<=", 0.005),
    "idle_rss_mb_n1": ("<=", 80.0),
}
#: Kinds of load in the order in which a round measures them.
KINDS = ("c1", "c16", "sessions", "burst", "paced", "large")
#: Too slow for anything but this, or of no interest: it would take the time of all the others.
ONLY = {"litellm": ("c1", "c16"), "workers": ("c1", "c16", "paced")}
ROUNDS, ROUND_S = 3, 0.8
QUICK_ROUNDS, QUICK_ROUND_S = 1, 0.15
WARM, SLOW_WARM = 200, 20
#: A quick run leaves out what no target is held against, and looks shorter at what is idle.
NOT_QUICK = ("haproxy", "nginx", "plain")
QUICK_SIZES, QUICK_CALM_S, QUICK_WATCH_S = (1, 3), 1.0, 3.0
SOAK, QUICK_SOAK = 100_000, 4_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, help=f"alternations (default {ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"length of one measurement (default {ROUND_S})")
    parser.add_argument("--soak", type=int, help=f"requests of the search for leaks (default {SOAK}; 0 for none)")
    parser.add_argument("--only", default="", help="only these subjects, by name, separated by commas")
    parser.add_argument("--kinds", default="", help=f"only these loads: {', '.join(KINDS)}, separated by commas")


def run(options: argparse.Namespace) -> Result:
    """Measure."""
    quick = options.quick
    rounds = options.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    seconds = options.seconds or (QUICK_ROUND_S if quick else ROUND_S)
    total = options.soak if options.soak is not None else QUICK_SOAK if quick else SOAK
    only = {name for name in options.only.split(",") if name}
    kinds = [kind for kind in KINDS if not options.kinds or kind in options.kinds.split(",")]
    result = Result("proxy", TARGETS)
    with Stage() as stage, Child("benches.proxy.generator") as load:
        subjects = _start(stage, result, only, () if only or not quick else NOT_QUICK)
        measure = Measure(load)
        table: Table = {}
        for number in range(rounds):
            for kind in kinds:
                say(f"round {number + 1} of {rounds}: {kind}")
                for subject in subjects:
                    if kind in ONLY.get(subject.name, KINDS):
                        warm = SLOW_WARM if subject.name == "litellm" else WARM
                        sample = measure.sample(subject, kind, seconds=seconds, warm=warm)
                        table.setdefault((kind, subject.name), []).append(sample)
        report(result, table)
        idle = [] if options.kinds else [s for s in subjects if s.pids and s.name not in ONLY]
        idle = [s for s in idle if s.name == "local"] if quick else idle
        memory = {s.name: idle_streams(load, s) for s in idle}
        for name, (each_kb, idle_mb) in memory.items():
            result.add(f"{name}_kb_per_idle_stream", each_kb)
            result.add(f"{name}_rss_mb", idle_mb)
        ours = next((s for s in subjects if s.name == "local"), None)
        if ours is not None and total:
            result.add("rss_growth_mb_per_million", soak(load, ours, total))
    if not only:
        if quick:
            footprint(result, sizes=QUICK_SIZES, starts=1, calm_s=QUICK_CALM_S, watch_s=QUICK_WATCH_S)
        else:
            footprint(result)
    return result


def _start(stage: Stage, result: Result, only: set[str], without: Sequence[str]) -> list[Subject]:
    """Start what is at hand, the peers all at once; the rest is noted."""
    began = time.monotonic()
    found, begun = [stage.direct], []
    for name, peer in PEERS.items():
        if (only and name not in only) or name in without:
            continue
        if not peer.ready:
            result.note(f"{name} is left out: {peer.absent or 'not here, see `scripts/bench peers install`'}")
            continue
        begun.append(stage.peer(name))
    ways = {"plain": stage.plain, "local": stage.local, "workers": stage.workers, "forwarded": stage.forwarded}
    ways["cluster"] = stage.cluster
    for name, way in ways.items():
        if not ((only and name not in only) or name in without):
            found.append(stage.ready(way()))
    for subject in begun:
        try:
            found.append(stage.ready(subject))
        except NotStarted as error:
            result.note(f"{subject.name} is left out: it did not start ({error})")
    say(f"  all are up after {time.monotonic() - began:.1f} s")
    return found
