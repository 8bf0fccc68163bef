"""The books of a pool: which slot is free, granted, stored or held, and what goes next. No lock, clock or I/O.

Rules:
1. A slot is in exactly one place: fresh (its memory was never taken), being backed with memory, free, granted, stored,
   held (its block is gone but a lease is not) or lost (the system had no memory for it).
2. Blocks are grouped by hash, one for each rank. A group is readable when every rank is there; it is evicted whole.
3. A void grant (its contents were dropped by `clear`) is still the writer's until the writer is done with it, so the
   slot is not written by two.
4. Every change of what can be read is written to the slot's header before the change is told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from .errors import InvariantError
from .layout import FileHeader
from .leases import Lease, LeaseBook
from .lru import SegmentedLru
from .pool_types import Block, Committed, Evicted, PoolEvent, Room, Slot

#: One writer may hold this part of the slots, all writers together twice that part.
GRANT_SHARE: Final = 4
_EPOCH_SHIFT: Final = 32  # 2 billion grants between two epochs


class Headers(Protocol):
    """The slot headers in the pool's file."""

    def unreadable(self, slot: int, generation: int) -> None:
        """Write an odd generation."""

    def readable(self, block: Block) -> None:
        """Write a block's header, its generation last."""


@dataclass(slots=True)
class _Granted:
    generation: int
    writer: str
    void: bool = False


class SlotTable:
    """Books over the slots of one file. `tell` hears what became readable and what no longer is."""

    def __init__(
        self, header: FileHeader, headers: Headers, leases: LeaseBook, tell: Callable[[PoolEvent], None]
    ) -> None:
        self.slots = header.geometry.slots
        self.ranks = header.geometry.ranks
        self.leases = leases
        self.counts: Counter[str] = Counter()
        self._headers = headers
        self._tell = tell
        # Odd; a grant takes the next odd number, its commit the even one above it. It starts with the epoch, so that
        # a late commit or lease of the file before this one cannot name anything here.
        self._generation = header.epoch << _EPOCH_SHIFT | 1
        self._fresh = self.slots  # the last slots of the file
        self._backing: set[int] = set()
        self._free: deque[int] = deque()
        self._granted: dict[int, _Granted] = {}
        self._by_writer: Counter[str] = Counter()
        self._groups: dict[bytes, dict[int, Block]] = {}
        self._by_slot: dict[int, Block] = {}
        self._held: set[int] = set()
        self._lost: set[int] = set()
        self.lru = SegmentedLru(max(1, self.slots // self.ranks))

    # -- grants --------------------------------------------------------------------------------------------------

    @property
    def grant_limit(self) -> int:
        """Slots that one writer may hold at a time."""
        return max(1, self.slots // GRANT_SHARE) if self.slots else 0

    @property
    def granted(self) -> int:
        """Slots that are granted now."""
        return len(self._granted)

    def lacks_memory(self, wanted: int) -> bool:
        """Whether fewer than `wanted` slots are free and there are some that never had memory."""
        return self._fresh > 0 and len(self._free) < wanted

    def take_fresh(self, wanted: int) -> int | None:
        """Return a slot to back with memory if fewer than `wanted` are free; None when there is no need or no slot."""
        if not self.lacks_memory(wanted):
            return None
        slot = self.slots - self._fresh
        self._fresh -= 1
        self._backing.add(slot)
        return slot

    def backed(self, slot: int, *, success: bool) -> None:
        """A slot has its memory now, or there is none for it."""
        self._backing.discard(slot)
        if success:
            self._free.append(slot)
        else:
            self._lost.add(slot)

    def granted_to(self, writer: str) -> int:
        """Slots that a writer holds now."""
        return self._by_writer[writer]

    def grant(self, n: int, writer: str) -> list[Slot]:
        """Hand out up to `n` slots, evicting as needed."""
        room = min(n, self.grant_limit - self._by_writer[writer], 2 * self.grant_limit - self.granted)
        granted = []
        for _ in range(room):
            slot = self._take_slot()
            if slot is None:
                break
            self._generation += 2
            self._headers.unreadable(slot, self._generation)
            self._granted[slot] = _Granted(self._generation, writer)
            self._by_writer[writer] += 1
            granted.append(Slot(slot, self._generation))
        return granted

    def holds(self, slot: Slot, writer: str | None = None) -> bool:
        """Whether a grant is out, void or not, to this writer (None: to anybody)."""
        granted = self._granted.get(slot.index)
        if granted is None or granted.generation != slot.generation:
            return False
        return writer is None or granted.writer == writer

    def is_void(self, slot: Slot) -> bool:
        """Whether an outstanding grant is void."""
        return self._granted[slot.index].void

    def commit(self, slot: Slot, block_hash: bytes, rank: int, nbytes: int, digest: bytes) -> bool:
        """End a grant by storing a block; False when it is void or the block is here already: the slot is free."""
        if self._granted[slot.index].void:
            self.end_grant(slot.index)
            return False
        if rank in self._groups.get(block_hash, ()):
            self.end_grant(slot.index)
            self.counts["duplicates"] += 1
            return False
        self._ungrant(slot.index)
        block = Block(slot.index, slot.generation + 1, block_hash, rank, nbytes, digest)
        self._headers.readable(block)
        self._by_slot[block.index] = block
        group = self._groups.setdefault(block_hash, {})
        if not group:
            self.lru.add(block_hash)
        group[rank] = block
        self.counts["commits"] += 1
        if len(group) == self.ranks:
            self._tell(Committed(tuple(group.values())))
        return True

    def end_grant(self, slot: int) -> None:
        """Free a granted slot. It goes to the far end of the queue: a writer that does not know yet has time."""
        self._ungrant(slot)
        self._free.append(slot)

    def void_grants(self) -> None:
        """Void all grants."""
        for granted in self._granted.values():
            granted.void = True

    def slots_of(self, writer: str) -> list[int]:
        """Slots granted to a writer."""
        return [slot for slot, granted in self._granted.items() if granted.writer == writer]

    # -- blocks --------------------------------------------------------------------------------------------------

    def group(self, block_hash: bytes) -> dict[int, Block] | None:
        """Return a readable block by rank; None when a rank is missing."""
        group = self._groups.get(block_hash)
        return group if group is not None and len(group) == self.ranks else None

    def prefix(self, hashes: Sequence[bytes], rank: int) -> list[Block]:
        """Return a rank's blocks of the longest readable prefix of a chain."""
        found: list[Block] = []
        for block_hash in hashes:
            group = self._groups.get(block_hash)
            if group is None or len(group) < self.ranks or rank not in group:
                break
            found.append(group[rank])
        return found

    def at(self, slot: int) -> Block | None:
        """Return the block stored in a slot."""
        return self._by_slot.get(slot)

    def readable(self) -> list[bytes]:
        """Hashes of the readable blocks, the next victim first."""
        return [block_hash for block_hash in self.lru if len(self._groups[block_hash]) == self.ranks]

    def blocks(self) -> Iterable[Block]:
        """All stored blocks, of incomplete groups too."""
        return self._by_slot.values()

    def touch(self, hashes: Sequence[bytes], *, use: bool) -> None:
        """Make the blocks of a chain the youngest, the head youngest of all; count it as a use or not."""
        step = self.lru.use if use else self.lru.refresh
        for block_hash in reversed(hashes):
            if block_hash in self._groups:
                step(block_hash)

    def give_way(self, hashes: Sequence[bytes]) -> None:
        """Make the blocks of a chain the next victims, its tail first."""
        for block_hash in hashes:
            if block_hash in self._groups:
                self.lru.give_way(block_hash)

    def evict(self, block_hash: bytes) -> bool:
        """Drop a block on all ranks; False when it is not here."""
        if block_hash not in self._groups:
            return False
        readable = self.group(block_hash) is not None
        self.remove(block_hash)
        self.counts["evictions"] += 1
        if readable:
            self._tell(Evicted(block_hash))
        return True

    def remove(self, block_hash: bytes) -> None:
        """Drop a block without telling."""
        self.lru.remove(block_hash)
        for block in self._groups.pop(block_hash).values():
            del self._by_slot[block.index]
            self._headers.unreadable(block.index, block.generation + 1)
            if block.index in self.leases:
                self._held.add(block.index)
            else:
                self._free.append(block.index)

    def remove_all(self) -> None:
        """Drop all blocks without telling."""
        for block_hash in list(self._groups):
            self.remove(block_hash)

    # -- leases --------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End the leases that are over."""
        for slot in self.leases.expire(now):
            self._unhold(slot)

    def release(self, lease: Lease) -> None:
        """End a lease; harmless when it is over."""
        if self.leases.give_back(lease):
            self._unhold(lease.slot)

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Slots that can be granted without evicting."""
        return len(self._free) + self._fresh + len(self._backing)

    def room(self, kept: Collection[bytes]) -> Room:
        """Blocks that fit into free slots, and into those that would be evicted first: what is leased is not."""
        cold = self.lru.unproven - sum(map(self.lru.is_unproven, kept)) - len(self.leases)
        return Room(self.free // self.ranks, max(0, cold))

    @property
    def partial(self) -> int:
        """Blocks that are not here on all ranks."""
        return sum(len(group) < self.ranks for group in self._groups.values())

    def validate(self) -> None:
        """Check the rules at the top; InvariantError names the one that is broken."""
        self.leases.validate()
        self.lru.validate(self._groups)
        stored = {b.index: b for group in self._groups.values() for b in group.values()}
        if stored != self._by_slot:
            raise InvariantError("slots and groups disagree")
        if any((b.block_hash, b.rank) != (h, r) for h, g in self._groups.items() for r, b in g.items()):
            raise InvariantError("a block is in the wrong group")
        fresh = set(range(self.slots - self._fresh, self.slots))
        places = [set(self._free), set(self._granted), set(stored), self._held, self._lost, self._backing, fresh]
        if sum(map(len, places)) != self.slots or len(set().union(*places)) != self.slots:
            raise InvariantError("a slot is in two places or in none")
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a slot is free twice")
        if Counter(g.writer for g in self._granted.values()) != +self._by_writer:
            raise InvariantError("grant counts by writer are wrong")
        if any(slot not in self.leases for slot in self._held):
            raise InvariantError("a slot is held without a lease")

    # -- inside --------------------------------------------------------------------------------------------------

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.popleft()
        victim = self.lru.victim(_Leased(self._groups, self.leases))
        if victim is None:
            return None
        self.evict(victim)
        self.lru.give_up(victim)
        return self._free.popleft()

    def _ungrant(self, slot: int) -> None:
        writer = self._granted.pop(slot).writer
        self._by_writer[writer] -= 1
        if not self._by_writer[writer]:
            del self._by_writer[writer]

    def _unhold(self, slot: int) -> None:
        if slot in self._held and slot not in self.leases:
            self._held.discard(slot)
            self._free.append(slot)


class _Leased(Container[bytes]):
    """The hashes that cannot be evicted: one of their slots is leased."""

    def __init__(self, groups: dict[bytes, dict[int, Block]], leases: LeaseBook) -> None:
        self._groups = groups
        self._leases = leases

    def __contains__(self, block_hash: object) -> bool:
        if not self._leases or not isinstance(block_hash, bytes):
            return False
        return any(block.index in self._leases for block in self._groups[block_hash].values())
