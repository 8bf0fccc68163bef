"""Blocks on disk between two lives of a node: all or less comes back, never anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmigrate import spill, spill_file
from kvmigrate.errors import KvError, LocalError, RemoteError
from kvmigrate.messages import Chain, Label
from kvmigrate.pool import BlockPool
from kvmigrate.spill import Spilled

from .helpers import BLOCK, FINGERPRINT, OTHER_FINGERPRINT, Clock, block_hash, chain, content, flip, store

Pools = Callable[..., BlockPool]
CHAINS = [Chain(tuple(chain(4)), (Label(7, 2, 2, 30), Label(8, 4, 2, 30)))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "node.kvspill"


def write(pool: BlockPool, file: Path, *, max_bytes: int = 1 << 30, limit_s: float = 60.0) -> Spilled:
    return spill.write(pool, file, CHAINS, max_bytes=max_bytes, limit_s=limit_s, clock=Clock())


def read(pool: BlockPool, file: Path, *, limit_s: float = 60.0) -> Spilled | None:
    return spill.read(pool, file, limit_s=limit_s, clock=Clock())


def empty_pool(path: Path, blocks: int = 32, ranks: int = 1) -> BlockPool:
    return BlockPool(path / "next.kvpool", 3 * 4096 + blocks * ranks * (BLOCK + 64), Clock())


def holds(pool: BlockPool, hashes: list[bytes], ranks: int = 1) -> None:
    """These blocks and no other, each with its own bytes."""
    assert {block.block_hash for block in pool.blocks()} == set(hashes)
    for h in hashes:
        for rank in range(ranks):
            lease = pool.lease(h, rank, 1e9)
            assert lease is not None
            found = pool.leased(lease)
            assert found is not None and bytes(found[1]) == content(h, rank)
            pool.release(lease)
    stats = pool.stats()
    assert (stats.granted, stats.leases, stats.partial) == (0, 0, 0)
    pool.validate()


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_chains_and_their_order_come_back(tmp_path: Path, pools: Pools, file: Path, ranks: int) -> None:
    pool = pools(32, ranks=ranks)
    store(pool, chain(6), ranks=ranks)
    store(pool, chain(3, "b"), ranks=ranks)
    for _ in range(2):
        pool.touch(chain(2))
    order = [block.block_hash for block in pool.blocks()]
    written = write(pool, file)
    assert (written.blocks, written.why) == (9, "")
    assert file.stat().st_mode & 0o777 == 0o600
    after = empty_pool(tmp_path, ranks=ranks)
    found = read(after, file)
    assert found is not None
    assert (found.blocks, found.nbytes, found.why, found.chains) == (9, written.nbytes, "", tuple(CHAINS))
    holds(after, chain(6) + chain(3, "b"), ranks)
    assert [block.block_hash for block in after.blocks()] == order
    assert after.stats().protected == pool.stats().protected == 2
    assert after.configure(FINGERPRINT, BLOCK, ranks)  # the engine that comes finds its blocks
    assert not file.exists()
    after.close()


def test_an_empty_pool_and_one_without_an_engine_leave_no_file(tmp_path: Path, pools: Pools, file: Path) -> None:
    assert write(pools(8), file).blocks == 0
    bare = empty_pool(tmp_path)
    assert write(bare, file).blocks == 0
    assert read(bare, file) is None
    assert not file.exists()
    bare.close()


def test_the_most_wanted_blocks_are_written_when_not_all_fit(tmp_path: Path, pools: Pools, file: Path) -> None:
    pool = pools(32)
    store(pool, chain(10))
    pool.touch(chain(4), use=False)
    written = write(pool, file, max_bytes=4 * (BLOCK + 100))
    assert written.blocks == 4
    assert file.stat().st_size <= 4 * (BLOCK + 100) + 1024
    after = empty_pool(tmp_path)
    read(after, file)
    holds(after, chain(4))
    after.close()


class Running(Clock):
    """Every look takes a second."""

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_what_was_written_and_read_when_the_time_is_over_counts(tmp_path: Path, pools: Pools, file: Path) -> None:
    pool = pools(32)
    store(pool, chain(10))
    written = spill.write(pool, file, [], max_bytes=1 << 30, limit_s=6.0, clock=Running())
    assert 0 < written.blocks < 10 and written.why == "its time was over"
    after = empty_pool(tmp_path)
    found = spill.read(after, file, limit_s=4.0, clock=Running())
    assert found is not None
    assert 0 < found.blocks < written.blocks and found.why == "its time was over"
    after.close()


def test_a_full_disk_ends_the_file_with_what_fits(
    tmp_path: Path, pools: Pools, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools(32)
    store(pool, chain(5))
    write_all, blocks = spill._write_all, []

    def fill_up(to: object, data: memoryview) -> None:
        blocks.append(data)
        if len(blocks) == 4:
            raise OSError(28, "No space left on device")
        write_all(to, data)  # type: ignore[arg-type]

    monkeypatch.setattr(spill, "_write_all", fill_up)
    written = write(pool, file)
    assert (written.blocks, written.why) == (3, "No space left on device")
    after = empty_pool(tmp_path)
    found = read(after, file)
    assert found is not None and (found.blocks, found.why) == (3, "")
    after.close()


def test_a_directory_that_is_not_there_is_said_to_be(tmp_path: Path, pools: Pools) -> None:
    pool = pools(8)
    store(pool, chain(2))
    with pytest.raises(LocalError, match=r"cannot write .*No such file"):
        write(pool, tmp_path / "gone" / "node.kvspill")


def test_a_file_of_another_fingerprint_is_refused_and_stays(tmp_path: Path, pools: Pools, file: Path) -> None:
    pool = pools(16)
    store(pool, chain(3))
    write(pool, file)
    other = empty_pool(tmp_path)
    other.configure(OTHER_FINGERPRINT, BLOCK, 1)
    with pytest.raises(RemoteError, match="another fingerprint"):
        read(other, file)
    assert not other.blocks() and file.exists()
    other.close()


def test_an_engine_of_another_fingerprint_that_comes_meanwhile_ends_the_reading(
    tmp_path: Path, pools: Pools, file: Path
) -> None:
    pool = pools(16)
    store(pool, chain(5))
    write(pool, file)
    after = empty_pool(tmp_path)
    grant = after.grant

    def other_engine(n: int, writer: str = "node") -> object:
        if after.stats().blocks == 2:
            after.configure(OTHER_FINGERPRINT, BLOCK, 1)
        return grant(n, writer)

    after.grant = other_engine  # type: ignore[method-assign,assignment]
    found = read(after, file)
    assert found is not None and (found.blocks, found.why) == (2, "the pool is another engine's now")
    assert not after.blocks() and after.stats().granted == 0
    after.validate()
    after.close()


def test_reading_pushes_nothing_out_and_leaves_room_for_the_engine(tmp_path: Path, pools: Pools, file: Path) -> None:
    pool = pools(32)
    store(pool, chain(30))
    write(pool, file)
    small = empty_pool(tmp_path, blocks=16)
    small.configure(FINGERPRINT, BLOCK, 1)
    store(small, chain(6, "mine"))
    found = read(small, file)
    assert found is not None and found.why == "the pool has no room for more"
    assert len(small.lookup(chain(6, "mine"), use=False)) == 6
    assert small.stats().free > 0 and small.stats().evictions == 0
    small.close()


def test_a_damaged_block_ends_the_reading(tmp_path: Path, pools: Pools, file: Path) -> None:
    pool = pools(16)
    store(pool, chain(6))
    order = [block.block_hash for block in reversed(pool.blocks())]
    flip(pool, order[3])
    write(pool, file)
    after = empty_pool(tmp_path)
    found = read(after, file)
    assert found is not None and (found.blocks, found.why) == (3, "a block is damaged")
    holds(after, order[:3])
    after.close()


def test_a_link_and_a_file_that_others_may_write_are_refused(tmp_path: Path, pools: Pools, file: Path) -> None:
    pool = pools(16)
    store(pool, chain(2))
    write(pool, file)
    after = empty_pool(tmp_path)
    file.chmod(0o622)
    with pytest.raises(LocalError, match="writable by nobody else"):
        read(after, file)
    file.rename(tmp_path / "real")
    file.symlink_to(tmp_path / "real")
    with pytest.raises(LocalError, match="cannot be opened"):
        read(after, file)
    after.close()


def test_drafts_of_a_node_that_was_killed_are_removed(tmp_path: Path, pools: Pools, file: Path) -> None:
    draft = file.with_name(f".{file.name}.99")
    draft.write_bytes(b"half")
    read(pools(8), file)
    assert not draft.exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_a_changed_or_cut_file_gives_its_own_blocks_or_fewer(tmp_path: Path, pools: Pools, data: st.DataObject) -> None:
    file = tmp_path / "fuzz.kvspill"
    whole = tmp_path / "whole.kvspill"
    if not whole.exists():
        pool = pools(16)
        store(pool, chain(3))
        write(pool, whole)
    raw = bytearray(whole.read_bytes())
    head = spill_file.HEAD_BYTES + 3 * spill_file.ROW_BYTES
    if data.draw(st.booleans()):
        at = data.draw(st.one_of(st.integers(0, head + 200), st.integers(0, len(raw) - 1)))
        raw[at] ^= data.draw(st.integers(1, 255))
        damaged = True
    else:
        size = data.draw(st.integers(0, len(raw)))
        damaged, raw = size < len(raw), raw[:size]
    file.unlink(missing_ok=True)
    file.touch(0o600)
    file.write_bytes(raw)
    after = empty_pool(tmp_path)
    try:
        try:
            found = read(after, file)
        except KvError:
            assert damaged
            return
        assert found is not None
        assert found.blocks == 3 or found.why
        for block in after.blocks():
            lease = after.lease(block.block_hash, 0, 1e9)
            assert lease is not None
            held = after.leased(lease)
            assert held is not None and block.block_hash in chain(3) and bytes(held[1]) == content(block.block_hash)
        assert after.stats().granted == 0
    finally:
        after.close()


def test_a_change_of_what_a_block_is_called_is_noticed(tmp_path: Path, pools: Pools, file: Path) -> None:
    """Its bytes have their digest all the same: only the digest of the table tells."""
    pool = pools(16)
    store(pool, chain(1))
    write(pool, file)
    raw = file.read_bytes()
    file.write_bytes(raw.replace(block_hash(0), block_hash(1)))
    after = empty_pool(tmp_path)
    with pytest.raises(RemoteError, match="table is damaged"):
        read(after, file)
    assert file.exists() and not after.blocks()
    after.close()
