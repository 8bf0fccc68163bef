"""What the block pool hands out: slots, blocks, events, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .layout import SlotHeader


@dataclass(frozen=True, slots=True)
class Slot:
    """A granted slot; the (odd) generation tells this grant from every other grant of the same slot."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Block:
    """A stored block of one rank and where it is. The generation is even."""

    index: int
    generation: int
    block_hash: bytes
    rank: int
    nbytes: int
    digest: bytes

    def header(self) -> SlotHeader:
        """Return the block's slot header."""
        return SlotHeader(self.generation, self.block_hash, self.rank, self.nbytes, self.digest)


class Room(NamedTuple):
    """Places for blocks: free ones, and those of blocks that nobody came back for."""

    free: int = 0
    cold: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """A block became readable; one entry for each rank."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """A readable block went away, on all ranks."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks went away and all grants are void; geometry and fingerprint may have changed."""

    epoch: int


PoolEvent = Committed | Evicted | Cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Sizes in bytes; counters run since the pool was made and survive `clear`."""

    capacity_bytes: int
    epoch: int
    block_bytes: int  #: of one rank; 0 = not configured
    ranks: int
    slots: int
    free: int
    granted: int
    blocks: int  #: readable: present on all ranks
    partial: int  #: present on some ranks
    protected: int  #: used more than once
    recalled: int  #: stored again soon after they were evicted, and protected for it
    leases: int
    used_bytes: int
    hits: int  #: blocks found by lookup
    misses: int  #: blocks asked for and not found
    commits: int
    duplicates: int
    evictions: int
    corrupt: int  #: stored blocks whose bytes had changed
    reclaimed: int  #: grants taken back from writers that went away
    expired_leases: int
    refused_leases: int  #: over the peer's quota of bytes
