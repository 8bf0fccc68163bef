"""A source that dies, stalls, drips or lies, over real loopback sockets, and pullers that are closed meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvmigrate import messages, wire
from kvmigrate.digest import block_digest
from kvmigrate.errors import RemoteError
from kvmigrate.manifest import check_manifest
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import Reason
from kvmigrate.puller import Puller, PullLimits
from kvmigrate.transport import Deadline, Transport

from .bad_source import BadSource
from .helpers import BLOCK, OTHER_FINGERPRINT, SECRET, block_hash, content
from .served import holds


def send(transport: Transport, deadline: Deadline, index: int, h: bytes, data: bytes) -> None:
    transport.send_block(messages.BlockHeader(index, len(data), block_digest(content(h))), memoryview(data), deadline)


def two_good_ones(transport: Transport, deadline: Deadline) -> None:
    for index in (0, 1):
        send(transport, deadline, index, block_hash(index), content(block_hash(index)))


async def test_a_source_that_dies_in_a_block_leaves_the_blocks_before(target: BlockPool, puller: Puller) -> None:
    def die(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        two_good_ones(transport, deadline)
        transport.socket.sendall(wire.encode(messages.BlockHeader(2, BLOCK, bytes(16))) + b"half")
        transport.close()

    bad = BadSource(die)
    result = await puller.pull(bad.address, range(10), 10)
    assert (result.reason, result.blocks, result.present) == (Reason.BROKEN, 2, 2)
    holds(target, 2)
    bad.end()


async def test_a_source_that_stalls_in_a_block_is_given_up_in_time(target: BlockPool, puller: Puller) -> None:
    def stall(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        two_good_ones(transport, deadline)
        transport.socket.sendall(wire.encode(messages.BlockHeader(2, BLOCK, bytes(16))) + b"half")
        bad.hold()

    bad = BadSource(stall)
    started = time.monotonic()
    result = await puller.pull(bad.address, range(10), 10)
    assert (result.reason, result.blocks) == (Reason.STALLED, 2)
    assert time.monotonic() - started < 8  # it would hold for 20 s
    holds(target, 2)
    bad.end()


async def test_a_source_that_drips_is_given_up_at_the_deadline(target: BlockPool, puller: Puller) -> None:
    def drip(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        transport.socket.sendall(wire.encode(messages.BlockHeader(0, BLOCK, bytes(16))))
        while not bad._released.wait(0.02):
            transport.socket.sendall(b"x")

    bad = BadSource(drip)
    started = time.monotonic()
    result = await puller.pull(bad.address, range(10), 1.0)
    assert result.reason in {Reason.DEADLINE, Reason.STALLED} and result.blocks == 0
    assert time.monotonic() - started < 8  # it would drip for 20 s
    bad.end()
    holds(target, 0)


async def test_blocks_in_the_wrong_order_size_or_version_are_not_delivered(target: BlockPool, puller: Puller) -> None:
    def swapped(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        send(transport, deadline, 1, block_hash(1), content(block_hash(1)))
        bad.hold()

    def wrong_content(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        for index in range(len(fetch.keys)):  # block 1's bytes under block 0's header, and so on
            send(transport, deadline, index, fetch.keys[index].block_hash, content(block_hash(99)))

    def longer(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        send(transport, deadline, 0, block_hash(0), content(block_hash(0)) + b"x")
        bad.hold()

    def restored(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        for index in range(len(fetch.keys)):
            data = content(block_hash(77))
            transport.send_block(messages.BlockHeader(index, BLOCK, block_digest(data)), memoryview(data), deadline)

    for behave, reason in (
        (swapped, Reason.BROKEN),
        (wrong_content, Reason.CORRUPT),
        (longer, Reason.BROKEN),
        (restored, Reason.GONE),
    ):
        bad = BadSource(behave)
        result = await puller.pull(bad.address, range(10), 10)
        assert (result.reason, result.blocks) == (reason, 0)
        holds(target, 0)
        bad.end()


async def test_a_pool_cleared_during_a_pull_takes_nothing_of_it(target: BlockPool, puller: Puller) -> None:
    def clear_in_between(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        if fetch.keys[0].block_hash == block_hash(0):
            target.clear()
        for index, key in enumerate(fetch.keys):
            send(transport, deadline, index, key.block_hash, content(key.block_hash))

    bad = BadSource(clear_in_between)
    result = await puller.pull(bad.address, range(10), 10)
    assert (result.reason, result.blocks) == (Reason.FULL, 0)
    holds(target, 0)
    bad.end()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_nothing_that_was_asked_for_under_one_fingerprint_is_stored_under_another(
    target: BlockPool, puller: Puller, ranks: int
) -> None:
    """Another engine connects while the source looks: the same tokens have the same hashes there, and other bytes."""

    def honest(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        for index, key in enumerate(fetch.keys):
            send(transport, deadline, index, key.block_hash, content(key.block_hash))

    bad = BadSource(honest, asked=lambda: target.configure(OTHER_FINGERPRINT, BLOCK, ranks))
    result = await puller.pull(bad.address, range(10), 10)
    assert (result.reason, result.blocks) == (Reason.FULL, 0)
    stats = target.stats()
    assert (stats.blocks, stats.partial, stats.granted) == (0, 0, 0)
    bad.end()


async def test_closing_breaks_off_a_running_pull(target: BlockPool) -> None:
    asked = threading.Event()

    def stall(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        asked.set()
        bad.hold()

    bad = BadSource(stall)
    puller = Puller(target, SECRET, "c", limits=PullLimits(stall_s=15))
    pull = asyncio.create_task(puller.pull(bad.address, range(10), 15))
    await asyncio.to_thread(asked.wait, 5)
    started = time.monotonic()
    await puller.close()
    assert (await pull).reason is Reason.BROKEN
    assert time.monotonic() - started < 8
    assert (await puller.pull(bad.address, range(10), 15)).reason is Reason.BUSY
    bad.end()


def entry(n: int, rank: int = 0, nbytes: int = BLOCK) -> messages.Entry:
    return messages.Entry(block_hash(n), rank, nbytes, bytes(16))


@pytest.mark.parametrize(
    "entries",
    [
        (entry(0), entry(0, 1), entry(1)),
        (entry(0, 1), entry(0)),
        (entry(0), entry(1, 1)),
        (entry(0), entry(0, 1), entry(0), entry(0, 1)),
        (entry(0, nbytes=BLOCK + 1), entry(0, 1)),
    ],
)
def test_manifests_that_contradict_themselves_are_refused(entries: tuple[messages.Entry, ...]) -> None:
    with pytest.raises(RemoteError):
        check_manifest(messages.Manifest("", 0, entries), 2, BLOCK)


async def test_the_event_loop_runs_on_while_a_pull_waits_for_its_source(target: BlockPool, puller: Puller) -> None:
    def stall(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        bad.hold()

    bad = BadSource(stall)
    pull = asyncio.create_task(puller.pull(bad.address, range(10), 10))
    turns = 0
    while not pull.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert pull.result().reason is Reason.STALLED
    assert turns > 10
    bad.end()
