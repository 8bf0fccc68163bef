"""Blocks of a peer on the same host are read out of its pool file: when, how it falls back, and what a liar gains."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmigrate import copier, layout, messages, neighbour
from kvmigrate.copier import Copier
from kvmigrate.digest import RunningDigest, block_digest
from kvmigrate.errors import RemoteError
from kvmigrate.handshake import PullerHandshake
from kvmigrate.layout import FileHeader, Geometry, pack_file_header
from kvmigrate.neighbour import NeighbourFile, Neighbours
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import PullResult, Reason
from kvmigrate.puller import Puller
from kvmigrate.server import ServerLimits, TransferServer
from kvmigrate.serving import MAX_PINS
from kvmigrate.transport import Deadline, Transport
from tests.waiting import PATIENCE_S, until, until_here

from .bad_source import BadSource
from .helpers import BLOCK, FINGERPRINT, SECRET, Clock, block_hash, chain, content, flip, store
from .served import LIMITS, at, holds, resolve


@pytest.fixture(autouse=True, params=["alone", "helped"])
def helped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test twice: the pull copies alone, or shares every copy, however small."""
    monkeypatch.setattr(copier, "MIN_SHARED_BYTES", 0 if request.param == "helped" else 1 << 60)
    monkeypatch.setattr(copier.os, "sched_getaffinity", lambda _: range(3))


@pytest.fixture
def beside(tmp_path: Path, clock: Clock) -> Iterator[Callable[[str], BlockPool]]:
    """Makes pools whose files lie in one directory, as those of the nodes of one host."""
    made: list[BlockPool] = []

    def make(name: str, blocks: int = 64) -> BlockPool:
        pool = BlockPool(tmp_path / f"{name}.kvpool", 3 * 4096 + blocks * (BLOCK + 64), clock)
        pool.configure(FINGERPRINT, BLOCK, 1)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.validate()
        pool.close()


@pytest.fixture
def source(beside: Callable[[str], BlockPool]) -> BlockPool:
    pool = beside("source")
    store(pool, chain(20))
    return pool


@pytest.fixture
def target(beside: Callable[[str], BlockPool]) -> BlockPool:
    return beside("target")


@pytest.fixture
def server(source: BlockPool) -> Iterator[TransferServer]:
    server = TransferServer(source, resolve, SECRET, "c")
    server.start()
    yield server
    server.close()


async def pull(target: BlockPool, address: str, n: int = 30, *, same_host: bool = True) -> PullResult:
    puller = Puller(target, SECRET, "c", name="target", limits=LIMITS, same_host=same_host)
    try:
        return await puller.pull(address, range(n), 10)
    finally:
        await puller.close()
        assert target.stats().granted == 0


async def test_a_neighbours_blocks_do_not_go_over_the_connection(
    source: BlockPool, target: BlockPool, server: TransferServer
) -> None:
    result = await pull(target, at(server))
    assert (result.reason, result.blocks, result.bytes) == (Reason.COMPLETE, 20, 20 * BLOCK)
    assert [part.way for part in result.parts] == ["same host"]
    stats = server.stats()
    assert (stats.blocks, stats.pinned_blocks, stats.pinned_bytes) == (0, 20, 20 * BLOCK)
    holds(target, 20)
    server.close()
    assert source.stats().leases == 0


async def test_what_a_neighbour_took_for_a_request_goes_first(
    source: BlockPool, target: BlockPool, server: TransferServer
) -> None:
    slots = source.header.geometry.slots
    store(source, chain(slots - 20, "b"))
    assert (await pull(target, at(server))).blocks == 20
    server.close()
    store(source, chain(12, "c"))
    assert len(source.lookup(chain(20), use=False)) == 8
    assert len(source.lookup(chain(slots - 20, "b"), use=False)) == slots - 20


@pytest.mark.parametrize("why", ["switched off", "elsewhere", "another instance", "a link", "writable by others"])
async def test_without_a_file_that_is_surely_the_sources_blocks_come_over_tcp(
    why: str, tmp_path: Path, source: BlockPool, target: BlockPool, server: TransferServer
) -> None:
    path = source.path
    if why == "elsewhere":
        (tmp_path / "other").mkdir()
        path.rename(tmp_path / "other" / path.name)
    elif why == "another instance":
        h = source.header
        source._file.bytes[:4096] = bytes(4096)
        pack_file_header(source._file.bytes, FileHeader(h.geometry, h.fingerprint, h.epoch, h.instance ^ 1, h.capacity))
    elif why == "a link":
        path.rename(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
    elif why == "writable by others":
        path.chmod(0o660)
    result = await pull(target, at(server), same_host=why != "switched off")
    assert [part.way for part in result.parts] == ["tcp"]
    assert (result.reason, result.blocks, server.stats().pinned_blocks) == (Reason.COMPLETE, 20, 0)
    holds(target, 20)
    pack_file_header(source._file.bytes, source.header)


async def test_a_flipped_bit_in_the_neighbours_file_is_noticed_reported_and_not_delivered(
    source: BlockPool, target: BlockPool, server: TransferServer
) -> None:
    flip(source, block_hash(5))
    result = await pull(target, at(server))
    assert (result.reason, result.blocks, result.corrupt) == (Reason.CORRUPT, 5, 1)
    holds(target, 5)
    await until(lambda: server.stats().corrupt == 1)  # the report is on its way when the pull has ended
    server.close()
    assert source.stats().leases == 0


async def test_a_block_that_is_gone_ends_the_pull_at_the_block_before(
    source: BlockPool, target: BlockPool, server: TransferServer
) -> None:
    original = source.lease

    def lease_but_lose_one(h: bytes, rank: int, until: float, peer: str = "") -> object:
        if h == block_hash(7):
            source.evict(h)
        return original(h, rank, until, peer)

    source.lease = lease_but_lose_one  # type: ignore[method-assign,assignment]
    result = await pull(target, at(server))
    assert (result.reason, result.blocks) == (Reason.GONE, 7)
    holds(target, 7)


async def test_a_source_that_points_at_other_places_of_its_file_delivers_nothing(
    source: BlockPool, target: BlockPool
) -> None:
    def lie(transport: Transport, request: messages.Message, deadline: Deadline) -> None:
        if isinstance(request, messages.Pin):
            transport.send(
                messages.Pinned(
                    tuple(messages.Place(b.index, b.generation) for b in reversed(source.lookup(chain(4))))
                ),
                deadline,
            )

    bad = BadSource(lie, file=source.path.name, instance=source.header.instance)
    result = await pull(target, bad.address)
    assert (result.reason, result.blocks, result.corrupt) == (Reason.CORRUPT, 0, 1)
    bad.end()
    holds(target, 0)


async def test_a_pool_that_is_emptied_while_its_blocks_are_read_is_not_called_damaged(
    source: BlockPool, target: BlockPool, server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = NeighbourFile.copy

    def too_late(self: NeighbourFile, slot: int, nbytes: int, room: memoryview) -> bytes:
        if len(source.lookup(chain(20), use=False)) == 20:
            source.configure(FINGERPRINT[::-1], BLOCK, 1)
        return copy(self, slot, nbytes, room)

    monkeypatch.setattr(NeighbourFile, "copy", too_late)
    result = await pull(target, at(server))
    assert (result.reason, result.blocks, result.corrupt) == (Reason.GONE, 0, 0)
    holds(target, 0)


@pytest.mark.parametrize("tells", [True, False], ids=["overwritten", "damaged"])
async def test_a_block_that_changes_while_it_is_copied_is_not_taken(
    tells: bool, source: BlockPool, target: BlockPool, server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first half is the block's, its second half is not; the owner knows of it, or nobody does."""
    block = source.lookup([block_hash(3)], use=False)[0]
    geometry = source.header.geometry
    middle = geometry.slot_offset(block.index) + BLOCK // 2
    first_half = content(block_hash(3))[: BLOCK // 2]
    changed = threading.Event()

    class Watching(RunningDigest):
        def update(self, piece: bytes | bytearray | memoryview) -> None:
            super().update(piece)
            if bytes(piece) == first_half:
                source._file.bytes[middle : middle + BLOCK // 2] = content(block_hash(99))[BLOCK // 2 :]
                if tells:
                    layout.write_generation(source._file.bytes, geometry, block.index, block.generation + 1)
                changed.set()

    monkeypatch.setattr(neighbour, "COPY_BYTES", BLOCK // 2)
    monkeypatch.setattr(neighbour, "RunningDigest", Watching)
    result = await pull(target, at(server))
    assert changed.is_set()
    assert (result.reason, result.blocks) == (Reason.GONE if tells else Reason.CORRUPT, 3)
    holds(target, 3)
    if tells:
        layout.write_generation(source._file.bytes, geometry, block.index, block.generation)


async def test_a_slot_is_not_given_back_while_somebody_still_copies_into_it(
    source: BlockPool, target: BlockPool, server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull's time is over in the middle of a copy."""
    begun, go_on = threading.Event(), threading.Event()
    copy = NeighbourFile.copy

    def slow(self: NeighbourFile, slot: int, nbytes: int, room: memoryview) -> bytes:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return copy(self, slot, nbytes, room)

    monkeypatch.setattr(NeighbourFile, "copy", slow)
    puller = Puller(target, SECRET, "c", name="target", limits=LIMITS)
    result = await puller.pull(at(server), range(20), 0.5)
    assert begun.is_set() and (result.reason, result.blocks) == (Reason.DEADLINE, 0)
    assert target.stats().granted > 0  # the pool lends them to nobody else
    go_on.set()
    await puller.close()
    assert target.stats().granted == 0
    target.validate()


async def test_a_pull_that_breaks_ends_only_when_its_helpers_have_let_go_of_its_slots(
    source: BlockPool, target: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "MIN_SHARED_BYTES", 0)
    begun, go_on, ending = threading.Event(), threading.Event(), threading.Event()
    copy, stop = NeighbourFile.copy, Copier.stop

    def slow(self: NeighbourFile, slot: int, nbytes: int, room: memoryview) -> bytes:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return copy(self, slot, nbytes, room)

    def stopped(self: Copier) -> None:
        ending.set()
        stop(self)

    def break_the_second(transport: Transport, request: messages.Message, deadline: Deadline) -> None:
        if not isinstance(request, messages.Pin):
            return
        if request.keys[0].block_hash == block_hash(0):
            blocks = source.lookup([key.block_hash for key in request.keys], use=False)
            transport.send(messages.Pinned(tuple(messages.Place(b.index, b.generation) for b in blocks)), deadline)
        else:
            assert begun.wait(PATIENCE_S)
            transport.send(messages.Welcome(), deadline)

    monkeypatch.setattr(NeighbourFile, "copy", slow)
    monkeypatch.setattr(Copier, "stop", stopped)
    bad = BadSource(break_the_second, file=source.path.name, instance=source.header.instance)
    puller = Puller(target, SECRET, "c", name="target", limits=LIMITS)
    pulling = asyncio.create_task(puller.pull(bad.address, range(10), 10))
    assert await asyncio.to_thread(ending.wait, PATIENCE_S)
    assert not pulling.done() and target.stats().granted > 0
    go_on.set()
    assert (await pulling).reason is Reason.BROKEN
    await puller.close()
    bad.end()
    assert target.stats().granted == 0
    holds(target, 0)


async def test_a_place_outside_of_the_file_breaks_the_connection(source: BlockPool, target: BlockPool) -> None:
    def lie(transport: Transport, request: messages.Message, deadline: Deadline) -> None:
        if isinstance(request, messages.Pin):
            transport.send(messages.Pinned((messages.Place(10_000, 2),)), deadline)

    bad = BadSource(lie, file=source.path.name, instance=source.header.instance)
    result = await pull(target, bad.address)
    assert (result.reason, result.blocks) == (Reason.BROKEN, 0)
    bad.end()


async def test_a_source_that_never_says_where_is_given_up_in_time(source: BlockPool, target: BlockPool) -> None:
    def silent(transport: Transport, request: messages.Message, deadline: Deadline) -> None:
        bad.hold()

    bad = BadSource(silent, file=source.path.name, instance=source.header.instance)
    started = time.monotonic()
    assert (await pull(target, bad.address)).reason is Reason.STALLED
    assert time.monotonic() - started < 8
    bad.end()


def connected(server: TransferServer) -> tuple[Transport, Deadline]:
    """An authenticated connection that speaks the protocol by hand."""
    transport = Transport(socket.create_connection(("127.0.0.1", server.port)))
    deadline = Deadline(time.monotonic, 10, 10)
    shake = PullerHandshake("c", "rude", SECRET, bytes(16))
    transport.send(shake.start(), deadline)
    while not shake.done:
        answer = shake.receive(transport.receive(deadline))
        if answer is not None:
            transport.send(answer, deadline)
    return transport, deadline


def gone(server: TransferServer) -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-serve":
            thread.join(5)
            assert not thread.is_alive()


def test_pins_end_with_their_connection(source: BlockPool, server: TransferServer) -> None:
    transport, deadline = connected(server)
    transport.send(messages.Pin(tuple(messages.Key(h, 0) for h in chain(3))), deadline)
    answer = transport.receive(deadline)
    assert isinstance(answer, messages.Pinned) and len(answer.places) == 3 and source.stats().leases == 3
    transport.close()
    gone(server)
    assert source.stats().leases == 0


def test_a_peer_that_pins_without_end_is_told_to_wait(source: BlockPool, server: TransferServer) -> None:
    transport, deadline = connected(server)
    for _ in range(MAX_PINS):
        transport.send(messages.Pin((messages.Key(block_hash(0), 0),)), deadline)
        assert isinstance(transport.receive(deadline), messages.Pinned)
    transport.send(messages.Pin((messages.Key(block_hash(0), 0),)), deadline)
    assert isinstance(transport.receive(deadline), messages.Busy)
    transport.close()


def test_one_peer_cannot_pin_a_whole_pool(source: BlockPool, server: TransferServer) -> None:
    transport, deadline = connected(server)
    for asked, granted in ((range(20), 0), (range(12), 12), (range(12, 20), 0), (range(30, 31), 0)):
        transport.send(messages.Pin(tuple(messages.Key(block_hash(n), 0) for n in asked)), deadline)
        answer = transport.receive(deadline)
        if granted:
            assert isinstance(answer, messages.Pinned) and len(answer.places) == granted
        elif asked[0] < 20:
            assert isinstance(answer, messages.Busy)  # fewer places would mean that the others are gone
        else:
            assert answer == messages.Pinned(())
        assert source.stats().leases == (0 if asked == range(20) else 12)
    transport.close()
    assert server.stats().busy == 2 and source.stats().refused_leases > 0


@pytest.mark.parametrize("blocks", [21, 24, 64])
async def test_a_small_pool_gives_all_that_it_has_to_a_neighbour(
    beside: Callable[..., BlockPool], target: BlockPool, blocks: int
) -> None:
    """What one peer may pin of it is less than what a pull has under way elsewhere."""
    small = beside("small", blocks)
    store(small, chain(20))
    server = TransferServer(small, resolve, SECRET, "c")
    server.start()
    result = await pull(target, at(server))
    assert (result.reason, result.blocks) == (Reason.COMPLETE, 20)
    assert [part.way for part in result.parts] == ["same host"]
    holds(target, 20)
    server.close()
    assert small.stats().leases == 0


async def test_a_pull_whose_peer_has_pinned_all_that_it_may_goes_on_over_the_connection(
    source: BlockPool, target: BlockPool, server: TransferServer
) -> None:
    quota = source._leases.quota_bytes // BLOCK
    until = source._clock() + 50
    held = [source.lease(block_hash(n), 0, until, "target") for n in range(quota - 2)]  # as other pulls of it would
    result = await pull(target, at(server))
    assert (result.reason, result.blocks) == (Reason.COMPLETE, 20)
    assert [part.way for part in result.parts][-1] == "tcp"
    holds(target, 20)
    for lease in held:
        assert lease is not None
        source.release(lease)


def test_who_reads_what_is_pinned_for_it_is_not_idle(source: BlockPool) -> None:
    server = TransferServer(source, resolve, SECRET, "c", limits=ServerLimits(connections=1, spare_s=0))
    server.start()
    pinning, deadline = connected(server)
    pinning.send(messages.Pin((messages.Key(block_hash(0), 0),)), deadline)
    assert isinstance(pinning.receive(deadline), messages.Pinned)
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as refused:
        assert refused.recv(1) == b"", "closed at once"
    pinning.send(messages.Unpin(), deadline)
    until_here(lambda: server._idle)
    other, _ = connected(server)  # now it is, and gives its place
    assert server.stats().turned_away == 1
    for transport in (pinning, other):
        transport.close()
    server.close()
    assert source.stats().leases == 0


def test_what_a_peer_has_pinned_keeps_nothing_from_being_sent_to_it(source: BlockPool, server: TransferServer) -> None:
    """Several pulls of one peer: what one of them holds does not make another believe that blocks are gone."""
    pinning, deadline = connected(server)
    pinning.send(messages.Pin(tuple(messages.Key(h, 0) for h in chain(16))), deadline)  # all that it may
    assert isinstance(pinning.receive(deadline), messages.Pinned)
    fetching, _ = connected(server)
    fetching.send(messages.Fetch(tuple(messages.Key(h, 0) for h in chain(20))), deadline)
    for n, h in enumerate(chain(20)):
        header = fetching.receive(deadline)
        assert isinstance(header, messages.BlockHeader) and header.index == n
        data = bytearray(header.nbytes)
        fetching.receive_data(memoryview(data), deadline)
        assert data == content(h)
    for transport in (pinning, fetching):
        transport.close()
    gone(server)
    assert source.stats().leases == 0


def test_unpinning_what_was_never_pinned_costs_the_connection(source: BlockPool, server: TransferServer) -> None:
    transport, deadline = connected(server)
    transport.send(messages.Unpin(), deadline)
    with pytest.raises(OSError, match="closed"):
        transport.receive(deadline)
    transport.close()
    gone(server)
    assert server.stats().broken == 1


@pytest.mark.parametrize(
    "name",
    ["../source.kvpool", "/etc/passwd", "source", "", ".", "..", "x\0.kvpool", "sub/source.kvpool", "target.kvpool"],
)
def test_no_other_name_is_opened(name: str, source: BlockPool, target: BlockPool) -> None:
    for instance in (source.header.instance, target.header.instance, 0):
        assert NeighbourFile.open(target.path, name, instance) is None


def test_a_file_that_is_no_pool_or_shorter_than_it_says_is_not_mapped(tmp_path: Path, target: BlockPool) -> None:
    path = tmp_path / "bad.kvpool"
    header = FileHeader(Geometry(BLOCK, 1000, 1), FINGERPRINT, 1, 77, 1 << 40)
    page = bytearray(4096)
    pack_file_header(memoryview(page), header)
    for written in (b"", b"junk" * 2000, bytes(page), bytes(page[:100])):
        path.write_bytes(written)
        path.chmod(0o600)
        assert NeighbourFile.open(target.path, path.name, 77) is None
    path.unlink()
    os.mkfifo(path)
    assert NeighbourFile.open(target.path, path.name, 77) is None  # and does not wait for a writer


def test_what_is_copied_is_what_the_digest_is_of(source: BlockPool, target: BlockPool) -> None:
    file = NeighbourFile.open(target.path, source.path.name, source.header.instance)
    assert file is not None
    block = source.lookup([block_hash(3)])[0]
    room = memoryview(bytearray(BLOCK))
    assert file.copy(block.index, BLOCK, room) == block_digest(room) == block.digest
    with pytest.raises(RemoteError):
        file.copy(0, BLOCK + 4096, memoryview(bytearray(3 * BLOCK)))
    with pytest.raises(RemoteError):
        file.copy(source.header.geometry.slots, BLOCK, room)
    file.close()
    file.close()


def test_mappings_are_kept_and_let_go_of_when_their_file_is_gone_or_another(
    source: BlockPool, target: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Neighbours(target.path)
    instance = source.header.instance
    first = files.borrow(source.path.name, instance)
    assert first is not None
    second = files.borrow(source.path.name, instance)  # the first is lent
    assert second is not None and second is not first
    files.give_back(source.path.name, first)
    files.give_back(source.path.name, second)
    assert second._map.closed and not first._map.closed
    assert files.borrow(source.path.name, instance) is first
    files.give_back(source.path.name, first)
    assert files.borrow(source.path.name, instance ^ 1) is None and first._map.closed
    third = files.borrow(source.path.name, instance)
    assert third is not None
    files.give_back(source.path.name, third)
    source.path.rename(source.path.with_name("away"))
    assert files.borrow("another.kvpool", instance) is None and third._map.closed
    source.path.with_name("away").rename(source.path)
    monkeypatch.setattr(neighbour, "MAX_KEPT", 0)
    fourth = files.borrow(source.path.name, instance)
    assert fourth is not None
    files.give_back(source.path.name, fourth)
    assert fourth._map.closed
    files.close()
