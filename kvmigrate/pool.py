"""The block pool: KV blocks in shared memory, owned by the node, filled and read by the engine and by transfers.

Promises:
1. A block is found under exactly the hash and rank it was committed with, or not at all.
2. A slot that is granted or leased is not given to anybody else. Grants are bounded for each writer and in total;
   leases end by themselves and are bounded for each peer.
3. A reader that does not know that a block went away can tell (generation, digest: see `layout`).
4. Contents survive whatever happens to the engine, and are dropped when an engine of another fingerprint comes.

How it works: `slot_table` keeps the books, `pool_file` the file; this adds the lock, the clock and the events. Data
is read and written outside of the lock: that is what grants and leases are for. A new fingerprint gets a new file, so
whoever still writes into the old one by a remembered offset can do no harm.

Listeners and callbacks run in any thread, under the lock, in the order of the changes: they must be quick, and must not
wait for another thread that uses the pool.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from . import layout
from .digest import DIGEST_BYTES, block_digest
from .errors import InvariantError, LocalError
from .fingerprint import NO_FINGERPRINT
from .layout import FINGERPRINT_BYTES, HASH_BYTES, FileHeader, Geometry
from .leases import Lease, LeaseBook, quota_of
from .pool_file import PoolFile
from .pool_types import Block, Cleared, Committed, Evicted, PoolEvent, PoolStats, Room, Slot
from .slot_table import SlotTable

#: At most this part of a pool takes memory before it is needed.
_PREPARED_SHARE: Final = 4
_NO_GEOMETRY: Final = Geometry(layout.PAGE_BYTES, 0, 1)


class BlockPool:
    """Fixed slots in one shared-memory file. Thread-safe.

    `capacity_bytes` bounds the file. `clock` gives monotonic seconds. Raises PoolSizeError and PoolOwnedError.
    Holds nothing until `configure` has said what a block is.
    """

    def __init__(self, path: Path, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.on_evict: Callable[[bytes], None] | None = None  #: a readable block went away (its hash)
        self.on_commit: Callable[[bytes], None] | None = None  #: a block became readable (its hash)
        self._clock = clock
        self._lock = threading.RLock()
        self._file_lock = threading.RLock()  # taken before the other one; held while the file is replaced or backed
        self._capacity = capacity_bytes
        layout.plan_geometry(capacity_bytes, layout.PAGE_BYTES, 1)  # refuse nonsense before making a file
        self._file = PoolFile(path, capacity_bytes)
        self._listeners: list[Callable[[PoolEvent], None]] = []
        self._leases = LeaseBook()
        self._counts: Counter[str] = Counter()
        self._header = FileHeader(_NO_GEOMETRY, NO_FINGERPRINT, 0, 0, capacity_bytes)
        self._table = self._new_table()  # of no slots
        self._closed = False

    # -- life ----------------------------------------------------------------------------------------------------

    def configure(self, fingerprint_digest: bytes, block_bytes: int, ranks: int) -> bool:
        """Say what blocks are. True: as before, contents kept. False: contents dropped, epoch raised.

        Raises LocalError for an incomplete fingerprint and PoolSizeError when too few blocks would fit; the pool is
        then as it was. Raises LocalError when a new file cannot be made; the pool is then without blocks.
        """
        if len(fingerprint_digest) != FINGERPRINT_BYTES or fingerprint_digest == NO_FINGERPRINT:
            raise LocalError("an incomplete fingerprint cannot name the contents of a pool")
        with self._file_lock, self._lock:
            self._check_open()
            geometry = layout.plan_geometry(self._capacity, block_bytes, ranks)
            if (geometry, fingerprint_digest) == (self._header.geometry, self._header.fingerprint):
                return True
            gone = self._table.readable()
            epoch = self._header.epoch + 1
            self._header = FileHeader(_NO_GEOMETRY, NO_FINGERPRINT, epoch, 0, self._capacity)
            try:
                self._replace_file(geometry, fingerprint_digest)
            finally:
                self._counts += self._table.counts
                self._counts["recalled"] += self._table.lru.recalled
                self._table = self._new_table()
                self._tell_cleared(gone)
            return False

    def clear(self) -> None:
        """Drop all contents and void all grants; raises the epoch.

        A slot whose grant is void or whose block is leased is reused when its holder is done with it: after `commit`
        (which then says False), `abandon` or `reclaim`, and at the end of the lease.
        """
        with self._lock:
            self._check_open()
            gone = self._table.readable()
            h = self._header
            self._header = FileHeader(h.geometry, h.fingerprint, h.epoch + 1, h.instance, h.capacity)
            if self._file.is_open:
                layout.write_epoch(self._file.bytes, self._header.epoch)
            self._table.remove_all()
            self._table.void_grants()
            self._tell_cleared(gone)

    def close(self) -> None:
        """Remove the file. Idempotent."""
        with self._file_lock, self._lock:
            if not self._closed:
                self._closed = True
                self._file.close()

    # -- writing -------------------------------------------------------------------------------------------------

    def grant(self, n: int, writer: str = "node") -> list[Slot]:
        """Hand out up to `n` slots to write, evicting what was used least. Fewer, or none, when the pool is busy."""
        self._take_memory(min(n, self.grant_limit))
        with self._lock:
            self._check_open()
            self._table.expire(self._clock())
            return self._table.grant(n, writer)

    def prepare(self, nbytes: int) -> bool:
        """Take the memory of one slot ahead of its use, unless `nbytes` of slots are free already.

        False: there is nothing to do now, or no memory left. See `reserve`.
        """
        with self._lock:
            geometry = self._header.geometry
            wanted = min(nbytes // geometry.stride, geometry.slots // _PREPARED_SHARE)
        return self._back_one(wanted, populate=True) is True

    @property
    def grant_limit(self) -> int:
        """Slots that one writer may hold at a time."""
        with self._lock:
            return self._table.grant_limit

    def granted_to(self, writer: str) -> int:
        """Slots that a writer holds now."""
        with self._lock:
            return self._table.granted_to(writer)

    def writable(self, slot: Slot) -> memoryview | None:
        """Return the data of a granted slot, `block_bytes` long; None when the grant is over or void."""
        with self._lock:
            if self._closed or not self._table.holds(slot) or self._table.is_void(slot):
                return None
            return self._data(slot.index)

    def commit(
        self, slot: Slot, block_hash: bytes, rank: int, nbytes: int, digest: bytes, *, writer: str | None = None
    ) -> bool:
        """Publish a written slot. False: the grant was over, void or another writer's, or the block is here already.

        After True or False the slot is no longer the writer's. Raises LocalError for what cannot be a block (sizes,
        rank); the grant stays then.
        """
        if len(block_hash) != HASH_BYTES or len(digest) != DIGEST_BYTES:
            raise LocalError("block hash or digest of a wrong length")
        with self._lock:
            if self._closed or not self._table.holds(slot, writer):
                return False
            geometry = self._header.geometry
            if not 0 <= rank < geometry.ranks or not 0 < nbytes <= geometry.block_bytes:
                raise LocalError(f"block of rank {rank} and {nbytes} bytes does not fit this pool")
            return self._table.commit(slot, block_hash, rank, nbytes, digest)

    def abandon(self, slot: Slot) -> None:
        """Give a granted slot back unwritten; nothing happens when the grant is over."""
        with self._lock:
            if self._table.holds(slot):
                self._table.end_grant(slot.index)

    def reclaim(self, writer: str, slots: Iterable[int] | None = None) -> int:
        """Take back slots of a writer: all when it went away, or those that it names. Returns how many."""
        with self._lock:
            held = self._table.slots_of(writer)
            taken = held if slots is None else [slot for slot in set(slots) if slot in held]
            for slot in taken:
                self._table.end_grant(slot)
            self._counts["reclaimed"] += len(taken)
            return len(taken)

    # -- reading -------------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes], rank: int = 0, *, use: bool = True) -> list[Block]:
        """Return the longest present prefix of a chain; counts as a use of its blocks unless told otherwise."""
        with self._lock:
            found = self._table.prefix(hashes, rank)
            if use:
                self._counts["hits"] += len(found)
                self._counts["misses"] += len(hashes) - len(found)
                self._table.touch([block.block_hash for block in found], use=True)
            return found

    def held(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return which of these blocks are here, on all ranks; no use of them."""
        with self._lock:
            return [self._table.group(block_hash) is not None for block_hash in hashes]

    def touch(self, hashes: Sequence[bytes], *, use: bool = True) -> None:
        """Count a use of the blocks of a chain (those that are here), parents youngest.

        `use=False` only repairs their order, after a chain was stored from its head to its tail.
        """
        with self._lock:
            self._table.touch(hashes, use=use)

    def give_way(self, hashes: Sequence[bytes]) -> None:
        """Evict the blocks of a chain (those that are here) before any other, unless somebody uses them again."""
        with self._lock:
            self._table.give_way(hashes)

    def lease(self, block_hash: bytes, rank: int, until: float, peer: str = "node") -> Lease | None:
        """Hold a block until `until` (monotonic seconds, capped). None: not here, or the peer's quota is used up."""
        with self._lock:
            group = self._table.group(block_hash)
            if self._closed or group is None or rank not in group:
                return None
            now = self._clock()
            self._table.expire(now)
            block = group[rank]
            return self._leases.take(block.index, block.generation, block.nbytes, peer=peer, until=until, now=now)

    def leased(self, lease: Lease) -> tuple[Block, memoryview] | None:
        """Return a leased block and its bytes; None when the lease is over or the block was dropped."""
        with self._lock:
            block = self._table.at(lease.slot)
            if self._closed or block is None or block.generation != lease.generation:
                return None
            if not self._leases.live(lease, self._clock()):
                return None
            return block, self._data(block.index)[: block.nbytes].toreadonly()

    def release(self, lease: Lease) -> None:
        """End a lease; harmless when it is over."""
        with self._lock:
            self._table.release(lease)

    def blocks(self) -> list[Block]:
        """Return the readable blocks of all ranks, the next victim first."""
        with self._lock:
            return [block for h in self._table.readable() for block in (self._table.group(h) or {}).values()]

    def uses(self, hashes: Iterable[bytes]) -> list[int]:
        """Return how often each block was used since it came; 0 for one that is not here."""
        with self._lock:
            return [self._table.lru.uses(block_hash) for block_hash in hashes]

    def room(self, kept: Collection[bytes] = ()) -> Room:
        """Return what could be stored without evicting a block that somebody came back for, or one of `kept`."""
        with self._lock:
            self._table.expire(self._clock())
            return self._table.room(kept) if not self._closed else Room()

    # -- removing ------------------------------------------------------------------------------------------------

    def evict(self, block_hash: bytes) -> bool:
        """Drop a block on all ranks; a leased slot is reused when its lease ends. False when it is not here."""
        with self._lock:
            return not self._closed and self._table.evict(block_hash)

    def check_slots(self, slots: Iterable[int]) -> int:
        """Verify the stored bytes of suspect slots; drop and count the bad ones, return how many were bad."""
        return sum(self._check_slot(slot) for slot in slots)

    # -- looking -------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[PoolEvent], None]) -> None:
        """Hear every change from now on."""
        with self._lock:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[PoolEvent], None]) -> None:
        """Stop hearing; harmless when it was not subscribed."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def header(self) -> FileHeader:
        """Geometry, fingerprint digest, epoch and instance as of now; no slots = not configured."""
        with self._lock:
            return self._header

    def stats(self) -> PoolStats:
        """Return counts and sizes as of now."""
        with self._lock:
            table, c = self._table, self._counts + self._table.counts
            table.expire(self._clock())
            geometry = self._header.geometry
            return PoolStats(
                capacity_bytes=self._capacity,
                epoch=self._header.epoch,
                block_bytes=geometry.block_bytes if geometry.slots else 0,
                ranks=geometry.ranks,
                slots=geometry.slots,
                free=table.free,
                granted=table.granted,
                blocks=len(table.readable()),
                partial=table.partial,
                protected=table.lru.protected,
                recalled=c["recalled"] + table.lru.recalled,
                leases=len(self._leases),
                used_bytes=sum(block.nbytes for block in table.blocks()),
                hits=c["hits"],
                misses=c["misses"],
                commits=c["commits"],
                duplicates=c["duplicates"],
                evictions=c["evictions"],
                corrupt=c["corrupt"],
                reclaimed=c["reclaimed"],
                expired_leases=self._leases.expired,
                refused_leases=self._leases.refused,
            )

    def validate(self) -> None:
        """Check every invariant, headers in shared memory included; InvariantError names the one that is broken."""
        with self._lock:
            self._table.validate()
            if self._closed or not self._header.geometry.slots:
                return
            if layout.unpack_file_header(self._file.bytes) != self._header:
                raise InvariantError("file header and books disagree")
            for slot in range(self._header.geometry.slots):
                head = layout.unpack_slot_header(self._file.bytes, self._header.geometry, slot)
                block = self._table.at(slot)
                if head.valid != (block is not None) or (block is not None and head != block.header()):
                    raise InvariantError(f"slot {slot}: its header and the books disagree")

    # -- inside (the lock is held) -------------------------------------------------------------------------------

    def _new_table(self) -> SlotTable:
        self._leases.clear()
        self._leases.quota_bytes = quota_of(self._header.geometry.total_bytes)
        headers = _FileHeaders(self._file, self._header.geometry)
        return SlotTable(self._header, headers, self._leases, self._tell)

    def _check_open(self) -> None:
        if self._closed:
            raise LocalError("the KV pool is closed")

    def _data(self, slot: int) -> memoryview:
        offset = self._header.geometry.slot_offset(slot)
        return self._file.bytes[offset : offset + self._header.geometry.block_bytes]

    def _take_memory(self, wanted: int) -> None:
        """Back slots that were never used, until `wanted` are free."""
        while self._back_one(wanted, populate=False) is not None:
            pass

    def _back_one(self, wanted: int, *, populate: bool) -> bool | None:
        """Back a slot that was never used, if fewer than `wanted` are free; tells whether there was memory for it.

        The system takes milliseconds for a large slot, so that happens outside of the lock; the file lock keeps the
        file open meanwhile.
        """
        with self._lock:
            if not self._table.lacks_memory(wanted):
                return None  # nobody who needs none waits for a thread that takes some
        with self._file_lock:
            with self._lock:
                slot = None if self._closed else self._table.take_fresh(wanted)
            if slot is None:
                return None
            geometry = self._header.geometry  # changes only under the file lock
            where = geometry.slot_offset(slot), geometry.stride
            success = self._file.back(*where)
            if success and populate:
                self._file.populate(*where)
            with self._lock:
                self._table.backed(slot, success=success)
            return success

    def _replace_file(self, geometry: Geometry, fingerprint: bytes) -> None:
        epoch = self._header.epoch
        if self._file.is_open:
            layout.write_epoch(self._file.bytes, epoch)
            self._file.give_up_memory()
            self._file.close()
        self._file = PoolFile(self.path, self._capacity)
        if not self._file.back(0, geometry.data_offset):
            raise LocalError(f"no memory left for the headers of KV pool {self.path}")
        self._header = FileHeader(geometry, fingerprint, epoch, secrets.randbits(63), self._capacity)
        layout.pack_file_header(self._file.bytes, self._header)

    def _check_slot(self, slot: int) -> bool:
        with self._lock:
            block = self._table.at(slot)
            if block is None or self._closed:
                return False
            data = self._data(slot)[: block.nbytes]
        if block_digest(data) == block.digest:
            return False
        with self._lock:
            if self._closed or self._table.at(slot) != block:
                return False  # evicted meanwhile: what was read were perhaps another block's bytes
            self._table.evict(block.block_hash)
            self._counts["corrupt"] += 1
            return True

    def _tell(self, event: PoolEvent) -> None:
        for listener in self._listeners:
            listener(event)
        if isinstance(event, Committed) and self.on_commit is not None:
            self.on_commit(event.blocks[0].block_hash)
        if isinstance(event, Evicted) and self.on_evict is not None:
            self.on_evict(event.block_hash)

    def _tell_cleared(self, gone: Iterable[bytes]) -> None:
        self._tell(Cleared(self._header.epoch))
        if self.on_evict is not None:
            for block_hash in gone:
                self.on_evict(block_hash)


class _FileHeaders:
    """The table's way to the file; implements `slot_table.Headers`."""

    def __init__(self, file: PoolFile, geometry: Geometry) -> None:
        self._file = file
        self._geometry = geometry

    def unreadable(self, slot: int, generation: int) -> None:
        if self._file.is_open:
            layout.write_generation(self._file.bytes, self._geometry, slot, generation)

    def readable(self, block: Block) -> None:
        layout.write_slot_body(self._file.bytes, self._geometry, block.index, block.header())
        layout.write_generation(self._file.bytes, self._geometry, block.index, block.generation)
