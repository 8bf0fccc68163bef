"""What becomes of a cluster that is asked for three times what it can do? Real nodes, emulated engines, open loop."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benches import overload_sim
from benches.emulated_cluster import Sizes, emulated_cluster
from benches.openloop import TOO_MANY, Load, Tried
from benches.result import Result, Target, say

TARGETS: dict[str, Target] = {
    "goodput_3x_over_1x": (">=", 0.9),
    "accepted_p99_3x_over_1x": ("<=", 1.5),
}
#: Clients by API key; the modest one sends this share of the capacity, whatever the others do.
CLIENTS = tuple(f"client-{number}" for number in range(8))
MODEST = "modest"
MODEST_SHARE = 0.05
#: Virtual seconds per second: an answer of 32 tokens takes about one second, with --quick half of one.
SPEEDUP, QUICK_SPEEDUP = 0.25, 0.5


#: Sizes and seconds of the runs in virtual time.
VIRTUAL_PLACES = (4, 8, 32)
VIRTUAL_S, VIRTUAL_WARM_UP_S = 120.0, 20.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each part of a phase, and how the cluster is."""

    calibrate: float
    warm_up: float
    measured: float
    sizes: Sizes
    loads: tuple[int, ...]


@dataclass(slots=True)
class Phase:
    """What was seen at one load."""

    load: int
    began: float
    times: Times
    tries: list[Tried]

    @property
    def window(self) -> tuple[float, float]:
        """The measured part."""
        start = self.began + self.times.warm_up
        return start, start + self.times.measured

    def goodput(self) -> float:
        """Answers per second that were whole within the window."""
        start, end = self.window
        return sum(tried.ok and start <= tried.ended < end for tried in self.tries) / self.times.measured

    def accepted(self) -> list[Tried]:
        """Whole answers of requests that came within the window, at once or as they were told."""
        start, end = self.window
        return [tried for tried in self.tries if tried.ok and start <= tried.began < end]

    def refused(self) -> list[Tried]:
        """First attempts of the whole phase that were refused."""
        return [tried for tried in self.tries if tried.status == TOO_MANY and not tried.again]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--nodes", type=int, help="nodes (default 4; quick 2)")
    parser.add_argument("--seconds", type=float, help="measured seconds of each load (default 25; quick 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the times and sizes of the requests")


def run(options: argparse.Namespace) -> Result:
    """Measure the capacity, then offer it once, twice and three times."""
    result = Result("overload", TARGETS)
    nodes = options.nodes or (2 if options.quick else 4)
    keys = [part for key in (*CLIENTS, MODEST) for part in ("--api-key", key)]
    sizes = Sizes(nodes, 4, QUICK_SPEEDUP if options.quick else SPEEDUP, keys)
    times = (
        Times(3.0, 6.0, options.seconds or 5.0, sizes, (1, 3))
        if options.quick
        else Times(10.0, 15.0, options.seconds or 25.0, sizes, (1, 2, 3))
    )
    _virtual(result, VIRTUAL_PLACES[:2] if options.quick else VIRTUAL_PLACES, runs=1 if options.quick else 3)
    asyncio.run(_measure(result, times, options.seed))
    return result


def _virtual(result: Result, sizes: Sequence[int], runs: int) -> None:
    """The waiting room alone, in virtual time: what it would be without sockets, processes and a shared machine."""
    for places in sizes:
        goodput, p99 = zip(*(_virtual_load(times, places, runs) for times in (1.0, 3.0)), strict=True)
        result.add(f"virtual_goodput_3x_over_1x_n{places}", goodput[1] / goodput[0])
        result.add(f"virtual_accepted_p99_3x_over_1x_n{places}", p99[1] / p99[0])
    ratios = [_virtual_entries(seed) for seed in range(1, 2 * runs + 1)]
    result.add("virtual_accepted_p99_3x_over_1x_entries4", sum(ratios) / len(ratios))
    result.add("virtual_accepted_p99_3x_over_1x_entries4_worst", max(ratios))
    result.note(
        "virtual: one node with n places, requests of half to one and a half seconds, eight equal clients, "
        f"{VIRTUAL_S:g} s of which the first {VIRTUAL_WARM_UP_S:g} s are left out, averaged over {runs} runs; "
        f"entries4: four nodes with four places and a line each, loads of 0.95, 2 and 3 in turn, {2 * runs} seeds"
    )


def _virtual_load(times: float, places: int, runs: int) -> tuple[float, float]:
    """Answers per second, and p99 of the time from coming to the end of the answer; means over the runs."""
    goodput = p99 = 0.0
    for seed in range(1, runs + 1):
        service = overload_sim.overloaded(times, seconds=VIRTUAL_S, seed=seed, places=places)
        service.run()
        served = [(r.came, r.waited + r.took) for r in service.requests if r.waited is not None]
        goodput += sum(VIRTUAL_WARM_UP_S <= came + took < VIRTUAL_S for came, took in served)
        p99 += _quantile([took for came, took in served if VIRTUAL_WARM_UP_S <= came < VIRTUAL_S], 0.99)
    return goodput / runs / (VIRTUAL_S - VIRTUAL_WARM_UP_S), p99 / runs


def _virtual_entries(seed: int) -> float:
    """p99 at 3x over that at 1x of four nodes with four places and a line each, in the phases of the real run."""
    seconds, rest_s, warm_s = 40.0, 120.0, 15.0
    service = overload_sim.stepped((0.95, 2.0, 3.0), seconds=seconds, rest_s=rest_s, seed=seed, places=4, entries=4)
    service.run()
    starts = [phase * (seconds + rest_s) for phase in (0, 2)]
    p99 = [
        _quantile(
            [
                r.waited + r.took
                for r in overload_sim.within(service, start + warm_s, start + seconds)
                if r.waited is not None
            ],
            0.99,
        )
        for start in starts
    ]
    return p99[1] / p99[0]


async def _measure(result: Result, times: Times, seed: int) -> None:
    async with emulated_cluster(times.sizes) as urls:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            capacity = await _capacity(Load(session, urls, random.Random(seed)), times)
            result.add("capacity_per_s", capacity)
            phases = [
                await _phase(load, capacity, Load(session, urls, random.Random(f"{seed}/{load}")), times)
                for load in times.loads
            ]
    for phase in phases:
        _report(result, phase)
    once, thrice = phases[0], phases[-1]
    result.add("goodput_3x_over_1x", thrice.goodput() / once.goodput())
    p99 = [_quantile(_latencies(phase.accepted()), 0.99) for phase in (once, thrice)]
    result.add("accepted_p99_3x_over_1x", p99[1] / p99[0])
    _explain(result, times)


async def _capacity(sender: Load, times: Times) -> float:
    """Answers per second when every place is taken all the time, and nobody waits for long."""
    workers = times.sizes.nodes * (times.sizes.places + 1)
    began = time.monotonic()
    await asyncio.gather(*(sender.closed(CLIENTS[i % len(CLIENTS)], times.calibrate) for i in range(workers)))
    start, end = began + times.calibrate / 4, began + times.calibrate
    return sum(tried.ok and start <= tried.ended < end for tried in sender.tries) / (end - start)


async def _phase(load: int, capacity: float, sender: Load, times: Times) -> Phase:
    say(f"  {load}x")
    tasks: set[asyncio.Task[None]] = set()
    phase = Phase(load, time.monotonic(), times, sender.tries)
    seconds = times.warm_up + times.measured
    rate = (load - MODEST_SHARE) * capacity / len(CLIENTS)
    senders = [sender.offer(client, rate, seconds, tasks) for client in CLIENTS]
    await asyncio.gather(*senders, sender.offer(MODEST, MODEST_SHARE * capacity, seconds, tasks))
    while tasks:  # who was refused comes back when it was told to
        await asyncio.gather(*tasks)
    return phase


def _report(result: Result, phase: Phase) -> None:
    name, accepted = f"{phase.load}x", phase.accepted()
    result.add(f"goodput_{name}_per_s", phase.goodput())
    result.add(f"accepted_p50_{name}_s", _quantile(_latencies(accepted), 0.5))
    result.add(f"accepted_p99_{name}_s", _quantile(_latencies(accepted), 0.99))
    result.add(f"first_token_p99_{name}_s", _quantile([tried.first - tried.began for tried in accepted], 0.99))
    result.add(f"queued_p99_{name}_s", _quantile([tried.queued_ms / 1000 for tried in accepted], 0.99))
    firsts = [tried for tried in phase.tries if not tried.again]
    refused = phase.refused()
    result.add(f"refused_share_{name}", len(refused) / len(firsts))
    modest = [tried for tried in firsts if tried.client == MODEST]
    result.add(f"modest_refused_share_{name}", sum(t.status == TOO_MANY for t in modest) / max(1, len(modest)))
    result.add(f"errors_{name}", sum(tried.status not in (200, TOO_MANY) for tried in phase.tries))
    if not refused:
        return
    again = [tried for tried in phase.tries if tried.again]
    result.add(f"obeyed_served_share_{name}", sum(tried.ok for tried in again) / len(refused))
    waits = [float(tried.retry_after_s or 0) for tried in refused]
    result.add(f"retry_after_p50_{name}_s", _quantile(waits, 0.5))
    result.add(f"retry_after_max_{name}_s", max(waits))


def _explain(result: Result, times: Times) -> None:
    sizes = times.sizes
    result.note(
        f"{sizes.nodes} node processes with {sizes.places} places, each in front of an emulated engine (8b-gpu at "
        f"{sizes.speedup:g} of its speed), loopback, streams of 16 to 48 tokens; capacity from a closed loop with a "
        f"client more than places on each node; then Poisson arrivals of {len(CLIENTS)} clients and a modest one "
        f"({MODEST_SHARE:.0%} of the capacity) for {times.warm_up + times.measured:g} s, of which the first "
        f"{times.warm_up:g} s are left out, in which the nodes learn that it is no burst; who is refused obeys "
        "Retry-After and comes back once, on top of the load"
    )
    if 2 not in times.loads:
        result.note("--quick: 2x is left out")


def _latencies(tries: Sequence[Tried]) -> list[float]:
    return [tried.ended - tried.began for tried in tries]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
