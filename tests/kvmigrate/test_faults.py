"""What can go wrong with a source, a link or a pool. Each fault ends the same way: the blocks that are here have their
own bytes, every slot and lease is back, the pull ended within its deadline, and the counter of its reason has risen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvmigrate import fetch, messages, wire
from kvmigrate.digest import block_digest
from kvmigrate.fingerprint import Fingerprint
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import PullResult, Reason, Source
from kvmigrate.puller import Puller
from kvmigrate.server import ServerLimits, TransferServer
from kvmigrate.transport import Deadline, Transport

from .bad_source import BadSource
from .helpers import BLOCK, SECRET, block_hash, chain, content, store
from .served import LIMITS, at, resolve
from .test_neighbour import connected

Pools = Callable[..., BlockPool]
#: Of every pull here, and far below how long the bad sources hold still (20 s).
DEADLINE_S = 5.0
FINGERPRINT = Fingerprint(
    model_digest="m", revision="none", dtype="bfloat16", cache_dtype="auto", quantization="none", kv_scales="none",
    rope="none", layers=2, kv_heads=2, head_dim=8, block_size=16, block_bytes=BLOCK, tp_size=1, layout="LBHNC",
    isa="amx", attention="CPU_ATTN", hash_algo="sha256_cbor", hash_seed="none", lora="none", vllm_version="0.32.0",
)  # fmt: skip


class Target:
    """A pool, its puller, and what must be true after a fault."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.puller = Puller(pool, SECRET, "c", name="target", limits=LIMITS)
        self._slots = self._usable()

    async def pull(self, sources: str | Sequence[Source], n: int = 10) -> PullResult:
        started = time.monotonic()
        result = await self.puller.pull(sources, range(n), DEADLINE_S)
        assert time.monotonic() - started < DEADLINE_S + 1.0
        return result

    def check(self, result: PullResult, reason: Reason, blocks: int) -> None:
        assert (result.reason, result.blocks) == (reason, blocks), result
        self.holds(blocks)
        stats = self.pool.stats()
        assert (stats.granted, stats.leases, self._usable()) == (0, 0, self._slots)
        assert self.puller.stats().by_reason[reason] == 1
        self.pool.validate()

    def holds(self, n: int) -> None:
        """The first n blocks of the chain are here and no other, each with its own bytes."""
        assert len(self.pool.lookup(chain(40), use=False)) == n
        assert self.pool.stats().blocks == n
        for h in chain(n):
            lease = self.pool.lease(h, 0, 1e9)
            assert lease is not None
            found = self.pool.leased(lease)
            assert found is not None and bytes(found[1]) == content(h)
            self.pool.release(lease)

    def _usable(self) -> int:
        stats = self.pool.stats()
        return stats.free + stats.blocks


@pytest.fixture
async def target(pools: Pools) -> AsyncIterator[Target]:
    target = Target(pools(64))
    yield target
    await target.puller.close()


@pytest.fixture
def source(pools: Pools) -> BlockPool:
    pool = pools(64)
    store(pool, chain(10))
    return pool


@pytest.fixture
def serve() -> Iterator[Callable[..., TransferServer]]:
    servers: list[TransferServer] = []

    def start(pool: BlockPool, **options: object) -> TransferServer:
        server = TransferServer(pool, resolve, SECRET, "c", **options)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def two_good_ones(transport: Transport, deadline: Deadline) -> None:
    for index, h in enumerate(chain(2)):
        data = content(h)
        transport.send_block(messages.BlockHeader(index, BLOCK, block_digest(data)), memoryview(data), deadline)


# -- the source ----------------------------------------------------------------------------------------------------

SLOW_SOURCE = """
import pathlib, sys, time
from kvmigrate import messages, serving, wire
from kvmigrate.server import TransferServer
from tests.kvmigrate.helpers import SECRET, block_hash, chain, make_pool, store
pool = make_pool(pathlib.Path(sys.argv[1]), 64)
store(pool, chain(10))
send = serving.Serving._send_block
def slowly(self, index, lease, deadline):
    if index == 2:
        found = self._pool.leased(lease)
        header = messages.BlockHeader(index, len(found[1]), found[0].digest)
        self._transport.socket.sendall(wire.encode(header) + bytes(found[1][:100]))
        print("half", flush=True)
        time.sleep(60)
    return send(self, index, lease, deadline)
serving.Serving._send_block = slowly
server = TransferServer(pool, lambda chunks: [block_hash(c) for c in chunks], SECRET, "c")
server.start()
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("sign", "reason"), [(signal.SIGKILL, Reason.BROKEN), (signal.SIGSTOP, Reason.STALLED)], ids=["killed", "stopped"]
)
async def test_a_source_killed_or_stopped_in_the_middle_of_a_block(
    tmp_path: Path, target: Target, sign: signal.Signals, reason: Reason
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLOW_SOURCE, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        pull = asyncio.create_task(target.pull(address))
        assert await process.stdout.readline() == b"half\n"
        os.kill(process.pid, sign)
        target.check(await pull, reason, 2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.communicate(), 60)


async def test_a_source_that_is_stopped_before_it_is_asked(tmp_path: Path, target: Target) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLOW_SOURCE, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        os.kill(process.pid, signal.SIGSTOP)
        target.check(await target.pull(address), Reason.UNREACHABLE, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.communicate(), 60)


async def test_a_source_that_only_stops_sending(target: Target) -> None:
    def half_close(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        two_good_ones(transport, deadline)
        transport.socket.shutdown(socket.SHUT_WR)  # and goes on reading

    bad = BadSource(half_close)
    target.check(await target.pull(bad.address), Reason.BROKEN, 2)
    bad.end()


async def test_a_source_whose_block_is_overwritten_while_it_is_sent(
    source: BlockPool, target: Target, serve: Callable[..., TransferServer]
) -> None:
    leased = source.leased

    def overwrite_the_fourth(lease: object) -> object:
        found = leased(lease)  # type: ignore[arg-type]
        if found is not None and found[0].block_hash == block_hash(3):
            offset = source.header.geometry.slot_offset(found[0].index)
            source._file.bytes[offset : offset + BLOCK] = content(block_hash(99))
        return found

    source.leased = overwrite_the_fourth  # type: ignore[method-assign,assignment]
    server = serve(source)
    target.check(await target.pull(at(server)), Reason.CORRUPT, 3)
    assert (await target.pull(at(server), 3)).reason is Reason.COMPLETE  # a complaint has been dealt with by now
    assert server.stats().corrupt == 1 and source.stats().leases == 0


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("model_digest", "other", "model_digest is other there and m here"),
        ("isa", "vec", "isa is vec there and amx here"),
        ("hash_seed", "1", "hash_seed is 1 there and none here"),
        ("block_size", 32, "block_size is 32 there and 16 here"),
        ("tp_size", 2, "tp_size is 2 there and 1 here"),
        ("dtype", "", "dtype is unknown there and bfloat16 here"),
    ],
)
async def test_a_source_of_another_fingerprint_is_named_with_what_differs(
    tmp_path: Path, serve: Callable[..., TransferServer], field: str, value: str | int, told: str
) -> None:
    theirs = replace(FINGERPRINT, **{field: value})  # type: ignore[arg-type]
    pool, taker = (BlockPool(tmp_path / f"{n}.kvpool", 1 << 20) for n in ("source", "target"))
    if theirs.complete:
        pool.configure(theirs.digest(), BLOCK, 1)
        store(pool, chain(5))
    taker.configure(FINGERPRINT.digest(), BLOCK, 1)
    server = serve(pool, describe=theirs.to_fields)
    puller = Puller(taker, SECRET, "c", limits=LIMITS, describe=FINGERPRINT.to_fields)
    result = await puller.pull(at(server), range(5), DEADLINE_S)
    assert (result.reason, result.blocks, result.detail) == (Reason.MISMATCH, 0, told)
    assert server.stats().unlike == 1 and puller.stats().by_reason == {"mismatch": 1}
    await puller.close()
    pool.close()
    taker.close()


async def test_a_source_with_another_number_of_ranks_gives_nothing(
    pools: Pools, target: Target, serve: Callable[..., TransferServer]
) -> None:
    two = pools(32, ranks=2)
    store(two, chain(5), ranks=2)
    result = await target.pull(at(serve(two)))
    target.check(result, Reason.MISMATCH, 0)
    assert result.detail == "the blocks here have 2 ranks"


# -- the link ------------------------------------------------------------------------------------------------------


async def test_a_cut_link_is_dialled_again_and_the_pull_goes_on_where_it_stopped(
    source: BlockPool, target: Target, serve: Callable[..., TransferServer]
) -> None:
    server = serve(source)
    cut = threading.Event()
    leased = source.leased

    def cut_at_the_fifth(lease: object) -> object:
        found = leased(lease)  # type: ignore[arg-type]
        if found is not None and found[0].block_hash == block_hash(4) and not cut.is_set():
            cut.set()
            for transport in list(server._open):
                transport.close()
        return found

    source.leased = cut_at_the_fifth  # type: ignore[method-assign,assignment]
    result = await target.pull(at(server))
    target.check(result, Reason.COMPLETE, 10)
    assert [(part.reason, part.blocks) for part in result.parts] == [(Reason.BROKEN, 4), (Reason.COMPLETE, 6)]
    assert server.stats().accepted == 2


async def test_a_link_that_is_cut_again_and_again_is_given_up(
    source: BlockPool, target: Target, serve: Callable[..., TransferServer]
) -> None:
    server = serve(source)
    leased = source.leased

    def always_cut(lease: object) -> object:
        for transport in list(server._open):
            transport.close()
        return leased(lease)  # type: ignore[arg-type]

    source.leased = always_cut  # type: ignore[method-assign,assignment]
    result = await target.pull(at(server))
    target.check(result, Reason.BROKEN, 0)
    assert len(result.parts) == 2


async def test_the_next_source_gives_what_the_first_could_not(
    pools: Pools, source: BlockPool, target: Target, serve: Callable[..., TransferServer]
) -> None:
    def stall(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        two_good_ones(transport, deadline)
        bad.hold()

    bad = BadSource(stall)
    server = serve(source)
    result = await target.pull([Source(bad.address), Source(at(server))])
    target.check(result, Reason.COMPLETE, 10)
    assert [(part.reason, part.blocks) for part in result.parts] == [(Reason.SLOW, 2), (Reason.COMPLETE, 8)]
    bad.end()


async def test_one_slow_source_leaves_a_thread_to_the_others(
    source: BlockPool, pools: Pools, serve: Callable[..., TransferServer]
) -> None:
    asked = threading.Semaphore(0)

    def hold(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
        asked.release()
        bad.hold()

    bad = BadSource(hold)
    pool = pools(64)
    puller = Puller(pool, SECRET, "c", limits=replace(LIMITS, stall_s=5, threads=2, per_source=1))
    slow = [asyncio.create_task(puller.pull(bad.address, range(n), DEADLINE_S)) for n in (8, 9)]
    await asyncio.to_thread(asked.acquire, True, 5)
    assert (await puller.pull(at(serve(source)), range(10), DEADLINE_S)).blocks == 10
    assert not any(task.done() for task in slow)
    bad.end()
    await puller.close()
    await asyncio.gather(*slow)
    assert pool.stats().granted == 0


# -- our own side ----------------------------------------------------------------------------------------------------


async def test_a_pool_without_a_free_slot_takes_nothing(
    pools: Pools, source: BlockPool, serve: Callable[..., TransferServer]
) -> None:
    small = pools(8)
    store(small, chain(8, "mine"))
    leases = [small.lease(h, 0, 1e9, f"reader {n}") for n, h in enumerate(chain(8, "mine"))]
    target = Target(small)
    result = await target.pull(at(serve(source)))
    assert (result.reason, result.blocks) == (Reason.FULL, 0)
    assert small.stats().granted == 0 and len(small.lookup(chain(8, "mine"), use=False)) == 8
    for lease in leases:
        assert lease is not None
        small.release(lease)
    await target.puller.close()


async def test_a_request_that_is_aborted_while_its_blocks_come(
    source: BlockPool, target: Target, serve: Callable[..., TransferServer]
) -> None:
    server = serve(source)
    begun, go_on = threading.Event(), threading.Event()
    leased = source.leased

    def wait_at_the_first(lease: object) -> object:
        begun.set()
        go_on.wait(10)
        return leased(lease)  # type: ignore[arg-type]

    source.leased = wait_at_the_first  # type: ignore[method-assign,assignment]
    target.puller._limits = replace(LIMITS, stall_s=10)
    pull = asyncio.create_task(target.pull(at(server)))
    await asyncio.to_thread(begun.wait, 5)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    go_on.set()
    again = await target.pull(at(server))  # shares the flight that the first one left behind
    assert (again.joined, again.blocks) == (True, 10)
    target.check(again, Reason.COMPLETE, 10)


# -- hostile peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "junk",
    [
        wire._prefix(wire.Kind.BLOCK, 0, (256 << 20) + 1, bytes(16)),
        wire._prefix(wire.Kind.BLOCK, 0, 256 << 20, bytes(16)),
        wire._prefix(wire.Kind.ERROR, 0, (1 << 20) + 1, bytes(16)),
        wire._prefix(wire.Kind.MISS, 0, 3, bytes(16)) + b"\xc1\xc1\xc1",
        wire.encode(messages.Miss(7)),
        wire.encode(messages.Welcome()),
        wire.encode(messages.Manifest("", 0, ())),
        wire.encode(messages.Pinned(())),
        b"HTTP/1.1 200 OK\r\n\r\n" + bytes(64),
    ],
    ids=["giant", "large", "giant text", "no msgpack", "wrong miss", "welcome", "manifest", "pinned", "http"],
)  # fmt: skip
async def test_a_source_that_answers_nonsense(target: Target, junk: bytes) -> None:
    bad = BadSource(lambda transport, fetch, deadline: transport.socket.sendall(junk))
    target.check(await target.pull(bad.address), Reason.BROKEN, 0)
    bad.end()


async def test_a_puller_that_never_reads_costs_a_stall_and_no_lease(
    pools: Pools, serve: Callable[..., TransferServer]
) -> None:
    big = pools(12, block=1 << 20)
    store(big, chain(10))
    server = serve(big, limits=ServerLimits(stall_s=0.2, transfers=1))
    transport, deadline = connected(server)
    transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    transport.send(messages.Fetch(tuple(messages.Key(h, 0) for h in chain(10)) * 4), deadline)
    await asyncio.to_thread(_ended, server)
    assert server.stats().broken == 1 and big.stats().leases == 0
    assert server._turns.acquire(blocking=False)  # its turn is over
    server._turns.release()
    transport.close()


async def test_a_puller_that_drips_its_request_is_cut_off(
    source: BlockPool, serve: Callable[..., TransferServer]
) -> None:
    server = serve(source, limits=ServerLimits(handshake_s=0.3, stall_s=0.3))
    with socket.create_connection(("127.0.0.1", server.port)) as drip:
        frame = wire.encode(messages.Hello(wire.PROTOCOL_VERSION, "c", "drip", bytes(16)))
        ended = threading.Event()

        def send_one_byte_at_a_time() -> None:
            for byte in frame:
                try:
                    drip.sendall(bytes([byte]))
                except OSError:
                    return
                if ended.wait(0.05):
                    return

        sender = threading.Thread(target=send_one_byte_at_a_time)
        sender.start()
        await asyncio.to_thread(_ended, server)
        ended.set()
        sender.join(5)
    assert server.stats().broken == 1 and server.stats().lookups == 0


def _ended(server: TransferServer) -> None:
    """Wait for the threads that serve to end."""
    give_up = time.monotonic() + 10
    while not server.stats().accepted and time.monotonic() < give_up:
        threading.Event().wait(0.01)
    for thread in threading.enumerate():
        if thread.name == "kv-serve":
            thread.join(10)
            assert not thread.is_alive()


# -- negative control ------------------------------------------------------------------------------------------------


async def test_without_the_check_of_digests_the_wrong_bytes_would_be_noticed_here(
    source: BlockPool, target: Target, serve: Callable[..., TransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks above are worth something: with verification bypassed and a block zeroed they fail."""
    offset = source.header.geometry.slot_offset(source.lookup([block_hash(5)])[0].index)
    source._file.bytes[offset : offset + BLOCK] = bytes(BLOCK)

    def believe(self: fetch.Fetching, slot: object, entry: messages.Entry, announced: bytes, found: bytes) -> None:
        self._commit(slot, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch.Fetching, "_judge", believe)
    result = await target.pull(at(serve(source)))
    assert result.reason is Reason.COMPLETE
    with pytest.raises(AssertionError):
        target.holds(10)
