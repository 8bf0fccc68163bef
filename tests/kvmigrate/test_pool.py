from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvmigrate import layout
from kvmigrate.digest import block_digest
from kvmigrate.errors import InvariantError, LocalError, PoolSizeError
from kvmigrate.fingerprint import NO_FINGERPRINT
from kvmigrate.leases import PEER_SHARE, LeaseBook
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Cleared, Committed, Evicted, PoolEvent, Slot

from .helpers import BLOCK, FINGERPRINT, OTHER_FINGERPRINT, Clock, block_hash, chain, content, flip, make_pool, store

Pools = Callable[..., BlockPool]


def present(pool: BlockPool, hashes: list[bytes]) -> int:
    return len(pool.lookup(hashes, use=False))


def test_a_stored_block_is_found_and_has_its_bytes(pool: BlockPool) -> None:
    assert store(pool, chain(3)) == 3
    found = pool.lookup(chain(5))
    assert [b.block_hash for b in found] == chain(3)
    lease = pool.lease(block_hash(1), 0, 1e9)
    assert lease is not None
    block, data = pool.leased(lease) or pytest.fail("lease is void")
    assert bytes(data) == content(block_hash(1)) and block_digest(data) == block.digest
    assert data.readonly
    pool.release(lease)


def test_lookup_stops_at_the_first_missing_block(pool: BlockPool) -> None:
    store(pool, [block_hash(0), block_hash(2)])
    assert present(pool, chain(3)) == 1
    assert pool.lookup(chain(3)) and pool.stats().hits == 1 and pool.stats().misses == 2


def test_a_second_commit_of_a_block_is_refused_and_its_slot_is_free_again(pool: BlockPool) -> None:
    store(pool, chain(1))
    free = pool.stats().free
    assert store(pool, chain(1)) == 0
    assert pool.stats().free == free and pool.stats().duplicates == 1


def test_a_grant_is_good_for_one_commit_and_only_with_its_generation(pool: BlockPool) -> None:
    (slot,) = pool.grant(1)
    data = content(block_hash(0))
    wrong = Slot(slot.index, slot.generation + 2)
    assert not pool.commit(wrong, block_hash(0), 0, BLOCK, block_digest(data))
    assert not pool.commit(slot, block_hash(0), 0, BLOCK, block_digest(data), writer="somebody else")
    assert pool.commit(slot, block_hash(0), 0, BLOCK, block_digest(data))
    assert not pool.commit(slot, block_hash(1), 0, BLOCK, block_digest(data))
    assert pool.writable(slot) is None


def test_what_cannot_be_a_block_is_refused_and_the_grant_stays(pool: BlockPool) -> None:
    (slot,) = pool.grant(1)
    for rank, nbytes in ((1, BLOCK), (0, BLOCK + 1), (0, 0), (-1, BLOCK)):
        with pytest.raises(LocalError):
            pool.commit(slot, block_hash(0), rank, nbytes, bytes(16))
    with pytest.raises(LocalError):
        pool.commit(slot, b"short", 0, BLOCK, bytes(16))
    assert pool.stats().granted == 1
    pool.abandon(slot)
    assert pool.stats().granted == 0


def test_one_writer_cannot_take_all_slots_and_all_writers_together_only_half(pools: Pools) -> None:
    pool = pools(32)
    limit = pool.grant_limit
    assert [len(pool.grant(1000, name)) for name in "abc"] == [limit, limit, 0]
    assert pool.reclaim("a") == limit
    assert len(pool.grant(1000, "c")) == limit
    assert pool.stats().reclaimed == limit


def test_a_vanished_writers_slots_are_reclaimed_and_its_late_commit_is_void(pool: BlockPool) -> None:
    (slot,) = pool.grant(1, "w")
    pool.reclaim("w")
    assert pool.stats().granted == 0
    assert not pool.commit(slot, block_hash(0), 0, BLOCK, bytes(16))


def test_a_full_pool_evicts_the_deepest_blocks_of_a_chain_first(pools: Pools) -> None:
    pool = pools(16)
    store(pool, chain(16))
    pool.touch(chain(16), use=False)
    store(pool, chain(6, "b"))
    assert present(pool, chain(16)) == 10
    assert pool.stats().evictions == 6


def test_a_scan_of_one_off_prompts_leaves_the_hot_prefix(pools: Pools) -> None:
    pool = pools(32)
    store(pool, chain(8, "hot"))
    pool.touch(chain(8, "hot"))
    pool.touch(chain(8, "hot"))
    for n in range(40):
        store(pool, chain(8, f"once {n}"))
        pool.touch(chain(8, f"once {n}"))
    assert present(pool, chain(8, "hot")) == 8


def test_leased_blocks_are_not_evicted_and_are_when_the_lease_is_over(pools: Pools, clock: Clock) -> None:
    pool = pools(16)
    store(pool, chain(16))
    lease = pool.lease(block_hash(0), 0, clock.now + 10)
    assert lease is not None
    store(pool, chain(30, "b"))
    assert present(pool, chain(1)) == 1
    clock.now += 10
    assert pool.leased(lease) is None
    store(pool, chain(30, "c"))
    assert present(pool, chain(1)) == 0
    assert pool.stats().expired_leases == 1 and pool.stats().leases == 0
    pool.release(lease)  # too late, and harmless


def test_a_lease_is_capped_in_time_and_in_bytes_for_each_peer(pools: Pools, clock: Clock) -> None:
    pool = pools(80)
    store(pool, chain(80))
    leases = [pool.lease(h, 0, clock.now + 1e9, "greedy") for h in chain(80)]
    held = sum(lease is not None for lease in leases)
    assert held == pool.header.geometry.total_bytes // PEER_SHARE // BLOCK
    assert pool.stats().refused_leases == 80 - held
    assert pool.lease(block_hash(70), 0, clock.now + 1, "modest") is not None
    clock.now += 60
    assert pool.stats().leases == 0


def test_a_block_larger_than_the_quota_can_be_held_alone() -> None:
    book = LeaseBook(quota_bytes=100)
    first = book.take(1, 2, 500, peer="p", until=9, now=0)
    assert first is not None
    assert book.take(2, 2, 1, peer="p", until=9, now=0) is None
    assert book.take(2, 2, 1, peer="q", until=9, now=0) is not None
    book.give_back(first)
    assert book.take(2, 2, 1, peer="p", until=9, now=0) is not None
    book.validate()


def test_a_slot_under_lease_is_not_reused_after_its_block_was_dropped(pools: Pools) -> None:
    pool = pools(16)
    store(pool, chain(16))
    lease = pool.lease(block_hash(3), 0, 1e9)
    assert lease is not None
    pool.evict(block_hash(3))
    assert present(pool, [block_hash(3)]) == 0 and pool.leased(lease) is None
    slots = {slot.index for name in "ab" for slot in pool.grant(100, name)}
    assert lease.slot not in slots
    pool.reclaim("a")
    pool.release(lease)
    pool.release(lease)
    pool.validate()


def test_clear_drops_everything_and_voids_grants_until_their_writers_are_done(pools: Pools) -> None:
    pool = pools(16)
    store(pool, chain(4))
    (slot,) = pool.grant(1, "w")
    epoch = pool.header.epoch
    pool.clear()
    assert present(pool, chain(4)) == 0 and pool.header.epoch == epoch + 1
    assert pool.writable(slot) is None
    assert pool.stats().granted == 1  # its writer may still be at it
    assert not pool.commit(slot, block_hash(9), 0, BLOCK, bytes(16))
    assert pool.stats().granted == 0 and present(pool, [block_hash(9)]) == 0


def test_the_same_fingerprint_keeps_the_contents_and_another_one_drops_them(pool: BlockPool) -> None:
    store(pool, chain(3))
    assert pool.configure(FINGERPRINT, BLOCK, 1)
    assert present(pool, chain(3)) == 3
    assert not pool.configure(OTHER_FINGERPRINT, BLOCK, 1)
    assert present(pool, chain(3)) == 0
    assert not pool.configure(OTHER_FINGERPRINT, BLOCK // 2, 1)
    assert pool.header.geometry.block_bytes == BLOCK // 2
    assert store(pool, chain(3)) == 3


def test_grants_and_leases_of_the_engine_before_name_nothing_in_the_new_file(pool: BlockPool) -> None:
    store(pool, chain(1))
    lease = pool.lease(block_hash(0), 0, 1e9)
    (old,) = pool.grant(1)
    assert lease is not None
    pool.configure(OTHER_FINGERPRINT, BLOCK, 1)
    store(pool, chain(1))
    (new,) = pool.grant(1)
    assert new.index == old.index
    assert pool.writable(old) is None and not pool.commit(old, block_hash(5), 0, BLOCK, bytes(16))
    assert pool.lease(block_hash(0), 0, 1e9) is not None
    assert pool.leased(lease) is None
    pool.release(lease)
    assert pool.stats().leases == 1 and pool.stats().granted == 1


def test_an_incomplete_fingerprint_cannot_name_the_contents(pool: BlockPool) -> None:
    store(pool, chain(1))
    with pytest.raises(LocalError, match="incomplete"):
        pool.configure(NO_FINGERPRINT, BLOCK, 1)
    assert present(pool, chain(1)) == 1


def test_blocks_too_large_for_the_pool_are_refused_and_it_stays_as_it_was(pool: BlockPool) -> None:
    store(pool, chain(1))
    with pytest.raises(PoolSizeError):
        pool.configure(OTHER_FINGERPRINT, 1 << 20, 1)
    assert present(pool, chain(1)) == 1


def test_a_block_is_visible_only_when_every_rank_is_there(pools: Pools) -> None:
    pool = pools(16, ranks=2)
    events: list[PoolEvent] = []
    pool.subscribe(events.append)
    (slot,) = pool.grant(1)
    pool.commit(slot, block_hash(0), 0, BLOCK, block_digest(content(block_hash(0), 0)))
    assert present(pool, chain(1)) == 0 and not events and pool.stats().partial == 1
    assert pool.lease(block_hash(0), 0, 1e9) is None
    (slot,) = pool.grant(1)
    pool.commit(slot, block_hash(0), 1, BLOCK, block_digest(content(block_hash(0), 1)))
    assert [b.rank for rank in (0, 1) for b in pool.lookup(chain(1), rank)] == [0, 1]
    assert len(events) == 1 and isinstance(events[0], Committed) and len(events[0].blocks) == 2


def test_all_changes_are_told_in_order(pools: Pools) -> None:
    pool = pools(16)
    events: list[PoolEvent] = []
    told: list[tuple[str, bytes]] = []
    pool.subscribe(events.append)
    pool.on_commit = lambda h: told.append(("commit", h))
    pool.on_evict = lambda h: told.append(("evict", h))
    store(pool, chain(2))
    pool.evict(block_hash(0))
    pool.clear()
    pool.unsubscribe(events.append)
    assert [type(e) for e in events[:4]] == [Committed, Committed, Evicted, Cleared]
    assert told == [
        ("commit", block_hash(0)),
        ("commit", block_hash(1)),
        ("evict", block_hash(0)),
        ("evict", block_hash(1)),
    ]


def test_a_flipped_bit_in_a_suspect_slot_is_found_counted_and_dropped(pool: BlockPool) -> None:
    store(pool, chain(3))
    slots = [b.index for b in pool.lookup(chain(3))]
    assert pool.check_slots([*slots, 31, 10_000]) == 0
    flip(pool, block_hash(1))
    assert pool.check_slots(slots) == 1
    assert present(pool, chain(3)) == 1 and pool.stats().corrupt == 1


def test_validate_notices_a_header_that_somebody_else_wrote(pool: BlockPool) -> None:
    store(pool, chain(1))
    block = pool.lookup(chain(1))[0]
    offset = pool.header.geometry.header_offset(block.index)
    with pool.path.open("r+b") as file:
        file.seek(offset + 8)
        file.write(b"\xff")
    with pytest.raises(InvariantError):
        pool.validate()
    pool.evict(block_hash(0))


def test_generations_are_odd_while_free_or_granted_and_never_come_twice(pools: Pools) -> None:
    pool = pools(8)
    seen: set[int] = set()
    view = memoryview(bytearray(pool.path.read_bytes()))
    for n in range(30):
        store(pool, chain(1, str(n)))
        block = pool.lookup(chain(1, str(n)))[0]
        assert block.generation % 2 == 0 and block.generation not in seen
        seen.add(block.generation)
    pool.evict(block.block_hash)
    view = memoryview(bytearray(pool.path.read_bytes()))
    assert layout.read_generation(view, pool.header.geometry, block.index) % 2 == 1


def test_a_closed_pool_refuses_politely(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    store(pool, chain(2))
    (slot,) = pool.grant(1)
    lease = pool.lease(block_hash(0), 0, 1e9)
    assert lease is not None
    pool.close()
    pool.close()
    assert not pool.path.exists()
    assert pool.writable(slot) is None and pool.leased(lease) is None
    assert not pool.commit(slot, block_hash(5), 0, BLOCK, bytes(16))
    assert not pool.evict(block_hash(0)) and pool.check_slots([0]) == 0
    pool.abandon(slot)
    pool.release(lease)
    with pytest.raises(LocalError, match="closed"):
        pool.grant(1)
