"""The pool against a model that is obviously right: dictionaries, and the contents that each block must have.

Invariant: whatever the order of operations, a block that is found has exactly its own bytes, a leased one stays, and
nobody gets a slot that another one holds.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvmigrate.digest import block_digest
from kvmigrate.leases import Lease
from kvmigrate.pool_types import Block, Cleared, Committed, Evicted, PoolEvent, Slot
from kvmigrate.reader import PoolReader

from .helpers import FINGERPRINT, OTHER_FINGERPRINT, Clock, block_hash, content, make_pool

SMALL = 4096
HASHES = st.integers(0, 30)
WRITERS = st.sampled_from(["w0", "w1", "w2"])


class PoolMachine(RuleBasedStateMachine):
    grants = Bundle("grants")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvpool"))
        self.clock = Clock()
        self.pool = make_pool(self.directory, 12, block=SMALL, ranks=2, clock=self.clock)
        self.pool.subscribe(self._hear)
        self.mirror: dict[bytes, tuple[Block, ...]] = {}  # as a scheduler would keep it, from events alone
        self.granted: dict[int, tuple[Slot, str]] = {}
        self.fingerprint = FINGERPRINT

    def _hear(self, event: PoolEvent) -> None:
        match event:
            case Committed():
                assert event.blocks[0].block_hash not in self.mirror
                self.mirror[event.blocks[0].block_hash] = event.blocks
            case Evicted():
                del self.mirror[event.block_hash]
            case Cleared():
                self.mirror.clear()

    @rule(target=grants, writer=WRITERS, n=st.integers(1, 4))
    def grant(self, writer: str, n: int) -> list[tuple[Slot, str]]:
        slots = self.pool.grant(n, writer)
        for slot in slots:
            assert slot.index not in self.granted, "granted twice"
            self.granted[slot.index] = (slot, writer)
        return [(slot, writer) for slot in slots]

    @rule(granted=consumes(grants), n=HASHES, rank=st.integers(0, 1))
    def write_and_commit(self, granted: list[tuple[Slot, str]], n: int, rank: int) -> None:
        for step, (slot, writer) in enumerate(granted):
            h = block_hash(n + step)
            data = content(h, rank, SMALL)
            view = self.pool.writable(slot)
            if view is not None:
                view[:] = data
            stored = self.pool.commit(slot, h, rank, SMALL, block_digest(data), writer=writer)
            assert not stored or (view is not None and self.granted[slot.index][0] == slot)
            self._done(slot)

    @rule(granted=consumes(grants))
    def abandon(self, granted: list[tuple[Slot, str]]) -> None:
        for slot, _ in granted:
            self.pool.abandon(slot)
            self._done(slot)

    @rule(writer=WRITERS)
    def vanish(self, writer: str) -> None:
        self.pool.reclaim(writer)
        self.granted = {index: held for index, held in self.granted.items() if held[1] != writer}

    @rule(n=HASHES, length=st.integers(1, 6), use=st.booleans())
    def lookup(self, n: int, length: int, use: bool) -> None:
        hashes = [block_hash(n + i) for i in range(length)]
        expected = next((i for i, h in enumerate(hashes) if h not in self.mirror), length)
        for rank in (0, 1):
            found = self.pool.lookup(hashes, rank, use=use)
            assert [b.block_hash for b in found] == hashes[:expected]
            assert all(b.rank == rank for b in found)

    @rule(n=HASHES, length=st.integers(1, 6))
    def give_way(self, n: int, length: int) -> None:
        self.pool.give_way([block_hash(n + i) for i in range(length)])

    @rule(target=leases, n=HASHES, rank=st.integers(0, 1), seconds=st.integers(1, 50))
    def lease(self, n: int, rank: int, seconds: int) -> tuple[Lease | None, bytes, int]:
        lease = self.pool.lease(block_hash(n), rank, self.clock.now + seconds, "peer")
        assert (lease is not None) == (block_hash(n) in self.mirror)
        return lease, block_hash(n), rank

    @rule(held=leases)
    def read_leased(self, held: tuple[Lease | None, bytes, int]) -> None:
        lease, h, rank = held
        found = self.pool.leased(lease) if lease is not None else None
        if found is not None:
            assert lease is not None and self.clock.now < lease.until
            assert bytes(found[1]) == content(h, rank, SMALL)

    @rule(held=consumes(leases))
    def release(self, held: tuple[Lease | None, bytes, int]) -> None:
        if held[0] is not None:
            self.pool.release(held[0])

    @rule(n=HASHES)
    def evict(self, n: int) -> None:
        self.pool.evict(block_hash(n))

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @rule(other=st.booleans())
    def engine_restarts(self, other: bool) -> None:
        before = dict(self.mirror)
        fingerprint = OTHER_FINGERPRINT if other else FINGERPRINT
        kept = self.pool.configure(fingerprint, SMALL, 2)
        assert kept == (fingerprint == self.fingerprint)
        if kept:
            assert self.mirror == before
        else:
            assert not self.mirror
            self.granted.clear()
        self.fingerprint = fingerprint

    @invariant()
    def books_are_right(self) -> None:
        self.pool.validate()
        assert {b.block_hash for b in self.pool.blocks()} == set(self.mirror)
        assert self.pool.stats().granted == len(self.granted)

    @invariant()
    def another_process_reads_exactly_what_the_mirror_says(self) -> None:
        reader = PoolReader(self.pool.path)
        for blocks in self.mirror.values():
            for b in blocks:
                data = reader.find(b.index, b.generation, b.block_hash, b.rank)
                assert isinstance(data, memoryview) and bytes(data) == content(b.block_hash, b.rank, SMALL)
        data = None
        reader.close()

    def teardown(self) -> None:
        self.pool.close()
        shutil.rmtree(self.directory)

    def _done(self, slot: Slot) -> None:
        held = self.granted.get(slot.index)
        if held is not None and held[0] == slot:
            del self.granted[slot.index]


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
