"""Which of the four stages fits, with how many nodes, why, and what to beware of."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

from node.sizing.engine import Engine, Load, Rate
from node.sizing.hardware import Hardware
from node.sizing.shape import ModelShape

#: An engine is planned for this share of what it can do: bursts, and a node that is away.
HEADROOM = 0.7
#: Moving KV must take at most this share of computing it, to pay; and as much of the prompts must be shared.
PULL_PAYS = 0.5
SHARED_PAYS = 0.3
#: A larger engine must save this much of all GPUs: what fails with one GPU is larger too.
WORTH_IT = 0.8
#: Below so many weights tensor parallelism gives less than it costs.
SMALL = 13e9
#: Networks below this many Gbit/s are slow for KV.
SLOW_GBIT = 10.0
MOST_HOSTS_PER_ENGINE = 8


class Stage(enum.Enum):
    """The four stages, and none of them."""

    ONE = "one machine"
    REPLICAS = "replicas behind a balancing policy"
    TENSOR = "tensor parallelism inside a host"
    CLUSTER = "a cluster whose nodes exchange KV blocks"
    NONE = "does not fit"

    @property
    def number(self) -> int:
        """1 to 4; 0 for none."""
        return list(Stage).index(self) + 1 if self is not Stage.NONE else 0


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer. ``reasons`` and ``warnings`` are sentences; seconds and bytes as named."""

    stage: Stage
    engine: Engine
    load: Load
    #: Nodes (engines), hosts, and what each node carries at the planned load.
    nodes: int
    hosts: int
    capacity: Rate
    planned: Rate
    bottleneck: str
    pull_s: float
    recompute_s: float
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """What vLLM gets after ``--``."""
        engine = self.engine
        flags = ["--max-model-len", str(self.load.context)]
        if engine.tensor > 1:
            flags += ["--tensor-parallel-size", str(engine.tensor)]
        if engine.pipeline > 1:
            flags += ["--pipeline-parallel-size", str(engine.pipeline)]
        flags += ["--gpu-memory-utilization", f"{engine.hardware.utilization:g}", "--max-num-seqs", str(self.slots)]
        if engine.kv_precision == "fp8":
            flags += ["--kv-cache-dtype", "fp8"]
        return tuple(flags)

    @property
    def slots(self) -> int:
        """Sequences at once that a node is started with: what it can carry, in eights."""
        most = self.engine.kv_tokens / (self.load.prompt + self.load.output)
        wanted = min(most, max(8.0, self.capacity.sequences * 1.25))
        return max(8, min(1024, math.ceil(wanted / 8) * 8))


def advise(model: ModelShape, hardware: Hardware, load: Load, *, kv_precision: str = "bf16", tensor: int = 0) -> Advice:
    """The engine that keeps the bounds with few GPUs in all, as often as it is needed. ``tensor``: forced."""
    engine, fits = _engine(model, hardware, load, kv_precision, tensor)
    capacity, bottleneck = engine.capacity(load)
    nodes = nodes_for(engine, load)
    per_host = max(1, hardware.per_host // engine.tensor)
    hosts = nodes * engine.pipeline if engine.pipeline > 1 else math.ceil(nodes / per_host)
    shared = load.prompt * load.shared
    pull = shared * model.kv_token_bytes(kv_precision) / hardware.network
    recompute = engine.prefill_s(shared)
    stage = _stage(fits, nodes, engine, load, pays=pull <= PULL_PAYS * recompute)
    advice = Advice(
        stage, engine, load, nodes, hosts, capacity, engine.at(load.requests_s / nodes, load), bottleneck,
        pull, recompute, (), (),
    )  # fmt: skip
    reasons, warnings = tuple(_reasons(advice)), tuple(_warnings(advice, tensor))
    return Advice(
        stage, engine, load, nodes, hosts, capacity, advice.planned, bottleneck, pull, recompute, reasons, warnings
    )


def nodes_for(engine: Engine, load: Load) -> int:
    """Nodes that carry the load within the headroom; 1 for an engine that cannot keep the bounds at all."""
    usable = engine.capacity(load)[0].requests_s * HEADROOM
    return max(1, math.ceil(load.requests_s / usable - 1e-9)) if usable > 0 else 1


def _engine(model: ModelShape, hardware: Hardware, load: Load, kv_precision: str, tensor: int) -> tuple[Engine, bool]:
    """The engine to use, and whether the model fits it."""
    degrees = [t for t in (1, 2, 4, 8, 16) if t <= hardware.per_host and model.heads % t == 0] or [1]
    if tensor:
        engine = Engine(model, hardware, tensor, 1, kv_precision)
        return engine, engine.fits(load)
    fitting = [e for e in (Engine(model, hardware, t, 1, kv_precision) for t in degrees) if e.fits(load)]
    able = [engine for engine in fitting if engine.capacity(load)[0].requests_s > 0]
    if able:  # more GPUs to a node may mean fewer of them in all, for the weights are held fewer times
        best = able[0]
        for engine in able[1:]:
            if nodes_for(engine, load) * engine.gpus <= WORTH_IT * nodes_for(best, load) * best.gpus:
                best = engine
        return best, True
    if fitting:  # it fits, and no degree keeps the latencies: the fastest of them, and a warning
        return min(fitting, key=lambda e: e.at(1e-6, load).ttft_s), True
    most = hardware.hosts or MOST_HOSTS_PER_ENGINE
    for hosts in range(2, min(most, MOST_HOSTS_PER_ENGINE) + 1):
        engine = Engine(model, hardware, degrees[-1], hosts, kv_precision)
        if engine.fits(load):
            return engine, True
    return Engine(model, hardware, degrees[-1], 1, kv_precision), False


def _stage(fits: bool, nodes: int, engine: Engine, load: Load, *, pays: bool) -> Stage:
    if not fits:
        return Stage.NONE
    if nodes > 1 and load.shared >= SHARED_PAYS and pays:
        return Stage.CLUSTER
    if engine.gpus > 1:
        return Stage.TENSOR
    return Stage.REPLICAS if nodes > 1 else Stage.ONE


def _reasons(advice: Advice) -> Iterator[str]:
    engine, load, gib = advice.engine, advice.load, 1024**3
    need = f"{engine.model.weight_bytes / gib:.1f} GiB of weights"
    if advice.stage is Stage.NONE:
        yield f"{need} and room for {load.context} tokens of KV do not fit {engine.gpus} x {engine.hardware.gpu.name}"
        return
    each = f"{engine.weights_per_gpu / gib:.1f} GiB on each of {engine.gpus} GPUs" if engine.gpus > 1 else "on one GPU"
    yield f"{need}, {each}, leave {engine.room_per_gpu / gib:.1f} GiB for KV per GPU: {engine.kv_tokens:,} tokens"
    if engine.tensor > 1:
        smaller = Engine(engine.model, engine.hardware, engine.tensor // 2, engine.pipeline, engine.kv_precision)
        if smaller.fits(load) and smaller.capacity(load)[0].requests_s > 0:
            whole = nodes_for(smaller, load) * smaller.gpus
            room = f"room for {smaller.kv_tokens:,} tokens"
            yield f"nodes of {smaller.gpus} GPUs have {room} and take {whole} GPUs in all"
        elif smaller.fits(load):
            yield f"{smaller.gpus} GPUs would hold it, and miss the bound of {smaller.capacity(load)[1]}"
        else:
            yield f"{_gpus(smaller.gpus)} not hold it: room for {smaller.kv_tokens:,} tokens of KV"
    rate = advice.capacity
    yield f"one node carries {rate.requests_s:.2f} requests/s; there it is stopped by {advice.bottleneck}"
    nodes = f"{advice.nodes} node{'s' * (advice.nodes > 1)}"
    yield f"planned for {100 * HEADROOM:.0f} % of that, {load.requests_s:g} requests/s take {nodes}"
    if load.shared and advice.nodes > 1:
        words = f"{advice.pull_s * 1000:.0f} ms to move, {advice.recompute_s * 1000:.0f} ms to compute again"
        yield f"the shared {100 * load.shared:.0f} % of a prompt take {words}"


def _gpus(count: int) -> str:
    return "one GPU does" if count == 1 else f"{count} GPUs do"


def _warnings(advice: Advice, forced: int) -> Iterator[str]:
    engine, load, hardware = advice.engine, advice.load, advice.engine.hardware
    if advice.stage is Stage.NONE:
        yield "use a smaller precision (--precision fp8 or int4), a GPU with more memory, or a shorter --longest"
        return
    if advice.capacity.requests_s == 0:
        yield f"the bound of {advice.bottleneck} is missed even by a request alone: relax it, or take a faster GPU"
    if engine.tensor > 1 and not hardware.joined:
        yield "tensor parallelism without NVLink: all-reduces go over PCIe; a model that fits one GPU serves more there"
    if engine.tensor > 1 and engine.model.parameters < SMALL and forced:
        yield "tensor parallelism below 13B parameters does not pay: as many replicas carry more requests"
    if engine.pipeline > 1:
        yield (
            f"larger than a host: vLLM's own runtime splits it over {engine.pipeline} hosts (one node to Grapevine); "
            "each token crosses the network, and one host that fails takes all of it down"
        )
        if hardware.network_gbit < 100:
            yield "sharding across Ethernet: take hosts with InfiniBand, more memory per GPU, or a smaller precision"
    if load.shared >= SHARED_PAYS and advice.nodes > 1 and advice.pull_s > PULL_PAYS * advice.recompute_s:
        yield "moving KV takes more than half as long as computing it here: requests go to who has it, --no-kv is fine"
    if load.shared >= SHARED_PAYS and hardware.network_gbit < SLOW_GBIT and advice.nodes > 1:
        yield f"a network of {hardware.network_gbit:g} Gbit/s is slow for KV: 10 is the least, 25 and more are better"
    if advice.nodes == 1 and load.shared >= SHARED_PAYS:
        yield "one node carries it: its own prefix cache does what a cluster would, start with one"
    if hardware.hosts and advice.hosts > hardware.hosts:
        most = hardware.hosts * max(1, hardware.per_host // engine.tensor) / advice.nodes * load.requests_s
        yield f"{advice.hosts} hosts are needed and {hardware.hosts} are there: they carry about {most:.1f} requests/s"
    if engine.model.precision == "fp8" and hardware.gpu.fp8 == 1.0:
        yield f"{hardware.gpu.name} does not compute with 8 bits: fp8 saves memory there, and no time"
