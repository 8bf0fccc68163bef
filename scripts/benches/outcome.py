"""What a simulated run is played on, and what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benches.simcluster import SimCluster
from benches.simnode import Request
from benches.traces import BLOCK_TOKENS, Arrival
from node.emulator import EngineConfig, Timing
from node.emulator.config import preset

#: Nodes that one copy of the trace is spread over.
NODES_PER_COPY = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave."""

    ttft_mean: float
    ttft_p99: float
    hit_ratio: float
    local_hit_ratio: float
    imbalance: float


def engine_config(trace: Sequence[Arrival], load: float) -> EngineConfig:
    """The engine of every node: as fast as makes 8 of them just so busy with the trace at its own speed.

    The trace stays as it is, since pauses between turns against the time that blocks survive decide the hits.
    """
    config = preset("8b-gpu", block_size=BLOCK_TOKENS, kv_tokens=1 << 20, max_model_len=1 << 18)
    factor = load * NODES_PER_COPY / offered(trace, config)
    timing = {name: getattr(config.timing, name) * factor for name in config.timing.__slots__}
    return replace(config, timing=Timing(**timing))


def offered(trace: Sequence[Arrival], config: EngineConfig) -> float:
    """Seconds of prefill a second that the trace asks for when nothing is cached."""
    work = sum(config.timing.prefill(0, arrival.tokens) for arrival in trace)
    return work / (trace[-1].at - trace[0].at)


def outcome(finished: list[Request], cluster: SimCluster) -> Outcome:
    """The figures of a run."""
    waits = sorted(request.ttft for request in finished)
    prompt = sum(request.arrival.tokens for request in finished)
    cached = sum(request.cached for request in finished)
    pulled = sum(min(request.pulled, request.cached) for request in finished)
    work = [node.work_s for node in cluster.nodes]
    return Outcome(
        ttft_mean=sum(waits) / len(waits),
        ttft_p99=waits[min(len(waits) - 1, int(len(waits) * 0.99))],
        hit_ratio=cached / prompt,
        local_hit_ratio=(cached - pulled) / prompt,
        imbalance=max(work) / (sum(work) / len(work)),
    )
