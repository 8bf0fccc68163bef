from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from kvmigrate import pool_file
from kvmigrate.errors import LocalError, PoolOwnedError, PoolSizeError
from kvmigrate.pool import BlockPool
from kvmigrate.pool_file import PoolFile, remove_stale_files

from .helpers import BLOCK, FINGERPRINT, chain, make_pool, store

OWNER = """
import sys, pathlib
from tests.kvmigrate.helpers import make_pool, store, chain
pool = make_pool(pathlib.Path(sys.argv[1]))
store(pool, chain(2))
print("ready", flush=True)
sys.stdin.read()
"""


def owner(directory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


def test_the_file_of_a_dead_owner_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    process = owner(tmp_path)
    try:
        with pytest.raises(PoolOwnedError, match="another running process"):
            make_pool(tmp_path)
        assert remove_stale_files(tmp_path / "own.kvpool") == []
    finally:
        end(process)
    before = (tmp_path / "test.kvpool").stat().st_ino
    held = (tmp_path / "test.kvpool").open("rb")  # an engine that still maps it
    pool = make_pool(tmp_path)
    assert pool.path.stat().st_ino != before and os.fstat(held.fileno()).st_size > 0
    assert not pool.lookup(chain(2))
    held.close()
    pool.close()


def test_stale_files_of_any_name_are_cleaned(tmp_path: Path) -> None:
    end(owner(tmp_path))
    mine = BlockPool(tmp_path / "mine.kvpool", 1 << 20)
    (tmp_path / "foreign.kvpool").write_bytes(b"somebody else's")
    assert remove_stale_files(tmp_path / "own.kvpool") == [tmp_path / "test.kvpool"]
    assert mine.path.exists() and (tmp_path / "foreign.kvpool").exists()
    mine.close()


def test_the_memory_of_a_dead_owner_is_free_although_an_engine_still_maps_its_file(tmp_path: Path) -> None:
    end(owner(tmp_path))
    with (tmp_path / "test.kvpool").open("rb") as held, mmap.mmap(held.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert remove_stale_files(tmp_path / "own.kvpool") == [tmp_path / "test.kvpool"]
        assert os.fstat(held.fileno()).st_blocks * 512 <= 4096
        assert mapped[-BLOCK:] == bytes(BLOCK)  # zeros, which have the digest of no block


def test_a_name_that_another_node_is_sweeping_up_can_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(owner(tmp_path))
    sweeper = (tmp_path / "test.kvpool").open("rb")
    fcntl.flock(sweeper, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def finish(_: float) -> None:
        (tmp_path / "test.kvpool").unlink(missing_ok=True)
        sweeper.close()

    monkeypatch.setattr(pool_file.time, "sleep", finish)
    pool = make_pool(tmp_path)
    assert pool.path.exists()
    pool.close()


def test_a_file_that_is_no_pool_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test.kvpool").write_bytes(b"precious data")
    with pytest.raises(LocalError, match="is no KV pool"):
        make_pool(tmp_path)
    assert (tmp_path / "test.kvpool").read_bytes() == b"precious data"


def test_too_small_a_file_system_is_refused_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = namedtuple("stat", "f_bavail f_frsize")(256, 4096)
    monkeypatch.setattr(pool_file.os, "statvfs", lambda _: stat)
    with pytest.raises(PoolSizeError, match=r"1 MiB free and the KV pool wants 4 MiB.*--shm-size"):
        BlockPool(tmp_path / "test.kvpool", 4 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no directory"):
        BlockPool(tmp_path / "nowhere" / "test.kvpool", 4 << 20)


def test_a_file_system_that_fills_up_costs_slots_and_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tmp_path, 16)
    monkeypatch.setattr(PoolFile, "back", lambda self, offset, length: False)
    assert pool.grant(4) == []
    pool.validate()
    monkeypatch.undo()
    pool.close()
    pool = make_pool(tmp_path, 16)
    store(pool, chain(4))
    monkeypatch.setattr(PoolFile, "back", lambda self, offset, length: False)
    assert store(pool, chain(4, "b")) == 4  # by evicting
    assert pool.stats().blocks == 4
    pool.validate()
    pool.close()


def test_memory_is_taken_as_it_is_used_and_given_back(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, 64, block=1 << 16)
    used = pool.path.stat().st_blocks * 512
    assert used < 1 << 16
    store(pool, chain(10))
    assert pool.path.stat().st_blocks * 512 >= 10 << 16
    pool.configure(FINGERPRINT[::-1], 1 << 16, 1)
    assert pool.path.stat().st_blocks * 512 < 1 << 16
    pool.close()


def test_other_users_cannot_read_the_pool(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    assert pool.path.stat().st_mode & 0o077 == 0
    pool.close()
