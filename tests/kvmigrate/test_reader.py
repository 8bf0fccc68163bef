from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmigrate.digest import block_digest
from kvmigrate.errors import LocalError, RemoteError
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Block, Slot
from kvmigrate.reader import PoolReader, ReadFault

from .helpers import BLOCK, OTHER_FINGERPRINT, block_hash, chain, content, flip, store

Pools = Callable[..., BlockPool]


def stored(pool: BlockPool, h: bytes) -> Block:
    store(pool, [h])
    return pool.lookup([h], use=False)[0]


def read(reader: PoolReader, b: Block) -> bytes | ReadFault:
    got = bytearray()
    fault = reader.read(b.index, b.generation, b.block_hash, b.rank, got.extend)
    return bytes(got) if fault is None else fault


def test_a_block_is_read_as_it_was_stored(pool: BlockPool) -> None:
    block = stored(pool, block_hash(0))
    reader = PoolReader(pool.path)
    assert read(reader, block) == content(block_hash(0))
    assert reader.header(block.index) == block.header()
    reader.close()
    reader.close()


def test_another_hash_rank_generation_or_slot_is_gone(pool: BlockPool) -> None:
    b = stored(pool, block_hash(0))
    reader = PoolReader(pool.path)
    for slot, generation, h, rank in (
        (b.index, b.generation, block_hash(1), 0),
        (b.index, b.generation, b.block_hash, 1),
        (b.index, b.generation + 2, b.block_hash, 0),
        (b.index + 1, b.generation, b.block_hash, 0),
        (-1, b.generation, b.block_hash, 0),
        (10_000, b.generation, b.block_hash, 0),
    ):
        assert reader.find(slot, generation, h, rank) is ReadFault.GONE


def test_a_flipped_bit_is_noticed_and_nothing_is_delivered(pool: BlockPool) -> None:
    block = stored(pool, block_hash(0))
    flip(pool, block_hash(0))
    assert read(PoolReader(pool.path), block) is ReadFault.CORRUPT


def test_two_readers_notice_that_the_owner_evicted_the_block_while_they_copied(pools: Pools) -> None:
    pool = pools(8)
    block = stored(pool, block_hash(0))
    readers = [PoolReader(pool.path), PoolReader(pool.path)]
    outcomes = []

    def copy_while_the_slot_is_reused(data: memoryview) -> None:
        store(pool, chain(20, "b"))  # evicts the block and reuses its slot
        assert bytes(data) != content(block_hash(0))

    outcomes.append(readers[0].read(block.index, block.generation, block.block_hash, 0, copy_while_the_slot_is_reused))
    outcomes.append(readers[1].read(block.index, block.generation, block.block_hash, 0, bytes))
    assert outcomes == [ReadFault.GONE, ReadFault.GONE]


def test_a_slot_being_rewritten_before_the_header_check_is_gone_not_corrupt(pools: Pools) -> None:
    pool = pools(8)
    block = stored(pool, block_hash(0))
    pool.evict(block_hash(0))
    assert read(PoolReader(pool.path), block) is ReadFault.GONE


def test_clear_voids_all_that_a_reader_remembers_until_it_refreshes(pool: BlockPool) -> None:
    block = stored(pool, block_hash(0))
    reader = PoolReader(pool.path, writable=True)
    pool.clear()
    assert read(reader, block) is ReadFault.GONE
    (slot,) = pool.grant(1)
    assert reader.writable(slot.index, slot.generation) is None
    assert reader.refresh().epoch == pool.header.epoch
    assert reader.writable(slot.index, slot.generation) is not None


def test_a_reader_of_the_file_before_a_new_fingerprint_reads_nothing(pool: BlockPool) -> None:
    block = stored(pool, block_hash(0))
    old = PoolReader(pool.path)
    pool.configure(OTHER_FINGERPRINT, BLOCK, 1)
    assert read(old, block) is ReadFault.GONE
    assert PoolReader(pool.path).file.instance != old.file.instance


def test_only_a_granted_slot_can_be_written(pool: BlockPool) -> None:
    (slot,) = pool.grant(1, "w")
    writer = PoolReader(pool.path, writable=True)
    view = writer.writable(slot.index, slot.generation)
    assert view is not None and len(view) == BLOCK
    view[:] = content(block_hash(0))
    pool.commit(slot, block_hash(0), 0, BLOCK, block_digest(view))
    assert writer.writable(slot.index, slot.generation) is None
    assert writer.writable(slot.index, slot.generation + 1) is None  # even: a block is in it
    assert read(writer, pool.lookup(chain(1))[0]) == content(block_hash(0))
    with pytest.raises(LocalError, match="read-only"):
        PoolReader(pool.path).writable(slot.index, slot.generation)
    with pytest.raises(TypeError):
        PoolReader(pool.path).view(slot.index)[0] = 1


def test_what_is_no_pool_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot open"):
        PoolReader(tmp_path / "none")
    for name, data in (("short", b"x"), ("foreign", bytes(8192))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RemoteError):
            PoolReader(tmp_path / name)


WRITER = """
import sys
from kvmigrate.digest import block_digest
from kvmigrate.reader import PoolReader
from tests.kvmigrate.helpers import block_hash, content
path, slot, generation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
reader = PoolReader(path, writable=True)
got = bytearray()
assert reader.read(int(sys.argv[4]), int(sys.argv[5]), block_hash(0), 0, got.extend) is None
assert bytes(got) == content(block_hash(0))
view = reader.writable(slot, generation)
view[:] = content(block_hash(1))
print(block_digest(view).hex())
"""


def test_two_processes_share_the_file(pool: BlockPool) -> None:
    block = stored(pool, block_hash(0))
    (slot,) = pool.grant(1, "engine")
    arguments = [str(n) for n in (pool.path, slot.index, slot.generation, block.index, block.generation)]
    done = subprocess.run(
        [sys.executable, "-c", WRITER, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert pool.commit(Slot(slot.index, slot.generation), block_hash(1), 0, BLOCK, bytes.fromhex(done.stdout.strip()))
    lease = pool.lease(block_hash(1), 0, 1e9)
    assert lease is not None
    assert bytes((pool.leased(lease) or pytest.fail("void"))[1]) == content(block_hash(1))
    pool.release(lease)
