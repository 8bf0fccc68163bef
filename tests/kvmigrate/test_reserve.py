"""Memory that a pool takes ahead of its use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvmigrate.errors import LocalError
from kvmigrate.pool import BlockPool
from kvmigrate.pool_file import PoolFile
from kvmigrate.reserve import Reserve
from tests.waiting import PATIENCE_S, until_here

from .helpers import BLOCK, chain, make_pool, store


def taken(pool: BlockPool) -> int:
    """Whole slots that have memory."""
    return (pool.path.stat().st_blocks * 512 - pool.header.geometry.data_offset) // BLOCK


def test_as_much_as_asked_is_prepared_and_no_more(pool: BlockPool) -> None:
    assert taken(pool) == 0
    while pool.prepare(5 * BLOCK):
        pass
    assert taken(pool) == 5
    store(pool, chain(3))
    assert pool.prepare(5 * BLOCK) and taken(pool) == 6
    pool.validate()


def test_most_of_a_pool_is_never_prepared(pool: BlockPool) -> None:
    while pool.prepare(1 << 40):
        pass
    assert taken(pool) == pool.header.geometry.slots // 4


def test_a_pool_that_is_not_configured_or_closed_prepares_nothing(tmp_path: Path) -> None:
    pool = BlockPool(tmp_path / "a.kvpool", 1 << 20)
    assert not pool.prepare(1 << 20)
    pool.close()
    pool = make_pool(tmp_path)
    pool.close()
    assert not pool.prepare(1 << 20)


def test_without_memory_it_stops_at_once(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolFile, "back", lambda *_, **__: False)
    assert not pool.prepare(5 * BLOCK)
    monkeypatch.undo()
    assert store(pool, chain(10)) == 10
    pool.validate()


def test_the_reserve_follows_use_and_a_new_engine(pool: BlockPool) -> None:
    reserve = Reserve(pool, 4 * BLOCK)
    until_here(lambda: taken(pool) == 4)
    store(pool, chain(3))
    until_here(lambda: taken(pool) == 7)
    pool.configure(bytes(16)[:-1] + b"\1", BLOCK, 1)
    until_here(lambda: taken(pool) == 4)
    reserve.close()
    reserve.close()
    store(pool, chain(2))
    assert taken(pool) == 4


def test_the_reserve_gives_up_where_memory_cannot_be_had(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> bool:
        raise LocalError("no")

    monkeypatch.setattr(PoolFile, "back", broken)
    reserve = Reserve(pool, 4 * BLOCK)
    reserve._thread.join(PATIENCE_S)
    assert not reserve._thread.is_alive()
    monkeypatch.undo()
    reserve.close()
    lost = pool.header.geometry.slots - pool.stats().free
    assert lost == 0


def test_half_of_the_reserve_is_kept_at_all_times_and_the_rest_taken_when_the_pool_is_left_alone(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmigrate.reserve.QUIET_S", 3600.0)
    asked: list[int] = []
    prepare = pool.prepare

    def noted(nbytes: int) -> bool:
        asked.append(nbytes)
        return prepare(nbytes)

    monkeypatch.setattr(pool, "prepare", noted)
    reserve = Reserve(pool, 8 * BLOCK)
    until_here(lambda: taken(pool) == 4)
    for stored in (1, 2, 3):
        store(pool, [chain(3)[stored - 1]])
        until_here(lambda n=stored: taken(pool) == 4 + n)  # type: ignore[misc]
    assert set(asked) == {4 * BLOCK}
    monkeypatch.setattr("kvmigrate.reserve.QUIET_S", 0.0)
    store(pool, [chain(4)[3]])
    until_here(lambda: taken(pool) == 4 + 8)
    reserve.close()


def test_beside_an_engine_that_computes_no_more_than_half_is_taken(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmigrate.reserve.QUIET_S", 0.001)
    computing, asked = threading.Event(), threading.Semaphore(0)
    computing.set()

    def busy() -> bool:
        asked.release()
        return computing.is_set()

    reserve = Reserve(pool, 8 * BLOCK, busy=busy)
    for _ in range(20):
        assert asked.acquire(timeout=PATIENCE_S)
    assert taken(pool) == 4
    computing.clear()
    until_here(lambda: taken(pool) == 8)
    reserve.close()


def test_it_leaves_off_when_the_engine_begins(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmigrate.reserve.QUIET_S", 0.001)
    computing = threading.Event()
    reserve = Reserve(pool, 8 * BLOCK, busy=lambda: computing.is_set() or taken(pool) == 6)
    until_here(lambda: taken(pool) == 6)
    computing.set()
    reserve.close()
    assert taken(pool) == 6


def test_who_needs_no_memory_does_not_wait_for_a_thread_that_takes_some(pool: BlockPool) -> None:
    while pool.prepare(4 * BLOCK):
        pass
    held, done = threading.Event(), threading.Event()

    def taking() -> None:
        with pool._file_lock:
            held.set()
            done.wait(PATIENCE_S)

    other = threading.Thread(target=taking)
    other.start()
    assert held.wait(PATIENCE_S)
    granted: list[object] = []
    grant = threading.Thread(target=lambda: granted.extend(pool.grant(4)), daemon=True)
    grant.start()
    grant.join(5.0)
    in_time = len(granted)
    done.set()
    other.join()
    assert in_time == 4
