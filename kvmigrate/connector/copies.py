"""How block bytes get from paged memory into pool slots and back: one interface, and its form for memory of the CPU.

Promises, for every form:
1. `save` and `load` return when the bytes are in place, and nothing of them is still under way; also when they raise.
2. Nothing is copied before the work that a fence stands for is done.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

BlockSlot = tuple[int, memoryview]
"""A paged block and the slot bytes that it is copied into, `block_bytes` of them."""


class PagedBlocks(Protocol):
    """Paged memory, block by block (`regions.BlockMemory`)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def parts(self, block_id: int, slot: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal shape: a part of the paged block, and where it lies in the slot."""


class Fence(Protocol):
    """A point in the engine's own work on the device."""

    def synchronize(self) -> None:
        """Wait until the work before it is done."""


class Copies(Protocol):
    """Copies blocks. `fence` is called in the engine's main thread; `save` and `load` in one thread each."""

    @property
    def overlapped(self) -> bool:
        """Saves belong into a thread of their own, and the engine must keep their blocks until they are done."""

    def fence(self) -> Fence | None:
        """Everything that the engine has queued so far; None where that is done already."""

    def save(self, blocks: Sequence[BlockSlot], after: Fence | None) -> None:
        """Copy paged blocks into slots."""

    def load(self, block_id: int, slot: memoryview, after: Fence | None) -> None:
        """Copy a slot into a paged block."""

    def close(self) -> None:
        """Give back what was taken from the system. Idempotent."""


class CpuCopies:
    """Plain copies, done where they are asked for: the forward pass is over by then."""

    overlapped = False

    def __init__(self, memory: PagedBlocks) -> None:
        self._memory = memory

    def fence(self) -> None:
        """Nothing is ever queued on a CPU."""

    def save(self, blocks: Sequence[BlockSlot], after: Fence | None) -> None:
        """Copy paged blocks into slots."""
        for block_id, slot in blocks:
            for paged, part in self._memory.parts(block_id, slot):
                part.copy_(paged)

    def load(self, block_id: int, slot: memoryview, after: Fence | None) -> None:
        """Copy a slot into a paged block."""
        for paged, part in self._memory.parts(block_id, slot):
            paged.copy_(part)

    def close(self) -> None:
        """Nothing was taken."""
