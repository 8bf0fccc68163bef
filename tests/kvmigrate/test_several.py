"""One prefix from several sources at once, over real sockets between real pools, whatever the sources do.

Each ends the same way: the blocks that are here have their own bytes, nothing came twice without a reason, every slot
and lease is back, and no source that is slow, silent or gone has held up the pull.
"""

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

from kvmigrate import crew, messages
from kvmigrate.digest import block_digest
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import PullResult, Reason, Source
from kvmigrate.puller import Puller, PullLimits
from kvmigrate.server import TransferServer
from kvmigrate.transport import Deadline, Transport

from .bad_source import BadSource
from .helpers import SECRET, block_hash, chain, content, flip, store

Pools = Callable[..., BlockPool]
BLOCK = 256 << 10
BLOCKS = 48
#: Of a source here, bytes per second: so slow that a second one pays, and that no two cores are needed for both.
RATE = 30e6
DEADLINE_S = 20.0
LIMITS = PullLimits(connect_s=5.0, stall_s=6.0)


def resolve(chunks: Sequence[int]) -> list[bytes]:
    return [block_hash(chunk) for chunk in chunks]


class Target:
    """A pool, its puller, and what must be true after each pull."""

    def __init__(self, pool: BlockPool, ranks: int = 1) -> None:
        self.pool = pool
        self.ranks = ranks
        self.puller = Puller(pool, SECRET, "c", name="target", limits=LIMITS)
        self.took_s = 0.0

    async def pull(self, sources: Sequence[Source], n: int = BLOCKS) -> PullResult:
        began = time.monotonic()
        result = await self.puller.pull(sources, range(n), DEADLINE_S)
        self.took_s = time.monotonic() - began
        return result

    def holds(self, n: int) -> None:
        """The first n blocks of the chain are here with their own bytes, and nothing is kept back."""
        assert len(self.pool.lookup(chain(BLOCKS), use=False)) == n
        for rank in range(self.ranks):
            for h in chain(n):
                lease = self.pool.lease(h, rank, 1e9)
                assert lease is not None
                found = self.pool.leased(lease)
                assert found is not None and bytes(found[1]) == content(h, rank, BLOCK)
                self.pool.release(lease)
        stats = self.pool.stats()
        assert (stats.granted, stats.leases) == (0, 0)
        self.pool.validate()


@pytest.fixture
async def target(pools: Pools) -> AsyncIterator[Target]:
    target = Target(pools(2 * BLOCKS + 8, block=BLOCK))
    yield target
    await target.puller.close()


class Server:
    """A source in this process that gives `rate` bytes per second."""

    def __init__(self, pool: BlockPool, rate: float) -> None:
        self.pool = pool
        self.rate = rate
        self.sent: list[bytes] = []
        #: Called with each block before it is sent.
        self.before: Callable[[bytes], None] = lambda block_hash: None
        self._leased = pool.leased
        pool.leased = self._slowly  # type: ignore[method-assign,assignment]
        self.server = TransferServer(pool, resolve, SECRET, "c")
        self.server.start()

    def _slowly(self, lease: object) -> object:
        found = self._leased(lease)  # type: ignore[arg-type]
        if found is not None:
            self.before(found[0].block_hash)
            self.sent.append(found[0].block_hash)
            time.sleep(found[0].nbytes / self.rate)
        return found

    def source(self, n: int = BLOCKS, rate: float = RATE) -> Source:
        return Source(f"127.0.0.1:{self.server.port}", n, rate, 0.002)

    def close(self) -> None:
        self.server.close()
        assert self.pool.stats().leases == 0


@pytest.fixture
def serve(pools: Pools) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(n: int = BLOCKS, rate: float = RATE, ranks: int = 1) -> Server:
        pool = pools(2 * BLOCKS, block=BLOCK, ranks=ranks)
        store(pool, chain(n), ranks)
        servers.append(Server(pool, rate))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


async def test_two_sources_give_a_part_each(serve: Callable[..., Server], target: Target) -> None:
    a, b = serve(), serve()
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert set(a.sent + b.sent) == set(chain(BLOCKS))
    assert len(a.sent + b.sent) <= BLOCKS + result.taken_over, "no block came twice without a reason"
    assert {part.address for part in result.parts if part.blocks} == {a.source().address, b.source().address}
    assert target.puller.stats().shared == 1
    target.holds(BLOCKS)


async def test_with_several_ranks_too(pools: Pools, serve: Callable[..., Server]) -> None:
    target = Target(pools(2 * BLOCKS + 8, block=BLOCK, ranks=2), 2)
    a, b = serve(ranks=2), serve(ranks=2)
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks, result.bytes) == (Reason.COMPLETE, BLOCKS, 2 * BLOCKS * BLOCK)
    assert min(part.blocks for part in result.parts) >= BLOCKS // 4
    target.holds(BLOCKS)
    await target.puller.close()


async def test_connections_stay_warm_and_a_second_pull_asks_for_nothing(
    serve: Callable[..., Server], target: Target
) -> None:
    a, b = serve(), serve()
    await target.pull([a.source(), b.source()])
    again = await target.pull([a.source(), b.source()])
    assert (again.reason, again.blocks) == (Reason.COMPLETE, 0)
    assert [server.server.stats().accepted for server in (a, b)] == [1, 1]


async def test_a_source_that_has_only_the_front_helps_there(serve: Callable[..., Server], target: Target) -> None:
    a, front = serve(), serve(BLOCKS // 2)
    result = await target.pull([a.source(), front.source(BLOCKS // 2)])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert front.sent and set(front.sent) <= set(chain(BLOCKS // 2))
    target.holds(BLOCKS)


async def test_the_time_in_which_a_source_has_nothing_to_give_does_not_make_it_slow(
    serve: Callable[..., Server], target: Target
) -> None:
    a, front = serve(rate=RATE / 2), serve(20)
    result = await target.pull([a.source(rate=RATE / 2), front.source(20)])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    helped = next(part for part in result.parts if part.address == front.source().address)
    assert 0 < helped.blocks <= 20 and helped.seconds < 0.7 * result.seconds


async def test_what_is_here_in_the_middle_is_not_asked_for_again(serve: Callable[..., Server], target: Target) -> None:
    store(target.pool, chain(30)[10:])
    a, b = serve(), serve()
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks, result.present) == (Reason.COMPLETE, BLOCKS - 20, BLOCKS)
    assert not set(a.sent + b.sent) & set(chain(30)[10:])
    target.holds(BLOCKS)


async def test_a_small_pull_is_not_shared(serve: Callable[..., Server], target: Target) -> None:
    a, b = serve(rate=1e9), serve(rate=1e9)
    result = await target.pull([a.source(4, 1e9), b.source(4, 1e9)], 4)
    assert (result.reason, result.blocks) == (Reason.COMPLETE, 4)
    assert b.server.stats().accepted == 0, "nobody troubled it"
    target.holds(4)


async def test_a_source_without_a_free_turn_is_left_alone(serve: Callable[..., Server], target: Target) -> None:
    a, b = serve(), serve()
    for _ in range(LIMITS.per_source):
        await target.puller._turns.take(b.source().address)
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks, b.sent) == (Reason.COMPLETE, BLOCKS, [])
    for _ in range(LIMITS.per_source):
        target.puller._turns.give_back(b.source().address)


async def test_a_source_at_a_tenth_of_its_promised_rate_does_not_hold_up_the_pull(
    serve: Callable[..., Server], target: Target
) -> None:
    slow, good = serve(rate=RATE / 10), serve()
    result = await target.pull([slow.source(), good.source()])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert result.taken_over > 0 and len(good.sent) > len(slow.sent)
    target.holds(BLOCKS)


async def test_blocks_that_one_lost_meanwhile_come_from_the_other(serve: Callable[..., Server], target: Target) -> None:
    a, b = serve(), serve()
    a.before = lambda h: [a.pool.evict(other) for other in chain(BLOCKS)[6:]] and None  # type: ignore[func-returns-value]
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert {part.reason for part in result.parts} == {Reason.GONE, Reason.COMPLETE}
    target.holds(BLOCKS)


async def test_what_comes_before_a_hole_that_nobody_can_fill_counts(
    serve: Callable[..., Server], target: Target
) -> None:
    a, b = serve(), serve()
    for server in (a, b):
        server.before = lambda h, pool=server.pool: pool.evict(block_hash(30)) and None  # type: ignore[misc]
    result = await target.pull([a.source(), b.source()])
    assert result.reason is Reason.GONE and result.present == 30
    target.holds(30)


async def test_a_flipped_bit_is_told_to_its_source_and_the_block_comes_from_the_other(
    serve: Callable[..., Server], target: Target
) -> None:
    a, b = serve(), serve()
    for h in chain(BLOCKS):
        flip(a.pool, h)
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks, result.corrupt) == (Reason.COMPLETE, BLOCKS, 1)
    target.holds(BLOCKS)
    a.server.close()  # it has dealt with the complaint by then
    assert a.server.stats().corrupt == 1


async def test_what_a_bad_source_still_sends_is_not_waited_for_long(
    serve: Callable[..., Server], target: Target
) -> None:
    bad, good = serve(rate=RATE / 200), serve()  # it sends what it was asked for in 15 seconds
    flip(bad.pool, block_hash(0))
    result = await target.pull([bad.source(), good.source()])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert target.took_s < 10.0
    target.holds(BLOCKS)


def liar(transport: Transport, fetch: messages.Fetch, deadline: Deadline) -> None:
    """Every block under its right digest with another one's bytes."""
    data = content(block_hash(99))
    for index, key in enumerate(fetch.keys):
        header = messages.BlockHeader(index, len(data), block_digest(content(key.block_hash)))
        transport.send_block(header, memoryview(data), deadline)


async def test_a_liar_beside_an_honest_source_costs_nothing_but_its_part(pools: Pools) -> None:
    honest = pools(64)
    store(honest, chain(40))
    target = pools(128)
    server = TransferServer(honest, resolve, SECRET, "c")
    server.start()
    bad = BadSource(liar, 40)
    puller = Puller(target, SECRET, "c", limits=LIMITS)
    # at this rate a few blocks are worth sharing
    result = await puller.pull(
        [Source(bad.address, 40, 1e6, 0.0), Source(f"127.0.0.1:{server.port}", 40, 1e6, 0.0)], range(40), DEADLINE_S
    )
    assert (result.reason, result.blocks, result.present) == (Reason.COMPLETE, 40, 40)
    assert {part.reason for part in result.parts if part.address == bad.address} == {Reason.CORRUPT}
    assert target.check_slots(range(target.header.geometry.slots)) == 0 and target.stats().granted == 0
    await puller.close()
    server.close()
    bad.end()


async def test_a_source_that_names_another_chain_is_of_use_up_to_where_it_differs(
    pools: Pools, serve: Callable[..., Server], target: Target
) -> None:
    other = pools(2 * BLOCKS, block=BLOCK)
    store(other, [*chain(10), *chain(BLOCKS, "b")[10:]])
    server = TransferServer(other, lambda chunks: [block_hash(n, "a" if n < 10 else "b") for n in chunks], SECRET, "c")
    server.start()
    a = serve()
    result = await target.pull([a.source(), Source(f"127.0.0.1:{server.port}", BLOCKS, RATE, 0.0)])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert target.pool.stats().blocks == BLOCKS, "nothing of the other chain came"
    target.holds(BLOCKS)
    server.close()


async def test_a_source_beside_us_and_one_elsewhere_give_together(
    tmp_path: Path, pools: Pools, serve: Callable[..., Server]
) -> None:
    """The file of one lies beside our own: it is read, as slowly as the other sends."""
    made = []
    for name in ("near", "target"):
        pool = BlockPool(tmp_path / f"{name}.kvpool", 3 * 4096 + 2 * BLOCKS * (BLOCK + 64))
        pool.configure(pools().header.fingerprint, BLOCK, 1)
        made.append(pool)
    near, mine = made
    store(near, chain(BLOCKS))
    beside, far, target = Server(near, RATE), serve(), Target(mine)
    lease = near.lease

    def slowly(*args: object) -> object:
        time.sleep(BLOCK / RATE)
        return lease(*args)  # type: ignore[arg-type]

    near.lease = slowly  # type: ignore[method-assign,assignment]
    result = await target.pull([beside.source(), far.source()])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert {part.way for part in result.parts} == {"same host", "tcp"}
    assert min(part.blocks for part in result.parts) >= BLOCKS // 8
    target.holds(BLOCKS)
    await target.puller.close()
    beside.close()
    for pool in made:
        pool.close()


@pytest.fixture
def silent() -> Iterator[Source]:
    """One that lets itself be dialled and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Source(f"127.0.0.1:{listener.getsockname()[1]}", BLOCKS, RATE, 0.0)


async def test_a_pull_is_not_longer_for_a_helper_that_never_answers(
    serve: Callable[..., Server], target: Target, silent: Source
) -> None:
    a = serve()
    result = await target.pull([a.source(), silent])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert target.took_s < LIMITS.connect_s, "it is dialled for that long"
    target.holds(BLOCKS)


async def test_where_the_first_does_not_answer_the_next_is_asked_soon(
    serve: Callable[..., Server], target: Target, silent: Source
) -> None:
    a = serve()
    result = await target.pull([silent, a.source()])
    assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
    assert target.took_s < LIMITS.connect_s, "it is dialled for that long"


async def test_no_more_helpers_than_there_are_threads(serve: Callable[..., Server], target: Target) -> None:
    target.puller._limits = replace(LIMITS, helpers=0)
    a, b = serve(), serve()
    result = await target.pull([a.source(), b.source()])
    assert (result.reason, result.blocks, b.sent) == (Reason.COMPLETE, BLOCKS, [])


async def test_a_caller_that_goes_away_leaves_nothing_behind(serve: Callable[..., Server], target: Target) -> None:
    a, b = serve(), serve()
    begun = threading.Event()
    b.before = lambda h: begun.set()
    pull = asyncio.create_task(target.pull([a.source(), b.source()]))
    assert await asyncio.to_thread(begun.wait, 60)
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    again = await target.pull([a.source(), b.source()])  # shares the flight that the first one left behind
    assert again.joined and again.blocks == BLOCKS
    target.holds(BLOCKS)


async def test_closing_breaks_off_all_parts(serve: Callable[..., Server], target: Target) -> None:
    a, b = serve(rate=RATE / 20), serve(rate=RATE / 20)
    begun = threading.Event()
    b.before = lambda h: begun.set()
    pull = asyncio.create_task(target.pull([a.source(rate=RATE / 20), b.source(rate=RATE / 20)]))
    assert await asyncio.to_thread(begun.wait, 60)
    began = time.monotonic()
    await target.puller.close()
    result = await pull
    assert result.reason is Reason.BROKEN and time.monotonic() - began < 2.0
    assert target.pool.stats().granted == 0


# -- sources that are killed and stopped -----------------------------------------------------------------------------

SOURCE = """
import pathlib, sys, time
from kvmigrate.server import TransferServer
from tests.kvmigrate.helpers import SECRET, block_hash, chain, make_pool, store
directory, blocks, size, rate = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
directory.mkdir()
pool = make_pool(directory, 2 * blocks, block=size)
store(pool, chain(blocks))
leased, count = pool.leased, 0
def slowly(lease):
    global count
    count += 1
    if count == 3:
        print("third", flush=True)
    time.sleep(size / rate)
    return leased(lease)
pool.leased = slowly
server = TransferServer(pool, lambda chunks: [block_hash(c) for c in chunks], SECRET, "c")
server.start()
print(server.port, flush=True)
sys.stdin.read()
"""


@contextlib.asynccontextmanager
async def elsewhere(directory: Path, n: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, Source]]:
    """A source in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SOURCE, str(directory), str(n), str(BLOCK), str(int(RATE)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 60))
        yield process, Source(f"127.0.0.1:{port}", n, RATE, 0.002)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait_for(process.communicate(), 60)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("first", [True, False], ids=["the first", "the other"])
async def test_a_source_that_is_killed_or_stopped_midway_is_replaced_by_the_other(
    tmp_path: Path, serve: Callable[..., Server], target: Target, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals,
    *, first: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(crew, "DRAIN_S", 60.0)  # it has nothing to end by itself
    good = serve()
    async with elsewhere(tmp_path / "source", BLOCKS) as (process, bad):
        asked = [bad, good.source()] if first else [good.source(), bad]
        pull = asyncio.create_task(target.pull(asked))
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"third\n"
        os.kill(process.pid, sign)
        result = await pull
        assert (result.reason, result.blocks) == (Reason.COMPLETE, BLOCKS)
        assert target.took_s < LIMITS.stall_s, "nobody waited for it"
        lost = [part for part in result.parts if part.address == bad.address]
        assert lost[0].reason in {Reason.BROKEN, Reason.SLOW} and 0 < lost[0].blocks < BLOCKS
        assert result.taken_over > 0 and target.puller.stats().taken_over == result.taken_over
        target.holds(BLOCKS)


async def test_what_only_the_killed_one_had_ends_the_pull_where_the_other_ends(
    tmp_path: Path, serve: Callable[..., Server], target: Target
) -> None:
    good = serve(10)
    async with elsewhere(tmp_path / "source", BLOCKS) as (process, bad):
        pull = asyncio.create_task(target.pull([bad, good.source(10)]))
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"third\n"
        process.kill()
        result = await pull
        assert result.reason is Reason.BROKEN and 10 <= result.present < BLOCKS
        assert target.took_s < LIMITS.stall_s
        target.holds(result.present)
