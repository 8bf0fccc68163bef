"""A request as the emulated engine sees it, and what the engine says about it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to compute. How long its answer is, is known beforehand: nothing here computes it."""

    rid: str
    prompt_tokens: int
    output_tokens: int
    #: Chained keys of the full blocks of prompt and answer, as far as they can be shared; may be shorter.
    keys: Sequence[Hashable] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """It was scheduled for the first time; prompt tokens found in the cache, and loaded from the node's pool."""

    rid: str
    at: float
    cached_tokens: int
    external_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """`count` more tokens of its answer are there. The first of all also says that the prompt is computed."""

    rid: str
    at: float
    count: int
    first: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """It has its last token and left the engine."""

    rid: str
    at: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """It lost its blocks to others and will be computed again."""

    rid: str
    at: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that a request completed, by key (vLLM's KV event BlockStored)."""

    rid: str
    at: float
    keys: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks that left the cache (BlockRemoved)."""

    at: float
    keys: tuple[Hashable, ...]


Action = Started | Tokens | Done | Preempted | Stored | Evicted
