"""One engine with its GPUs: what fits into it, how fast it is, how many requests it carries.

The formulas (docs/sizing.md has them with their reasons):

    KV room    = memory * utilization - OVERHEAD - weights / (tensor * pipeline)           per GPU
    prefill    = 2 * active weights * tokens / (tensor * flops * MFU)
                 + 2 * layers * heads * width * tokens^2 / (tensor * flops * MFU) + all-reduces
    step       = weights read / (tensor * bandwidth * MBU) + sequences * their KV / (bandwidth * MBU)
                 + layers * LAYER_S + all-reduces
    busy       = requests per second * prefill of the part that no cache has
    sequences  = requests per second * output tokens * step / (1 - busy)

The last two are solved for the highest rate at which busy, KV room, latencies and slots hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from node.sizing.hardware import GIB, NETWORK_STEP_S, NVLINK_STEP_S, PCIE_STEP_S, Hardware
from node.sizing.shape import KV_BYTES, ModelShape

#: What vLLM, CUDA graphs and activations take of each GPU beside weights and KV.
OVERHEAD = 2 * GIB
#: Shares of the data sheet that are reached: floating point in prefill (less where tokens are spread over experts),
#: memory bandwidth in decode; and what each layer of a step costs besides, seconds (launches, routing).
MFU, MFU_EXPERTS, MBU = 0.5, 0.2, 0.65
LAYER_S = 50e-6
#: Sequences that an engine runs at once unless told otherwise, and share of its time that prompts may take.
SLOTS = 256
MOST_BUSY = 0.8
#: Sequences of the given length that must fit at least: with fewer, batching gives nothing.
LEAST_SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the cluster. Lengths in tokens, means."""

    requests_s: float
    prompt: int
    output: int
    #: Share of prompt tokens that some node has computed before.
    shared: float = 0.0
    #: Bounds in seconds: first token, and between tokens.
    ttft_s: float = 2.0
    between_s: float = 0.1
    #: Longest prompt and answer together; 0 = four times the mean.
    longest: int = 0

    @property
    def context(self) -> int:
        """Longest sequence that the engine must take."""
        return self.longest or 4 * (self.prompt + self.output)


@dataclass(frozen=True, slots=True)
class Rate:
    """What happens at one rate of requests."""

    requests_s: float
    busy: float
    sequences: float
    ttft_s: float
    between_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on ``tensor`` GPUs of each of ``pipeline`` hosts."""

    model: ModelShape
    hardware: Hardware
    tensor: int = 1
    pipeline: int = 1
    kv_precision: str = "bf16"

    @property
    def gpus(self) -> int:
        """GPUs it takes."""
        return self.tensor * self.pipeline

    @property
    def weights_per_gpu(self) -> float:
        """Bytes of weights on each GPU."""
        return self.model.weight_bytes / self.gpus

    @property
    def room_per_gpu(self) -> float:
        """Bytes that are left for KV on each GPU; negative when the weights do not fit."""
        memory = self.hardware.gpu.memory_gib * GIB
        return memory * self.hardware.utilization - OVERHEAD - self.weights_per_gpu

    @property
    def kv_per_token_per_gpu(self) -> float:
        """Bytes: heads are divided among the GPUs as far as they go; a latent is on each of them."""
        share = 1.0 if self.model.latent else max(1 / self.tensor, 1 / self.model.kv_heads)
        return self.model.kv_token_bytes(self.kv_precision) * share / self.pipeline

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return max(0, int(self.room_per_gpu / self.kv_per_token_per_gpu))

    def fits(self, load: Load) -> bool:
        """Whether the weights fit and leave room for a batch, and for the longest request."""
        return self.kv_tokens >= max(load.context, LEAST_SEQUENCES * (load.prompt + load.output))

    def prefill_s(self, tokens: float) -> float:
        """Seconds to compute a prompt alone."""
        if tokens <= 0:
            return 0.0
        model, gpu = self.model, self.hardware.gpu
        attention = 2 * (model.full_layers or model.layers) * model.heads * model.head_dim * tokens * tokens
        flops = gpu.flops * self.tensor
        faster = gpu.fp8 if model.precision == "fp8" else 1.0
        linear = 2 * model.active * tokens / (flops * faster * self._mfu)
        return linear + attention / (flops * MFU) + self._reduce_s(tokens)

    def step_s(self, sequences: float, context: float) -> float:
        """Seconds of one step in which each of ``sequences`` gets a token; ``context`` is their mean length."""
        model, gpu = self.model, self.hardware.gpu
        touched = 1 - math.pow(1 - model.active_experts, max(1.0, sequences))
        read = model.dense_bytes + model.embedding + model.expert_bytes * touched
        kv = sequences * context * self.kv_per_token_per_gpu * self.pipeline
        return (read / self.tensor + kv) / (gpu.bandwidth * MBU) + self._besides_s(sequences)

    def at(self, rate: float, load: Load) -> Rate:
        """What happens at so many requests a second; sequences are infinite beyond what it can do."""
        prefill = self.prefill_s(load.prompt * (1 - load.shared))
        busy = rate * prefill
        if busy >= 1:
            return Rate(rate, busy, float("inf"), float("inf"), float("inf"))
        context = load.prompt + load.output / 2
        sequences, between = 1.0, 0.0
        for _ in range(60):
            between = self.step_s(max(1.0, sequences), context) / (1 - busy)
            more = rate * load.output * between
            if abs(more - sequences) < 1e-3 or more > 1e5:
                sequences = more
                break
            sequences = more
        waits = busy / (2 * (1 - busy))  # an M/D/1 queue in front of the prefill
        return Rate(rate, busy, sequences, prefill * (1 + waits) + between, between)

    def limits(self, rate: Rate, load: Load) -> Iterator[str]:
        """Everything that does not hold at this rate, the most telling first."""
        if rate.ttft_s > load.ttft_s:
            yield "time to the first token"
        if rate.between_s > load.between_s:
            yield "time between tokens (memory bandwidth)"
        if rate.sequences > self.kv_tokens / (load.prompt + load.output):
            yield "room for KV"
        if rate.busy > MOST_BUSY:
            yield "computing prompts"
        if rate.sequences > SLOTS:
            yield f"{SLOTS} sequences at once"

    def capacity(self, load: Load) -> tuple[Rate, str]:
        """The highest rate at which everything holds, and what stops there. Rate 0: a bound is missed even alone."""
        alone = self.at(1e-6, load)
        missed = next(self.limits(alone, load), "")
        if missed:
            return self.at(0.0, load), missed
        low, high = 1e-6, 1e-3
        while not any(self.limits(self.at(high, load), load)) and high < 1e6:
            low, high = high, high * 2
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if any(self.limits(self.at(middle, load), load)) else (middle, high)
        return self.at(low, load), next(self.limits(self.at(high, load), load), "")

    def _reduce_s(self, tokens: float) -> float:
        """Seconds of the two all-reduces of each layer: bytes over the link (ring), and what each costs besides."""
        if self.tensor == 1:
            return 0.0
        each = tokens * self.model.hidden * KV_BYTES["bf16"] * 2 * (self.tensor - 1) / self.tensor
        besides = NVLINK_STEP_S if self.hardware.joined else PCIE_STEP_S
        return 2 * self.model.layers * (each / self.hardware.link + besides)

    def _besides_s(self, sequences: float) -> float:
        return self.model.layers * LAYER_S + self._reduce_s(sequences) + (self.pipeline - 1) * NETWORK_STEP_S

    @property
    def _mfu(self) -> float:
        return MFU_EXPERTS if self.model.experts else MFU
