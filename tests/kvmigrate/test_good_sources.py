"""A source that keeps the protocol, over real loopback sockets: what it gives, to whom, and what it does with junk."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmigrate.errors import LocalError
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import Reason
from kvmigrate.puller import Puller, PullLimits
from kvmigrate.server import ServerLimits, TransferServer
from tests.waiting import until

from .helpers import BLOCK, OTHER_FINGERPRINT, SECRET, block_hash, chain, flip, store
from .served import LIMITS, at, holds, resolve

Pools = Callable[..., BlockPool]


async def test_a_chain_is_pulled_whole_and_with_the_right_bytes(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    result = await puller.pull(at(server), range(30), 10)
    assert (result.reason, result.blocks, result.bytes, result.present) == (Reason.COMPLETE, 20, 20 * BLOCK, 20)
    assert 0 < result.lookup_s <= result.seconds
    holds(target, 20)
    await until(lambda: source.stats().leases == 0)  # its thread is a moment behind the last block
    assert (server.stats().blocks, server.stats().bytes) == (20, 20 * BLOCK)


async def test_only_what_is_missing_is_fetched_and_the_connection_stays_warm(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    store(target, chain(5))
    assert (await puller.pull(at(server), range(10), 10)).blocks == 5
    assert (await puller.pull(at(server), range(20), 10)).blocks == 10
    again = await puller.pull(at(server), range(20), 10)
    assert (again.reason, again.blocks, again.present) == (Reason.COMPLETE, 0, 20)
    assert server.stats().accepted == 1 and server.stats().blocks == 15


async def test_pulled_chains_are_evicted_from_their_end(
    pools: Pools, source: BlockPool, serve: Callable[..., TransferServer]
) -> None:
    small = pools(16)
    puller = Puller(small, SECRET, "c", limits=LIMITS)
    result = await puller.pull(at(serve(source)), range(20), 10)
    assert (result.reason, result.blocks) == (Reason.COMPLETE, 8)  # never more than half of a pool for one chain
    store(small, chain(12, "b"))
    assert len(small.lookup(chain(8), use=False)) == 4
    await puller.close()


@pytest.mark.parametrize("used_again", [False, True])
async def test_what_a_peer_took_for_a_request_goes_first_unless_it_is_used_again(
    used_again: bool, source: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    only_here = chain(20, "b")
    store(source, only_here)
    assert (await puller.pull(at(serve(source)), range(20), 10)).blocks == 20
    await until(lambda: source.stats().leases == 0)
    if used_again:
        source.touch(chain(20))
    store(source, chain(34, "c"))  # ten more than there is room for
    left = [sum(source.held(hashes)) for hashes in (chain(20), only_here)]
    assert left == ([20, 10] if used_again else [10, 20])


async def test_with_several_ranks_all_shards_come(pools: Pools, serve: Callable[..., TransferServer]) -> None:
    source, target = pools(32, ranks=2), pools(32, ranks=2)
    store(source, chain(6), ranks=2)
    store(source, [block_hash(6)])  # rank 0 only: not a block
    puller = Puller(target, SECRET, "c", limits=LIMITS)
    result = await puller.pull(at(serve(source)), range(10), 10)
    assert (result.blocks, result.bytes) == (6, 12 * BLOCK)
    assert len(target.lookup(chain(10), 1)) == 6
    await puller.close()


async def test_a_flipped_bit_is_noticed_counted_reported_and_not_delivered(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    flip(source, block_hash(5))
    result = await puller.pull(at(server), range(20), 10)
    assert (result.reason, result.blocks, result.corrupt, result.present) == (Reason.CORRUPT, 5, 1, 5)
    holds(target, 5)
    assert puller.stats().corrupt == 1
    # the same connection is still good, and the source has looked at its own copy before it answers
    result = await puller.pull(at(server), range(19), 10)
    assert (result.reason, result.present) == (Reason.COMPLETE, 5)
    assert server.stats().corrupt == 1 and server.stats().accepted == 1
    assert not source.lookup([block_hash(5)])


async def test_a_block_evicted_after_the_manifest_ends_the_pull_at_the_block_before(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    original = source.lease

    def lease_but_lose_one(h: bytes, rank: int, until: float, peer: str = "") -> object:
        if h == block_hash(7):
            source.evict(h)
        return original(h, rank, until, peer)

    source.lease = lease_but_lose_one  # type: ignore[method-assign,assignment]
    result = await puller.pull(at(server), range(20), 10)
    assert (result.reason, result.blocks) == (Reason.GONE, 7)
    holds(target, 7)
    assert (await puller.pull(at(server), range(7), 10)).reason is Reason.COMPLETE
    assert server.stats().accepted == 1


async def test_another_fingerprint_or_rank_count_moves_nothing(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    target.configure(OTHER_FINGERPRINT, BLOCK, 1)
    assert (await puller.pull(at(server), range(20), 10)).reason is Reason.MISMATCH
    assert target.stats().blocks == 0


async def test_pools_without_an_engine_give_and_take_nothing(
    tmp_path: Path, source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    empty = BlockPool(tmp_path / "empty.kvpool", 1 << 20)
    assert (await puller.pull(at(serve(empty)), range(3), 10)).reason is Reason.MISMATCH
    taker = Puller(empty, SECRET, "c", limits=LIMITS)
    assert (await taker.pull(at(serve(source)), range(3), 10)).reason is Reason.UNCONFIGURED
    await taker.close()
    empty.close()


async def test_nothing_to_give_is_said(source: BlockPool, serve: Callable[..., TransferServer], puller: Puller) -> None:
    assert (await puller.pull(at(serve(source)), range(100, 120), 10)).reason is Reason.NOTHING


@pytest.mark.parametrize(("secret", "label"), [(b"wrong", "c"), (None, "c"), (SECRET, "other")])
async def test_strangers_are_refused(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], secret: bytes | None, label: str
) -> None:
    server = serve(source)
    puller = Puller(target, secret, label, limits=LIMITS)
    result = await puller.pull(at(server), range(20), 10)
    assert result.reason is Reason.REFUSED and result.detail
    assert target.stats().blocks == 0 and server.stats().lookups == 0
    await puller.close()


async def test_one_pull_serves_all_who_want_the_same_chain(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    results = await asyncio.gather(*(puller.pull(at(server), range(20), 10) for _ in range(8)))
    assert {r.blocks for r in results} == {20}
    assert server.stats().lookups == 1 and puller.stats().joined == 7
    assert [r.joined for r in results] == [False] + [True] * 7


async def test_a_caller_that_goes_away_does_not_break_the_pull_for_others(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    first = asyncio.create_task(puller.pull(at(server), range(20), 10))
    second = asyncio.create_task(puller.pull(at(server), range(20), 10))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).blocks == 20


async def test_too_many_pulls_are_refused_and_not_queued_for_ever(target: BlockPool) -> None:
    puller = Puller(target, SECRET, "c", limits=PullLimits(threads=1, waiting=2, stall_s=0.2, lookup_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        results = await asyncio.gather(*(puller.pull(address, [n], 1) for n in range(5)))
    assert [r.reason for r in results].count(Reason.BUSY) == 3
    await puller.close()


async def test_a_source_with_all_hands_full_says_busy(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source, limits=ServerLimits(transfers=1, busy_wait_s=0.01))
    assert server._turns.acquire()
    assert (await puller.pull(at(server), range(20), 10)).reason is Reason.BUSY
    server._turns.release()
    assert (await puller.pull(at(server), range(20), 10)).blocks == 20
    assert server.stats().busy >= 1


async def test_more_connections_than_allowed_are_turned_away(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source, limits=ServerLimits(connections=1, spare_s=60))
    assert (await puller.pull(at(server), range(5), 10)).blocks == 5
    other = Puller(target, SECRET, "c", limits=LIMITS)
    assert (await other.pull(at(server), range(20), 10)).reason is Reason.UNREACHABLE
    assert server.stats().turned_away == 1
    await other.close()


async def test_a_source_with_more_peers_than_connections_closes_those_that_are_idle_for_longest(
    source: BlockPool, pools: Pools, serve: Callable[..., TransferServer]
) -> None:
    began, skipped = time.monotonic(), [0.0]
    limits = ServerLimits(connections=2, spare_s=1.0)
    server = serve(source, limits=limits, clock=lambda: began + skipped[0])
    pullers = [Puller(pools(64), SECRET, "c", name=f"n{n}", limits=LIMITS) for n in range(5)]
    for turn in range(2):
        for puller in pullers:
            await until(lambda: len(server._idle) == server.stats().connections)
            skipped[0] += 0.9  # so the one that was used last has been idle for too short a time
            assert (await puller.pull(at(server), range(3 + turn), 10)).present == 3 + turn
    stats = server.stats()
    assert (stats.turned_away, stats.broken, stats.connections) == (0, 0, 2)
    for puller in pullers:
        await puller.close()


async def test_a_restarted_source_costs_nothing_but_a_new_connection(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], puller: Puller
) -> None:
    server = serve(source)
    address = at(server)
    assert (await puller.pull(address, range(5), 10)).blocks == 5
    server.close()
    serve(source, port=int(address.split(":")[1]))
    assert (await puller.pull(address, range(10), 10)).blocks == 5


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "nonsense", "host:99999", ":", "127.0.0.1:x", "a..b:1", "x" * 64 + ":1", "\u2028:1"]
)
async def test_nobody_there_is_no_exception(address: str, puller: Puller) -> None:
    assert (await puller.pull(address, range(5), 5)).reason is Reason.UNREACHABLE


def test_a_port_that_is_taken_is_named(source: BlockPool, serve: Callable[..., TransferServer]) -> None:
    server = serve(source)
    with pytest.raises(LocalError, match=f"port {server.port}"):
        TransferServer(source, resolve, SECRET, "c", port=server.port).start()


async def test_a_connection_for_which_there_is_no_thread_is_closed_and_others_are_served(
    source: BlockPool, target: BlockPool, serve: Callable[..., TransferServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, start, refused = serve(source), threading.Thread.start, list[str]()

    def without(thread: threading.Thread) -> None:
        if thread.name == "kv-serve" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", without)
    puller = Puller(target, SECRET, "c", limits=LIMITS)
    assert (await puller.pull(at(server), range(10), 10)).reason is Reason.UNREACHABLE
    assert (await puller.pull(at(server), range(10), 10)).blocks == 10
    assert server.stats().turned_away == 1 and server.stats().connections == 1 and refused
    await puller.close()


def test_limits_that_outlive_the_leases_are_refused() -> None:
    with pytest.raises(LocalError, match="leases"):
        ServerLimits(stall_s=30)


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b"\0" * 64, b"GVK\x01\x05\xff" + b"\xff" * 64])
def test_junk_costs_its_connection_and_nothing_else(
    source: BlockPool, serve: Callable[..., TransferServer], junk: bytes
) -> None:
    server = serve(source)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(junk)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert server.stats().lookups == 0


SOURCE = """
import pathlib, sys
from kvmigrate.server import TransferServer
from tests.kvmigrate.helpers import SECRET, block_hash, chain, make_pool, store
pool = make_pool(pathlib.Path(sys.argv[1]), 64)
store(pool, chain(12))
server = TransferServer(pool, lambda chunks: [block_hash(c) for c in chunks], SECRET, "c")
server.start()
print(server.port, flush=True)
sys.stdin.read()
"""


async def test_a_source_in_another_process_that_is_killed_is_unreachable(
    tmp_path: Path, target: BlockPool, puller: Puller
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SOURCE, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        assert (await puller.pull(address, range(6), 10)).blocks == 6
    finally:
        process.kill()
        await asyncio.wait_for(process.communicate(), 60)
    result = await puller.pull(address, range(12), 5)
    assert (result.reason, result.blocks) == (Reason.UNREACHABLE, 0)
    holds(target, 6)
