"""Keeps paged blocks from being reused while a worker still copies them into the pool (engines on a GPU only).

Promises:
1. A block that is held has one reference more than its requests have, and loses it exactly once: when the worker of
   every rank has reported the step that it was held for.
2. Saves hold at most a share of the engine's blocks, whatever the copies take: what is beyond is not saved.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvmigrate.connector.metadata import BlockSave

SHARE = 8
"""Saves under way may hold one in so many of the engine's blocks."""


class EngineBlocks(Protocol):
    """What is used of vLLM's block pool (vllm/v1/core/block_pool.py)."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...  # noqa: D102
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...  # noqa: D102


class Pins:
    """The blocks of saves under way, by engine step."""

    def __init__(self, blocks: EngineBlocks, ranks: int) -> None:
        self._blocks = blocks
        self._ranks = ranks
        self._limit = max(1, len(blocks.blocks) // SHARE)
        self._held: dict[int, list[Any]] = {}
        self._missing: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    def hold(self, step: int, saves: list[BlockSave]) -> list[BlockSave]:
        """Hold the blocks of a step's saves; returns the saves that there was room for."""
        kept = saves[: max(0, self._limit - len(self))]
        if kept:
            held = [self._blocks.blocks[save.block_id] for save in kept]
            self._blocks.touch(held)
            self._held[step] = held
            self._missing[step] = self._ranks
        return kept

    def release(self, reports: Mapping[int, int]) -> None:
        """Workers are done with steps: how many of them, by step."""
        for step, workers in reports.items():
            if step not in self._held:
                continue
            self._missing[step] -= workers
            if self._missing[step] <= 0:
                del self._missing[step]
                self._blocks.free_blocks(self._held.pop(step))
