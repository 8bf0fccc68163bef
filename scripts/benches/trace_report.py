"""Figures of the trace bench out of what was seen. Names end in trace and load in percent: `_conversation_50`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benches.result import Result, Target
from benches.trace_replay import Seen

#: Contestants that are not peers: ourselves; our nodes without pool and pulls, so that only routing differs; and our
#: nodes with a policy that knows nothing of prefixes.
OURS, ROUTING_ONLY, LEAST_LOADED = "grapevine", "grapevine_no_kv", "least_loaded"
LOADS = (50, 80, 95)
#: Who fails more of the requests is no peer to be compared with.
FAILED = 0.01


def targets(traces: Sequence[str], loads: Sequence[int] = LOADS, *, alone: Sequence[str] = ()) -> dict[str, Target]:
    """What is aimed at, for each trace and load; in those `alone` by our nodes only, without peers."""
    found: dict[str, Target] = {}
    for trace, load in itertools.product(traces, loads):
        suffix = suffix_of(trace, load)
        if trace not in alone:
            found[f"ttft_mean_over_best_peer_{suffix}"] = ("<=", 0.8)
            found[f"ttft_p99_over_best_peer_{suffix}"] = ("<=", 0.8)
        found[f"ttft_mean_over_least_loaded_{suffix}"] = ("<=", 1.0)
    return found


def suffix_of(trace: str, load: int) -> str:
    """The end of a figure's name."""
    return f"{trace}_{load}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one contestant did. Seconds; shares of 1; CPU in cores."""

    failed: float
    #: Still without an answer at the end: their waits until then count, so that they look shorter than they are.
    late: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    hit_ratio: float
    #: How late the generator sent, 99th percentile.
    late_p99: float
    router_cores: float
    engine_cores: float
    pulled: Pulled | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """KV that moved between nodes: bytes of all pulls, and the seconds they took together."""

    bytes: float
    seconds: float


def outcome(
    seen: Sequence[Seen],
    end: float,
    *,
    hit_ratio: float,
    router_cores: float,
    engine_cores: float,
    pulled: Pulled | None = None,
) -> Outcome:
    """Sum up a replay that ended at `end`. Times count from when a request was due: a late generator is no excuse."""
    waits = sorted((one.first or end) - one.due for one in seen if not one.failed)
    return Outcome(
        failed=sum(one.failed for one in seen) / len(seen),
        late=sum(not one.first and not one.failed for one in seen) / len(seen),
        ttft_mean=sum(waits) / len(waits) if waits else math.inf,
        ttft_p50=quantile(waits, 0.5),
        ttft_p99=quantile(waits, 0.99),
        hit_ratio=hit_ratio,
        late_p99=quantile(sorted(one.sent - one.due for one in seen), 0.99),
        router_cores=router_cores,
        engine_cores=engine_cores,
        pulled=pulled,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of these lie; infinite without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.inf


def report(result: Result, suffix: str, outcomes: Mapping[str, Outcome]) -> None:
    """Add the figures of one trace at one load."""
    for name, found in outcomes.items():
        for figure, value in (
            ("ttft_mean_s", found.ttft_mean),
            ("ttft_p50_s", found.ttft_p50),
            ("ttft_p99_s", found.ttft_p99),
            ("hit_ratio", found.hit_ratio),
            ("failed_share", found.failed),
            ("late_share", found.late),
            ("router_cores", found.router_cores),
            ("engine_cores", found.engine_cores),
            ("generator_late_p99_s", found.late_p99),
        ):
            if math.isfinite(value):
                result.add(f"{name}_{figure}_{suffix}", value)
    peers = {name: found for name, found in outcomes.items() if name not in (OURS, ROUTING_ONLY, LEAST_LOADED)}
    fit = {name: found for name, found in peers.items() if found.failed <= FAILED}
    for name in sorted(peers.keys() - fit.keys()):
        result.note(f"{suffix}: {name} failed {peers[name].failed:.1%} of the requests and is not compared with")
    routing = outcomes.get(ROUTING_ONLY)
    if routing is not None and fit:
        best = min(o.ttft_mean for o in fit.values())
        result.add(f"ttft_mean_no_kv_over_best_peer_{suffix}", routing.ttft_mean / best)
    ours = outcomes.get(OURS)
    if ours is None:
        return
    result.add(f"hit_ratio_{suffix}", ours.hit_ratio)
    if ours.pulled is not None and ours.pulled.seconds > 0:
        result.add(f"pulled_gb_{suffix}", ours.pulled.bytes / 1e9)
        result.add(f"pull_gb_s_{suffix}", ours.pulled.bytes / ours.pulled.seconds / 1e9)
    least = outcomes.get(LEAST_LOADED)
    if least is not None:
        result.add(f"ttft_mean_over_least_loaded_{suffix}", ours.ttft_mean / least.ttft_mean)
    if fit:
        result.add(f"ttft_mean_over_best_peer_{suffix}", ours.ttft_mean / min(o.ttft_mean for o in fit.values()))
        result.add(f"ttft_p99_over_best_peer_{suffix}", ours.ttft_p99 / min(o.ttft_p99 for o in fit.values()))
