"""The node's side of the link with real sockets, and real `LinkClient`s as the engine's halves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from kvmigrate.digest import block_digest
from kvmigrate.errors import LocalError
from kvmigrate.fingerprint import NO_FINGERPRINT
from kvmigrate.link import LinkClient, server
from kvmigrate.link import messages as m
from kvmigrate.link.events import Gone, LinkEvent
from kvmigrate.link.messages import Role
from kvmigrate.link.server import EngineLink
from kvmigrate.pool import BlockPool
from kvmigrate.reader import PoolReader
from tests.waiting import until

from .helpers import BLOCK, FINGERPRINT, OTHER_FINGERPRINT, block_hash, chain, content, flip, store

T = TypeVar("T")


class Half:
    """One half of a connector, as far as the link goes."""

    def __init__(self, path: Path, hello: m.Hello) -> None:
        self.hello = hello
        self.client = LinkClient(path, lambda: hello)
        self.heard: list[object] = []
        self.mirror: dict[tuple[bytes, int], tuple[int, int]] = {}
        self.grants: list[m.SlotGrant] = []
        self.pool: m.Pool | None = None
        self.reader: PoolReader | None = None
        self.poll()

    def poll(self) -> bool:
        for message in self.client.poll():
            self.heard.append(message)
            match message:
                case m.Pool():
                    self.pool = message
                    self.reader = PoolReader(message.path, writable=True) if message.path else None
                    self.mirror.clear()
                    self.grants.clear()
                case m.Clear():
                    self.mirror.clear()
                    self.grants.clear()
                    if self.reader is not None:
                        self.reader.refresh()
                case m.Disconnected():
                    self.mirror.clear()
                    self.grants.clear()
                case m.Grant():
                    self.grants += message.slots
                case m.Add():
                    self.mirror |= {(i.block_hash, i.rank): (i.slot, i.generation) for i in message.items}
                case m.Drop():
                    gone = set(message.hashes)
                    self.mirror = {key: where for key, where in self.mirror.items() if key[0] not in gone}
        return True

    async def wait(self, condition: Callable[[], T]) -> T:
        return await until(lambda: self.poll() and condition())

    def store(self, h: bytes) -> m.SlotGrant:
        assert self.reader is not None
        grant = self.grants.pop(0)
        view = self.reader.writable(grant.slot, grant.generation)
        assert view is not None
        view[:] = content(h, self.hello.rank)
        item = m.StoredItem(grant.slot, grant.generation, h, self.hello.rank, BLOCK, block_digest(view))
        assert self.client.send(m.Stored((item,)))
        return grant

    def read(self, h: bytes, rank: int = 0) -> bytes:
        assert self.reader is not None
        got = bytearray()
        assert self.reader.read(*self.mirror[h, rank], h, rank, got.extend) is None
        return bytes(got)


@pytest.fixture
async def halves(tmp_path: Path) -> AsyncIterator[Callable[..., Half]]:
    made: list[Half] = []

    def make(role: Role, rank: int = 0, ranks: int = 1, fingerprint: bytes = FINGERPRINT, **options: object) -> Half:
        if role is Role.SCHEDULER:
            hello = m.Hello(role, rank, ranks, 1, NO_FINGERPRINT, 0, 128, **options)  # type: ignore[arg-type]
        else:
            hello = m.Hello(role, rank, ranks, 1, fingerprint, BLOCK, 128, **options)  # type: ignore[arg-type]
        made.append(Half(tmp_path / "link", hello))
        return made[-1]

    yield make
    for half in made:
        half.client.close()


@pytest.fixture
def events() -> list[LinkEvent]:
    return []


@pytest.fixture
async def link(tmp_path: Path, pool: BlockPool, events: list[LinkEvent]) -> AsyncIterator[EngineLink]:
    link = EngineLink(tmp_path / "link", pool, events.append)
    await link.start()
    yield link
    await link.close()
    await link.close()
    assert pool.stats().granted == 0
    assert not link.path.exists()


Halves = Callable[..., Half]


async def test_a_worker_stores_and_the_scheduler_hears_where(link: EngineLink, pool: BlockPool, halves: Halves) -> None:
    scheduler, worker = halves(Role.SCHEDULER), halves(Role.WORKER)
    await worker.wait(lambda: worker.grants)
    await scheduler.wait(lambda: scheduler.pool)
    assert link.status().why == "" and link.status().workers == (0,)
    for h in chain(3):
        worker.store(h)
    await scheduler.wait(lambda: len(scheduler.mirror) == 3)
    assert scheduler.read(block_hash(1)) == content(block_hash(1))
    assert link.status().stored == 3 and len(pool.lookup(chain(3))) == 3


async def test_grants_are_topped_up_and_more_come_when_they_are_wanted(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    worker = halves(Role.WORKER)
    await worker.wait(lambda: len(worker.grants) == pool.grant_limit)
    for n in range(40):  # more than the pool has slots: old blocks make room
        await worker.wait(lambda: worker.grants)
        worker.store(block_hash(n))
    await worker.wait(lambda: len(worker.grants) == pool.grant_limit)
    assert worker.client.send(m.Want(10_000))
    assert worker.client.send(m.Failed((worker.grants[0].slot, 12_345)))
    await until(lambda: pool.stats().reclaimed == 1)
    await worker.wait(lambda: len(worker.grants) == pool.grant_limit + 1)
    assert pool.granted_to("engine 1") == pool.grant_limit


async def test_a_mirror_starts_with_what_is_there_and_follows_every_change(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    store(pool, chain(5))
    halves(Role.WORKER)
    scheduler = halves(Role.SCHEDULER)
    await scheduler.wait(lambda: len(scheduler.mirror) == 5)
    pool.evict(block_hash(2))
    store(pool, chain(2, "b"))
    await scheduler.wait(lambda: len(scheduler.mirror) == 6)
    expected = {(b.block_hash, b.rank): (b.index, b.generation) for b in pool.blocks()}
    assert scheduler.mirror == expected


async def test_after_flush_every_change_is_in_the_socket(link: EngineLink, pool: BlockPool, halves: Halves) -> None:
    halves(Role.WORKER)
    scheduler = halves(Role.SCHEDULER)
    await scheduler.wait(lambda: scheduler.pool and scheduler.pool.path)
    await asyncio.to_thread(store, pool, chain(10))  # as a puller does
    assert await link.flush()
    scheduler.poll()  # once, without giving the loop a turn
    assert len(scheduler.mirror) == 10


async def test_flush_does_not_wait_for_ever_for_an_engine_that_does_not_read(
    link: EngineLink, pool: BlockPool, halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves(Role.WORKER)
    scheduler = halves(Role.SCHEDULER)
    await scheduler.wait(lambda: scheduler.pool and scheduler.pool.path)
    for session in link._sessions:
        for _ in range(3):
            session.send(m.Drop((bytes(32),) * 60_000))
    assert not await link.flush(0.05)
    monkeypatch.setattr("kvmigrate.link.session.MAX_BUFFERED", 1)
    pool.evict(block_hash(0))
    store(pool, chain(1))
    await until(lambda: not link.status().scheduler)  # it left too much unread


async def test_two_ranks_must_both_have_a_block_before_the_scheduler_hears_of_it(
    pools: Callable[..., BlockPool], tmp_path: Path, halves: Halves
) -> None:
    pool = pools(32, ranks=2)
    link = EngineLink(tmp_path / "link", pool, lambda _: None)
    await link.start()
    scheduler, first = halves(Role.SCHEDULER, ranks=2), halves(Role.WORKER, 0, 2)
    await first.wait(lambda: first.grants)
    assert scheduler.poll() and scheduler.pool is None and "not all workers" in link.status().why
    second = halves(Role.WORKER, 1, 2)
    await second.wait(lambda: second.grants)
    await scheduler.wait(lambda: scheduler.pool)
    first.store(block_hash(0))
    await until(lambda: pool.stats().partial == 1)
    await link.flush()
    assert scheduler.poll() and not scheduler.mirror
    second.store(block_hash(0))
    await scheduler.wait(lambda: len(scheduler.mirror) == 2)
    assert scheduler.read(block_hash(0), 1) == content(block_hash(0), 1)
    second.client.close()
    await scheduler.wait(lambda: scheduler.pool and not scheduler.pool.path)
    assert not scheduler.mirror
    await link.close()


async def test_a_worker_that_vanishes_gives_its_slots_back_and_the_blocks_stay_for_the_next_one(
    link: EngineLink, pool: BlockPool, halves: Halves, events: list[LinkEvent]
) -> None:
    worker, scheduler = halves(Role.WORKER), halves(Role.SCHEDULER)
    await worker.wait(lambda: worker.grants)
    worker.store(block_hash(0))
    await scheduler.wait(lambda: scheduler.mirror)
    worker.client.close()
    scheduler.client.close()
    await until(lambda: pool.stats().granted == 0 and not link.status().scheduler)
    assert {e.role for e in events if isinstance(e, Gone)} == {Role.WORKER, Role.SCHEDULER}
    assert link.status().why == "no engine is connected"
    halves(Role.WORKER)
    scheduler = halves(Role.SCHEDULER)  # a warm restart
    await scheduler.wait(lambda: scheduler.mirror)
    assert scheduler.read(block_hash(0)) == content(block_hash(0))


async def test_an_engine_of_another_fingerprint_gets_an_empty_pool_and_the_old_one_nothing(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    old, scheduler = halves(Role.WORKER), halves(Role.SCHEDULER)
    await old.wait(lambda: old.grants)
    old.store(block_hash(0))
    await scheduler.wait(lambda: scheduler.mirror)
    new = halves(Role.WORKER, fingerprint=OTHER_FINGERPRINT)
    await new.wait(lambda: new.grants)
    await scheduler.wait(lambda: not scheduler.mirror)
    await old.wait(lambda: any(isinstance(x, m.Disconnected) for x in old.heard))
    assert not pool.lookup(chain(1)) and link.status().workers == (0,)
    new.store(block_hash(7))
    await scheduler.wait(lambda: (block_hash(7), 0) in scheduler.mirror)


async def test_an_unsupported_engine_is_served_without_a_pool_and_its_reports_are_heard(
    link: EngineLink, pool: BlockPool, halves: Halves, events: list[LinkEvent]
) -> None:
    scheduler = halves(Role.SCHEDULER, supported=False, why="mamba layers")
    worker = halves(Role.WORKER, supported=False, why="mamba layers")
    for half in (scheduler, worker):
        await half.wait(lambda half=half: half.pool)  # type: ignore[misc]
        assert half.pool is not None and not half.pool.path and half.pool.why == "mamba layers"
    assert scheduler.client.send(m.Load(1, 2, 0.5))
    await until(lambda: m.Load(1, 2, 0.5) in events)
    assert link.status().why == "mamba layers" and pool.stats().granted == 0


@pytest.mark.parametrize(("fingerprint", "why"), [(NO_FINGERPRINT, "incomplete"), (FINGERPRINT, "too small")])
async def test_an_engine_whose_blocks_cannot_be_kept_is_told_why(
    link: EngineLink, halves: Halves, tmp_path: Path, fingerprint: bytes, why: str
) -> None:
    hello = m.Hello(Role.WORKER, 0, 1, 1, fingerprint, 1 << 20 if why == "too small" else BLOCK, 128)
    worker = Half(tmp_path / "link", hello)
    await worker.wait(lambda: worker.pool)
    assert worker.pool is not None and why in worker.pool.why and why in link.status().why
    worker.client.close()


async def test_reports_reach_the_listener_as_they_were_sent(
    link: EngineLink, halves: Halves, events: list[LinkEvent]
) -> None:
    scheduler, worker = halves(Role.SCHEDULER), halves(Role.WORKER)
    sent: list[m.FromEngine] = [
        m.Started("r", 100, 10, 20),
        m.Prefilled("r", 0.5),
        m.Filled("r", tuple(chain(2)), 256),
        m.Load(1, 0, 0.25),
        m.Finished("r"),
    ]
    for report in sent:
        assert scheduler.client.send(report)
    await until(lambda: [e for e in events if e in sent] == sent)
    assert worker.client.send(m.Loaded("r", 2, 2 * BLOCK, 0.1))
    await until(lambda: m.Loaded("r", 2, 2 * BLOCK, 0.1) in events)
    assert scheduler.hello in events and worker.hello in events


async def test_a_prefix_that_a_second_request_uses_is_protected_and_one_request_alone_protects_nothing(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    worker, scheduler = halves(Role.WORKER), halves(Role.SCHEDULER)
    await worker.wait(lambda: worker.grants)
    for h in chain(4):
        worker.store(h)
    await scheduler.wait(lambda: len(scheduler.mirror) == 4)
    for report in (m.Filled("r1", tuple(chain(3)), 3), m.Filled("r1", tuple(chain(4)), 4), m.Finished("r1")):
        scheduler.client.send(report)
    scheduler.client.send(m.Load(9, 9, 0))
    await until(lambda: [b.block_hash for b in pool.blocks()] == chain(4)[::-1])  # the tail goes first
    assert pool.stats().protected == 0
    scheduler.client.send(m.Filled("r2", tuple(chain(2)), 2))
    await until(lambda: pool.stats().protected == 2)


async def test_a_reset_drops_everything_and_the_worker_goes_on(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    worker, scheduler = halves(Role.WORKER), halves(Role.SCHEDULER)
    await worker.wait(lambda: worker.grants)
    worker.store(block_hash(0))
    await scheduler.wait(lambda: scheduler.mirror)
    assert scheduler.client.send(m.Reset())
    await scheduler.wait(lambda: not scheduler.mirror)
    await worker.wait(lambda: m.Clear(pool.header.epoch) in worker.heard and worker.grants)
    worker.store(block_hash(1))
    await scheduler.wait(lambda: set(scheduler.mirror) == {(block_hash(1), 0)})
    assert scheduler.read(block_hash(1)) == content(block_hash(1))


async def test_a_corrupt_block_that_a_worker_reports_is_checked_and_dropped(
    link: EngineLink, pool: BlockPool, halves: Halves, events: list[LinkEvent]
) -> None:
    worker, scheduler = halves(Role.WORKER), halves(Role.SCHEDULER)
    await worker.wait(lambda: worker.grants)
    for h in chain(2):
        worker.store(h)
    await scheduler.wait(lambda: len(scheduler.mirror) == 2)
    flip(pool, block_hash(1))
    slots = tuple(scheduler.mirror[h, 0][0] for h in chain(2))
    worker.client.send(m.Corrupt(slots))
    await scheduler.wait(lambda: set(scheduler.mirror) == {(block_hash(0), 0)})
    await until(lambda: m.Corrupt(slots) in events)
    assert pool.stats().corrupt == 1


HELLO = m.Hello(Role.SCHEDULER, 0, 1, 1, NO_FINGERPRINT, 0, 128)
WORKER_HELLO = m.Hello(Role.WORKER, 0, 1, 1, FINGERPRINT, BLOCK, 128)
ITEM = m.StoredItem(0, 1, block_hash(0), 0, BLOCK, bytes(16))


@pytest.mark.parametrize(
    "stream",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\1x",
        m.Want(1),
        [HELLO, HELLO],
        [HELLO, m.Want(1)],
        [HELLO, m.Add(())],
        [WORKER_HELLO, m.Reset()],
        [WORKER_HELLO, m.Stored((ITEM._replace(rank=3),))],
    ],
    ids=str,
)
async def test_what_breaks_the_protocol_costs_its_connection_and_nothing_else(
    link: EngineLink, pool: BlockPool, halves: Halves, stream: bytes | m.Message | list[m.Message]
) -> None:
    from kvmigrate.link import encode

    if not isinstance(stream, bytes):
        stream = b"".join(map(encode, stream if isinstance(stream, list) else [stream]))
    reader, writer = await asyncio.open_unix_connection(link.path)
    writer.write(stream)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(30):
            while await reader.read(1 << 16):
                pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await until(lambda: link.status().refused == 1)
    worker = halves(Role.WORKER)
    await worker.wait(lambda: worker.grants)


async def test_a_scheduler_that_is_back_before_it_was_missed_is_not_reported_gone(
    link: EngineLink, halves: Halves, events: list[LinkEvent]
) -> None:
    halves(Role.WORKER)
    old = halves(Role.SCHEDULER)
    await until(lambda: sum(isinstance(event, m.Hello) for event in events) == 2)
    new = halves(Role.SCHEDULER)
    await new.wait(lambda: new.pool)
    assert await old.wait(lambda: any(isinstance(message, m.Disconnected) for message in old.heard))
    assert not any(isinstance(event, Gone) for event in events)
    assert link.status().scheduler
    old.client.close()


async def test_a_late_or_foreign_stored_is_ignored_and_nothing_is_announced(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    (foreign,) = pool.grant(1, "puller")
    worker = halves(Role.WORKER)
    await worker.wait(lambda: worker.grants)
    item = ITEM._replace(slot=foreign.index, generation=foreign.generation)
    mine = m.StoredItem(*worker.grants[0], block_hash(1), 0, BLOCK, bytes(16))
    worker.client.send(m.Stored((item, mine._replace(generation=mine.generation + 2))))
    worker.store(block_hash(3))
    await until(lambda: link.status().stored == 1)
    assert {b.block_hash for b in pool.blocks()} == {block_hash(3)}
    pool.abandon(foreign)


async def test_who_says_no_hello_is_not_waited_for(
    pool: BlockPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_S", 0.05)
    link = EngineLink(tmp_path / "link", pool, lambda _: None)
    await link.start()
    reader, writer = await asyncio.open_unix_connection(link.path)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(1), 30) == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await link.close()


async def test_a_burst_of_changes_beyond_the_bound_becomes_a_new_mirror(
    link: EngineLink, pool: BlockPool, halves: Halves
) -> None:
    halves(Role.WORKER)
    scheduler = halves(Role.SCHEDULER)
    await scheduler.wait(lambda: scheduler.pool and scheduler.pool.path)
    link._changes._limit = 4
    store(pool, chain(30))
    assert await link.flush()
    scheduler.poll()
    assert set(scheduler.mirror) == {(b.block_hash, b.rank) for b in pool.blocks()}


async def test_a_dead_socket_file_is_replaced_and_a_living_one_is_not(
    link: EngineLink, pool: BlockPool, tmp_path: Path
) -> None:
    with pytest.raises(LocalError, match="another running process"):
        await EngineLink(link.path, pool, lambda _: None).start()
    dead = tmp_path / "dead"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    again = EngineLink(dead, pool, lambda _: None)
    await again.start()
    await again.close()
    with pytest.raises(LocalError, match="longer than"):
        await EngineLink(tmp_path / ("x" * 100), pool, lambda _: None).start()
