"""A real trace through a cluster of ours and through each peer router, before the same emulated engines, in turn."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benches import trace_records, trace_routers, trace_work, traces
from benches.emulated_cluster import Engines, Sizes, emulated_engines, nodes_before
from benches.proxy.procs import cpu_s, family
from benches.result import Result, say
from benches.trace_replay import PATIENCE_S, decided, forget, looked_up, pulls, replay
from benches.trace_report import (
    LEAST_LOADED,
    LOADS,
    OURS,
    ROUTING_ONLY,
    Outcome,
    Pulled,
    outcome,
    report,
    suffix_of,
    targets,
)
from benches.trace_routers import ROUTERS, NotStarted
from benches.trace_scale import NODES, OTHER, SCALES, Scale, Shot, cut, shots
from benches.traces import Arrival
from node.emulator.config import preset

TARGETS = targets(tuple(SCALES), alone=(traces.UNSHARED,))
QUICK_NODES = 3
QUICK_LOADS, QUICK_S, QUICK_PEERS = (80,), 8.0, ("sglang",)
#: Requests that an engine computes at once, and that its node takes.
PLACES = 256
#: Tokens of a block, and bytes that stand for the KV of one token of the trace (128 KiB in the preset's model): so that
#: loopback is to the replay, whose time is divided, about what a network of 100 Gb/s is to the trace.
BLOCK = 16
TOKEN_BYTES = 1024
#: What the nodes that take part are told.
OWN = {OURS: "cost", ROUTING_ONLY: "cost", LEAST_LOADED: "least_connections"}
#: About how long a contestant takes beside the arrivals: starting, the last answers, ending. Seconds.
AROUND_S = 15.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed before how many engines, and who takes part."""

    trace: str
    scale: Scale
    nodes: int
    arrivals: Sequence[Arrival]
    shots: Sequence[Shot]
    work: trace_work.Work
    contestants: Sequence[str]
    #: Where what became of each request is written.
    records: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--trace", help=f"{', '.join(SCALES)}, or a file in the form of the first (default: all)")
    parser.add_argument("--nodes", type=int, help=f"engines, and nodes of ours (default {NODES}; quick {QUICK_NODES})")
    parser.add_argument("--loads", help=f"percent of what the engines can take (default {','.join(map(str, LOADS))})")
    parser.add_argument(
        "--seconds", type=float, help="of arrivals for each contestant and load (default: 60, claude_code 120; quick 8)"
    )
    parser.add_argument("--slower", type=float, default=1.0, help="times: for a machine that does other things as well")
    names = [*OWN, *ROUTERS]
    parser.add_argument("--records", type=Path, metavar="FILE", help="append what became of each request, JSON lines")
    parser.add_argument("--contestants", help=f"only these of {','.join(names)} (default: all that are installed)")


def run(options: argparse.Namespace) -> Result:
    """Every trace at every load."""
    result = Result("trace", TARGETS)
    names = [options.trace] if options.trace else list(SCALES)[: 1 if options.quick else None]
    loads = _loads(options)
    plans = [plan for name in names if (plan := _plan(result, name, options)) is not None]
    seconds = sum(len(loads) * len(plan.contestants) * (plan.scale.real_s + AROUND_S) for plan in plans)
    say(f"  this takes about {seconds / 60:.1f} minutes, {PATIENCE_S:g} s more where somebody does not keep up")
    for plan in plans:
        _describe(result, plan)
        for load in loads:
            asyncio.run(_load(result, plan, load))
    return result


def _loads(options: argparse.Namespace) -> tuple[int, ...]:
    given: str | None = options.loads
    if given:
        return tuple(int(load) for load in given.split(","))
    return QUICK_LOADS if options.quick else LOADS


def _plan(result: Result, name: str, options: argparse.Namespace) -> Plan | None:
    scale = SCALES.get(name, OTHER)
    arrivals = traces.named(name, until=scale.start + scale.seconds)
    if arrivals is None:
        if name not in SCALES:
            raise SystemExit(f"trace: no file {name}")
        result.note(f"no trace {name} here: left out; --trace takes a file")
        return None
    seconds = options.seconds or (QUICK_S if options.quick else None)
    nodes = options.nodes or (QUICK_NODES if options.quick else NODES)
    scale = scale.slower(options.slower).before(nodes)
    scale = scale if seconds is None else scale.shortened(seconds)
    part = cut(arrivals, scale)
    if not part:
        raise SystemExit(f"trace: nothing of {name} lies between {scale.start:g} and {scale.start + scale.seconds:g} s")
    say(f"  {name}: {len(part)} requests")
    work = trace_work.measure(part, scale, nodes)
    contestants = _contestants(result, name, options)
    return Plan(name, scale, nodes, part, shots(part, scale), work, contestants, options.records)


def _contestants(result: Result, trace: str, options: argparse.Namespace) -> list[str]:
    given: str | None = options.contestants
    peers = () if trace == traces.UNSHARED else QUICK_PEERS if options.quick else tuple(ROUTERS)
    names = given.split(",") if given else [*OWN, *peers]
    unknown = set(names) - {*OWN, *ROUTERS}
    if unknown:
        raise SystemExit(f"trace: nobody is called {', '.join(sorted(unknown))}")
    absent = [name for name in names if name in ROUTERS and not ROUTERS[name].ready]
    if absent:
        note = f"not installed here, so left out (`scripts/bench peers install`): {', '.join(absent)}"
        if note not in result.notes:
            result.note(note)
    return [name for name in names if name not in absent]


async def _load(result: Result, plan: Plan, load: int) -> None:
    suffix = suffix_of(plan.trace, load)
    speedup = plan.work.speedup(load / 100, nodes=plan.nodes, real_s=plan.scale.real_s)
    say(f"  {suffix}: engines {speedup:.2f} times as fast as the preset")
    scale = plan.scale
    sizes = Sizes(
        plan.nodes, PLACES, speedup,
        engine_args=(
            "--coarse", str(scale.coarse), "--kv-tokens", str(scale.kv_tokens), "--max-model-len", str(scale.kv_tokens),
        ),
        block_bytes=BLOCK * scale.coarse * TOKEN_BYTES,
    )  # fmt: skip
    outcomes: dict[str, Outcome] = {}
    async with emulated_engines(sizes) as engines:
        for name in plan.contestants:
            try:
                outcomes[name] = await _contest(name, engines, sizes, plan, suffix)
            except NotStarted as error:
                result.note(f"{suffix}: {name} did not start: {error}")
                continue
            found = outcomes[name]
            say(
                f"    {name:18} ttft mean {found.ttft_mean:7.3f} p50 {found.ttft_p50:7.3f} p99 {found.ttft_p99:7.3f} s,"
                f" hits {found.hit_ratio:.3f}, failed {found.failed:.3f}, late {found.late:.3f},"
                f" cores {found.router_cores:.2f} + engines {found.engine_cores:.2f}, sent {found.late_p99:.3f} s late"
            )
    report(result, suffix, outcomes)


async def _contest(name: str, engines: Engines, sizes: Sizes, plan: Plan, suffix: str) -> Outcome:
    if name == OURS:  # a pool as large as the engine's own cache: no more memory than the others have
        sizes = replace(sizes, pool_blocks=plan.scale.kv_tokens // plan.scale.coarse // BLOCK)
    async with _started(name, engines, sizes) as (urls, pids):
        await forget(engines.urls)
        asked, found = await looked_up(engines.urls)
        began, routers, others = time.monotonic(), cpu_s(family(pids)), cpu_s(engines.pids)
        seen, end = await replay(urls, plan.shots)
        took = time.monotonic() - began
        routers, others = cpu_s(family(pids)) - routers, cpu_s(engines.pids) - others
        asked_now, found_now = await looked_up(engines.urls)
        pulled = Pulled(*await pulls(urls)) if name == OURS else None
        decisions = await decided(urls) if plan.records is not None and name in OWN else {}
    if plan.records is not None:
        requests = list(zip(plan.arrivals, seen, strict=True))
        trace_records.write(plan.records, suffix, name, requests, decisions)
    return outcome(
        seen,
        end,
        hit_ratio=(found_now - found) / max(1.0, asked_now - asked),
        router_cores=routers / took,
        engine_cores=others / took,
        pulled=pulled,
    )


@asynccontextmanager
async def _started(name: str, engines: Engines, sizes: Sizes) -> AsyncIterator[tuple[list[str], list[int]]]:
    """The contestant: entries for the clients, and its processes."""
    if name in ROUTERS:
        async with trace_routers.running(ROUTERS[name], engines.urls) as (url, pid):
            yield [url], [pid]
        return
    async with nodes_before(engines, replace(sizes, node_args=("--policy", OWN[name]))) as nodes:
        yield nodes.urls, nodes.pids


def _describe(result: Result, plan: Plan) -> None:
    scale = plan.scale
    result.note(
        f"{plan.trace}: {len(plan.shots)} requests of {scale.seconds:g} s from {scale.start:g} s on, {scale.share:.0%} "
        f"of the conversations, sent in {scale.real_s:g} s; one token stands for {scale.coarse}; {plan.nodes} engines "
        f"(preset {trace_work.PRESET}) with {scale.kv_tokens} tokens of KV; a central router with perfect knowledge "
        f"finds {plan.work.hit_ratio:.3f} of the prompt tokens cached, and its work is what the loads are shares of"
    )
    gbit = 8 * preset(trace_work.PRESET).kv_token_bytes / TOKEN_BYTES * scale.real_s / scale.seconds
    result.note(f"{plan.trace}: 1 GB/s of a pull here stands for a network of {gbit:.0f} Gb/s there")
