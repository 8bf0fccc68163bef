"""What engines can take of a trace: engine seconds of its requests, with the hits that a central router would get.

    work(request) = prefill of what is not cached + answer tokens * (decode + context * tokens before it + step / batch)

`batch` is how many requests of usual size fit into the cache: engines that are full decode so many in one step. What is
cached is what the oracle (`benches.oracle`, no pulls) finds in virtual time. Offered load = work per second / engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benches.oracle import oracle
from benches.simcluster import SimCluster, World
from benches.trace_scale import Scale
from benches.traces import BLOCK_TOKENS, Arrival
from node.emulator import EngineConfig, Timing
from node.emulator.config import preset

PRESET = "8b-gpu"
#: Load at which the oracle's hits are taken, once for all loads.
PILOT_LOAD = 0.8
#: Bytes per second at which nobody pulls.
NO_NETWORK = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What the requests of a replay ask for: engine seconds of all together, and the share of prompts found cached."""

    seconds: float
    hit_ratio: float

    def speedup(self, load: float, *, nodes: int, real_s: float) -> float:
        """How many times faster than its preset an engine must be for this load over so many real seconds."""
        return self.seconds / (load * nodes * real_s)


def engine(scale: Scale) -> EngineConfig:
    """An engine in the trace's own tokens and seconds."""
    return preset(PRESET, block_size=BLOCK_TOKENS, kv_tokens=scale.kv_tokens, max_model_len=scale.kv_tokens)


def work_s(arrival: Arrival, cached: int, config: EngineConfig, batch: float) -> float:
    """Engine seconds of one request."""
    timing = config.timing
    decode = timing.decode_s + timing.context_s * arrival.tokens + timing.step_s / batch
    return timing.prefill(cached, arrival.tokens - cached) + arrival.output * decode


def measure(arrivals: Sequence[Arrival], scale: Scale, nodes: int) -> Work:
    """The work of these requests when a central router places them."""
    config = engine(scale)
    batch = _batch(arrivals, config)
    cold = Work(sum(work_s(arrival, 0, config, batch) for arrival in arrivals), 0.0)
    faster = cold.speedup(PILOT_LOAD, nodes=nodes, real_s=scale.seconds)
    world = World(nodes=nodes, engine=_at(config, faster), net_bytes_s=NO_NETWORK)
    done = SimCluster(world, oracle).run(arrivals)
    seconds = sum(work_s(request.arrival, request.cached, config, batch) for request in done)
    tokens = sum(arrival.tokens for arrival in arrivals)
    return Work(seconds, sum(request.cached for request in done) / tokens)


def _batch(arrivals: Sequence[Arrival], config: EngineConfig) -> float:
    usual = sum(arrival.tokens + arrival.output for arrival in arrivals) / len(arrivals)
    return max(1.0, min(float(config.max_num_seqs), config.kv_tokens / usual))


def _at(config: EngineConfig, faster: float) -> EngineConfig:
    timing = {name: getattr(config.timing, name) / faster for name in config.timing.__slots__}
    return replace(config, timing=Timing(**timing))
