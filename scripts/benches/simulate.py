"""Clusters of up to 1,000 nodes over a real trace in virtual time, against an oracle and the simple policies."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace

from benches import traces
from benches.oracle import oracle
from benches.outcome import NODES_PER_COPY, Outcome, engine_config, outcome
from benches.result import Result, Target, say
from benches.simcluster import Grapevine, Placing, SimCluster, World
from benches.traces import Arrival
from node.policy import make_policy
from node.policy.cost import Cost

SIZES = (8, 100, 1000)
TARGETS: dict[str, Target] = {
    "hit_ratio_n8": (">=", 0.25),
    "work_imbalance_n8": ("<=", 1.1),
    "ttft_mean_over_oracle_n8": ("<=", 1.10),
    "ttft_mean_over_oracle_n100": ("<=", 1.15),
    "ttft_mean_over_oracle_n1000": ("<=", 1.15),
}
#: Seconds of the trace that are played, by cluster size: whole, and quick.
SECONDS = {8: (4000.0, 600.0), 100: (600.0, 120.0), 1000: (60.0, 15.0)}
SIMPLE = ("round_robin", "least_connections")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--nodes", help="cluster sizes, such as 8,100 (default: all)", default="")
    parser.add_argument("--trace", default="conversation", help=f"{' or '.join(traces.FILES)}, or a file")
    parser.add_argument("--load", type=float, default=0.8, help="offered: share of the prefill capacity without hits")
    parser.add_argument("--seconds", type=float, help="of the trace (default: whole at 8 nodes, less above)")


def run(options: argparse.Namespace) -> Result:
    """Every size."""
    result = Result("simulate", TARGETS)
    trace = _trace(result, options)
    sizes = tuple(int(size) for size in options.nodes.split(",")) if getattr(options, "nodes", "") else SIZES
    for size in sizes:
        _measure(result, size, trace, options)
    result.note(
        "engine: preset 8b-gpu with blocks of 512 tokens and 1M tokens of KV a node, its times scaled so that the load "
        f"is {options.load:g} of the prefill capacity if nothing were cached; one copy of the trace for "
        f"{NODES_PER_COPY} nodes, at its own speed; network 100 Gb/s, PCIe 25 GB/s; requests enter at random nodes"
    )
    result.note(
        "hit_ratio counts pulled tokens, local_hit_ratio does not; work_imbalance = most / mean seconds of prefill"
    )
    return result


def _trace(result: Result, options: argparse.Namespace) -> list[Arrival]:
    found = traces.named(options.trace)
    if found is None:
        result.note(f"no trace {options.trace}: a made-up one instead, its figures say little")
        return traces.made_up(4000, rate=3.0)
    return found


def _measure(result: Result, size: int, trace: list[Arrival], options: argparse.Namespace) -> None:
    config = engine_config(trace, options.load)
    count = size / NODES_PER_COPY
    seconds = getattr(options, "seconds", None) or SECONDS.get(size, (600.0, 60.0))[options.quick]
    arrivals = traces.copies(trace, count, seconds=seconds)
    say(f" {size} nodes, {len(arrivals)} requests ({count:.2f} copies of the trace) in {arrivals[-1].at:.0f} s")
    world = World(nodes=size, engine=config, delay_s=0.25 if size <= 8 else 0.5, digest_s=0.5 if size <= 8 else 1.0)
    best = _play(result, f"oracle_n{size}", world, oracle, arrivals)
    ours = _play(result, f"n{size}", world, Grapevine(Cost(pull=world.pull)), arrivals)
    result.add(f"ttft_mean_over_oracle_n{size}", ours.ttft_mean / best.ttft_mean)
    result.add(f"ttft_p99_over_oracle_n{size}", ours.ttft_p99 / best.ttft_p99)
    for name in SIMPLE:
        if size <= 100:
            simple = _play(result, f"{name}_n{size}", world, Grapevine(make_policy(name)), arrivals)
            result.add(f"ttft_mean_over_{name}_n{size}", ours.ttft_mean / simple.ttft_mean)


def _play(result: Result, suffix: str, world: World, placing: Placing, arrivals: list[Arrival]) -> Outcome:
    began = time.process_time()
    gc.disable()  # nothing here dies in a cycle
    try:
        cluster = SimCluster(replace(world), placing)
        found = outcome(cluster.run(arrivals), cluster)
    finally:
        gc.enable()
    for name, value in (
        ("hit_ratio", found.hit_ratio),
        ("local_hit_ratio", found.local_hit_ratio),
        ("work_imbalance", found.imbalance),
        ("ttft_mean_s", found.ttft_mean),
        ("ttft_p99_s", found.ttft_p99),
    ):
        result.add(f"{name}_{suffix}", value)
    say(f"  ({time.process_time() - began:.0f} CPU s)")
    return found
