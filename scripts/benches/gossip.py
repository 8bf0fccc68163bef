"""Gossip in virtual time, for 3 to 1000 nodes, and the cost of one real agent among 99 and 999 peers."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benches import gossip_agent
from benches import gossip_scenarios as scenarios
from benches.result import Result, Target, say

SIZES = (3, 10, 30, 100, 300, 1000)
QUICK_SIZES = (3, 10, 30, 100)
TARGETS: dict[str, Target] = {
    "row_age_p99_s_n100": ("<=", 1.5),
    "row_age_p99_s_n1000": ("<=", 2.5),
    "bytes_out_per_node_s_n100": ("<=", 25_000),
    "bytes_out_per_node_s_n1000": ("<=", 130_000),
    "join_known_s_n1000": ("<=", 3),
    "crash_known_p99_s_n100": ("<=", 4),
    "crash_known_p99_s_n1000": ("<=", 8),
    "false_deaths_per_node_hour_loss10_n100": ("=", 0),
    "false_deaths_per_node_hour_stall5_n100": ("<=", 0.01),
    **{f"heal_s_n{size}": ("<=", 10) for size in SIZES},
    "mass_start_s_n1000": ("<=", 15),
    "agent_core_share_n99": ("<=", 0.03),
    "agent_core_share_n999": ("<=", 0.10),
    "sim_wall_s_per_virtual_s_n1000": ("<=", 2),
}
#: What is done to each cluster, in this order; the last only when it is asked for by name.
SCENARIOS = ("rows", "agent", "join", "crash", "calm", "loss", "stall", "heal", "sweep")
#: Seconds of every stall in the sweep.
SWEEP_S = (1, 2, 3, 5, 8)
#: Above this size the halves of a partition set no load rows: they would be most of the work and decide nothing.
ROWS_IN_PARTITION = 100


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured, and how much. Node-hours are for each count of false deaths."""

    wanted: Sequence[str]
    node_hours: float
    joins: int
    crashes: int
    window_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--nodes", help="cluster sizes, such as 3,100 (default: all)", default="")
    parser.add_argument("--node-hours", type=float, help="for each count of false deaths (default 10; quick 0.3)")
    parser.add_argument("--only", help=f"these of {','.join(SCENARIOS)} (default: all but sweep)", default="")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default 1)")


def run(options: argparse.Namespace) -> Result:
    """Measure every size, then the agent."""
    result = Result("gossip", TARGETS)
    default = QUICK_SIZES if options.quick else SIZES
    sizes = tuple(int(size) for size in options.nodes.split(",")) if options.nodes else default
    wanted = tuple(options.only.split(",")) if options.only else SCENARIOS[:-1]
    if unknown := set(wanted) - set(SCENARIOS):
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    with gossip_agent.Port() as port:
        for size in sizes:
            _measure(result, size, _effort(options, size, wanted), options.seed, port)
    if options.only:
        result.note(f"only {options.only}")
    if absent := [size for size in SIZES if size not in sizes]:
        result.note(f"not measured in this run: sizes {', '.join(map(str, absent))}")
    return result


def _effort(options: argparse.Namespace, size: int, wanted: Sequence[str]) -> Effort:
    if options.quick:
        return Effort(wanted, options.node_hours or 0.3, 1, 4 if size > 30 else 8, 2.0)
    crashes = 10 if size >= 1000 else 20 if size >= 300 else 50
    return Effort(wanted, options.node_hours or 10.0, 3, crashes, 3.0)


def _measure(result: Result, size: int, effort: Effort, seed: int, port: gossip_agent.Port) -> None:
    """One cluster lives through everything, one thing after the other."""
    say(f" {size} nodes")
    started = time.process_time()
    gc.disable()  # a million live objects, none of them garbage in a cycle: collections would only be noise
    try:
        sim, agreed = scenarios.build(size, seed, gossip_agent.SUBNET, port.number, port.agent)
        result.add(f"mass_start_s_n{size}", agreed)
        scenarios.settle(sim)
        wanted = effort.wanted
        rows = scenarios.steady(sim, effort.window_s if "rows" in wanted else 0.0)
        if "rows" in wanted:
            _steady(result, size, rows)
        if "agent" in wanted and size in gossip_agent.AGENT_SIZES:
            gossip_agent.measure(result, gossip_agent.record(sim), port)
        if "join" in wanted:
            result.add(f"join_known_s_n{size}", scenarios.join(sim, effort.joins)[-1])
        if "crash" in wanted:
            _crashes(result, size, sim, effort)
        if "calm" in wanted:
            _false_deaths(result, size, sim, effort, 0)
        if "loss" in wanted:
            _false_deaths(result, size, sim, effort, 10)
        if "stall" in wanted:
            _stalls(result, size, sim, effort)
        if "sweep" in wanted:
            _sweep(result, size, sim, effort)
        if "heal" in wanted:
            if size > ROWS_IN_PARTITION:
                sim.stop_rows()
            result.add(f"heal_s_n{size}", scenarios.heal(sim, 60.0))
    finally:
        gc.enable()
    say(f"  ({time.process_time() - started:.0f} CPU s for {sim.now:.0f} virtual seconds)")


def _steady(result: Result, size: int, seen: scenarios.Steady) -> None:
    result.add(f"row_age_p50_s_n{size}", quantile(seen.ages, 0.5))
    result.add(f"row_age_p99_s_n{size}", quantile(seen.ages, 0.99))
    result.add(f"row_age_max_s_n{size}", seen.ages[-1])
    result.add(f"bytes_out_per_node_s_n{size}", seen.bytes_out)
    result.add(f"bytes_in_per_node_s_n{size}", seen.bytes_in)
    result.add(f"datagrams_out_per_node_s_n{size}", seen.datagrams_out)
    result.add(f"sim_wall_s_per_virtual_s_n{size}", seen.wall_s)
    result.add(f"sim_cpu_s_per_virtual_s_n{size}", seen.cpu_s)
    if seen.missing:
        result.note(f"n{size}: {seen.missing} of {seen.missing + len(seen.ages)} rows were not there at all")


def _crashes(result: Result, size: int, sim: scenarios.Simulator, effort: Effort) -> None:
    crashes = scenarios.Crashes(sim)
    # One at a time where a few are a large part of the cluster.
    crashes.run(effort.crashes, gap=25.0 if size <= 10 else 5.0 if size <= 30 else 2.0 if size <= 100 else 1.0)
    result.add(f"crash_known_p50_s_n{size}", quantile(sorted(crashes.known_to_all), 0.5))
    result.add(f"crash_known_p99_s_n{size}", quantile(sorted(crashes.known_to_all), 0.99))
    result.add(f"crash_known_each_p50_s_n{size}", quantile(sorted(crashes.known_to_each), 0.5))
    result.add(f"crashes_n{size}", len(crashes.known_to_all))


def _false_deaths(result: Result, size: int, sim: scenarios.Simulator, effort: Effort, percent: int) -> None:
    """Nobody dies while so many of a hundred datagrams are lost: whoever is held for dead is so falsely."""
    seconds = effort.node_hours * 3600 / len(sim.running())
    dead = scenarios.deaths_with_loss(sim, seconds, percent / 100)
    result.add(f"false_deaths_per_node_hour_loss{percent}_n{size}", dead / effort.node_hours)
    result.add(f"virtual_hours_loss{percent}_n{size}", seconds / 3600)
    result.add(f"node_hours_loss{percent}_n{size}", effort.node_hours)


def _stalls(result: Result, size: int, sim: scenarios.Simulator, effort: Effort) -> None:
    seen = scenarios.deaths_with_stalls(sim, effort.node_hours * 3600 / len(sim.running()), 0.05)
    # The target is held against all of them. How they divide tells whether the sick harm the healthy.
    false = seen.false_of_healthy + seen.false_of_stalled
    result.add(f"false_deaths_per_node_hour_stall5_n{size}", false / effort.node_hours)
    result.add(f"false_deaths_of_healthy_per_node_hour_stall5_n{size}", seen.false_of_healthy / effort.node_hours)
    result.add(f"deaths_per_stall_stall5_n{size}", seen.deaths / seen.stalls)
    result.add(f"stalls_n{size}", seen.stalls)
    result.add(f"node_hours_stall5_n{size}", effort.node_hours)


def _sweep(result: Result, size: int, sim: scenarios.Simulator, effort: Effort) -> None:
    """Stalls of one length at a time: up to which are they forgiven, and whom do they harm."""
    for length in SWEEP_S:
        seconds = effort.node_hours * 3600 / len(sim.running())
        seen = scenarios.deaths_with_stalls(sim, seconds, 0.05, (length, length))
        result.add(f"stall_{length}s_deaths_per_stall_n{size}", seen.deaths / seen.stalls)
        result.add(f"stall_{length}s_false_deaths_per_node_hour_n{size}", seen.false_of_stalled / effort.node_hours)
        result.add(f"stall_{length}s_false_deaths_of_healthy_n{size}", seen.false_of_healthy)
        result.add(f"stall_{length}s_stalls_n{size}", seen.stalls)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of all do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
