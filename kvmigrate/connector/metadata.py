"""What the scheduler half tells the worker halves to do in one engine step.

vLLM pickles these from the engine core to every worker, so they hold plain values only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One pool slot as the scheduler's mirror knew it: a hint that the reader checks against the slot header."""

    rank: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Fill paged block `block_id` with the pool's bytes of `block_hash` (one slot per tensor-parallel rank)."""

    block_id: int
    block_hash: bytes
    slots: tuple[SlotRef, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """All blocks of one request that load together; the request wakes when the whole job has been reported."""

    request_id: str
    rid: str
    blocks: tuple[BlockLoad, ...]


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Copy paged block `block_id`, complete after this step's forward pass, into the pool under `block_hash`."""

    block_id: int
    block_hash: bytes
