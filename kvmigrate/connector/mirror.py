"""The scheduler half's copy of the pool's index.

Promise: a lookup never waits and never touches a socket. The node streams `add` and `drop`; the mirror may lag behind
the pool, so what it says is a hint: the worker checks generation, hash and digest in the slot before it trusts a byte.
"""

from collections.abc import Iterable, Sequence

from kvmigrate.connector.metadata import SlotRef

MirrorItem = tuple[bytes, int, int, int]
"""(block hash, rank, slot, generation) as the node's `add` message carries it."""


class PoolMirror:
    """Block hash -> slots of all ranks. Its size is bounded by the pool's slot count."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._slots: dict[bytes, dict[int, SlotRef]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, items: Iterable[MirrorItem]) -> None:
        """Learn slots; a later item for the same (hash, rank) replaces the earlier one."""
        for block_hash, rank, slot, generation in items:
            self._slots.setdefault(block_hash, {})[rank] = SlotRef(rank, slot, generation)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Forget blocks that the pool evicted; unknown ones are ignored."""
        for block_hash in hashes:
            self._slots.pop(block_hash, None)

    def clear(self) -> None:
        """Forget everything: the pool was cleared or its node went away."""
        self._slots.clear()

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether every rank's shard of the block is in the pool; a block with a missing shard is no block."""
        return len(self._slots.get(block_hash, ())) == self._ranks

    def slots(self, block_hash: bytes) -> tuple[SlotRef, ...]:
        """The slots of a block, one per rank; none when the mirror does not hold it (a load from nowhere fails)."""
        return tuple(self._slots.get(block_hash, {}).values())

    def prefix(self, hashes: Sequence[bytes], start: int, stop: int) -> int:
        """How many blocks from `start` (at most up to `stop`) are held without a gap."""
        count = 0
        while start + count < stop and hashes[start + count] in self:
            count += 1
        return count
