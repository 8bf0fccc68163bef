"""What of a model decides how large and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

from node.errors import LocalError

#: Bytes that one weight takes, scales included (int4 and mxfp4: groups with a scale of their own).
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5625, "mxfp4": 0.53125}
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
_BF16 = 2.0


class SizingError(LocalError):
    """The question cannot be answered as it was put; the message says what to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes are counts of weights unless the name says bytes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    #: Weights of embeddings and output head (quantized checkpoints keep them at 16 bits), of all experts, of the rest.
    embedding: float
    experts: float = 0.0
    dense: float = 0.0
    #: Share of the experts that one token uses; 1 without experts.
    active_experts: float = 1.0
    precision: str = "bf16"
    #: The precision is that of the experts only (gpt-oss): all else has 16 bits.
    experts_only: bool = False
    #: Layers whose attention reaches over the whole context; the others hold a window.
    full_layers: int = 0
    #: Numbers that multi-head latent attention keeps of a token and layer, instead of keys and values; 0 without it.
    latent: int = 0
    max_len: int = 0
    #: Size of the checkpoint as it lies on disk, where that is known: wins over counting.
    checkpoint_bytes: int = 0

    @property
    def parameters(self) -> float:
        """All weights."""
        return self.embedding + self.experts + self.dense

    @property
    def active(self) -> float:
        """Weights that one token uses, the table of embeddings not counted: it is looked up, not multiplied."""
        return self.dense + self.experts * self.active_experts + self.embedding / 2

    @property
    def weight_bytes(self) -> float:
        """Memory of the weights, all GPUs together."""
        if self.checkpoint_bytes:
            return float(self.checkpoint_bytes)
        return self.embedding * _BF16 + self.dense_bytes + self.expert_bytes

    @property
    def dense_bytes(self) -> float:
        """Memory of the weights that every token uses, embeddings not counted."""
        return self.dense * (_BF16 if self.experts_only else WEIGHT_BYTES[self.precision])

    @property
    def expert_bytes(self) -> float:
        """Memory of all experts."""
        return self.experts * WEIGHT_BYTES[self.precision]

    def kv_token_bytes(self, kv_precision: str) -> float:
        """KV of one token over all layers that keep the whole context, once (not per GPU)."""
        each = self.latent or 2 * self.kv_heads * self.head_dim
        return (self.full_layers or self.layers) * each * KV_BYTES[kv_precision]


def shape_of(billions: float, precision: str) -> ModelShape:
    """A dense model of usual proportions with so many weights: grouped-query attention, 8 KV heads of 128.

    :raises SizingError: the number makes no sense.
    """
    if not 0.05 <= billions <= 5000:
        raise SizingError(f"{billions:g} billion parameters: give a number from 0.05 to 5000, or --model PATH")
    total = billions * 1e9
    layers = max(16, round(32 * (billions / 8) ** (1 / 3)))
    heads = max(8, round((total / (12 * layers)) ** 0.5 / 1024) * 8)
    hidden = heads * 128
    embedding = min(total / 4, 2 * 128_000 * hidden)
    return ModelShape(
        name=f"{billions:g}B",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        embedding=embedding,
        dense=total - embedding,
        precision=precision,
    )
