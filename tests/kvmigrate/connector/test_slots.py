"""The stock of slots that a worker has at hand: real link, real pool, and steps that fill many blocks at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvmigrate.connector.slots import PoolSlots, stock_for
from kvmigrate.digest import block_digest
from kvmigrate.link import Hello, LinkClient, SlotGrant
from kvmigrate.link.messages import Role
from kvmigrate.link.server import STOCK, EngineLink
from kvmigrate.pool import BlockPool
from tests.kvmigrate.helpers import BLOCK, FINGERPRINT, OTHER_FINGERPRINT, Clock, block_hash, chain
from tests.waiting import PATIENCE_S

TOKENS = 16
STEP_TOKENS = 50 * TOKENS
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # as the connector does


class Worker:
    """A worker half as far as saving goes."""

    def __init__(self, link: Path, *, rank: int = 0, ranks: int = 1, fingerprint: bytes = FINGERPRINT) -> None:
        hello = Hello(Role.WORKER, rank, ranks, os.getpid(), fingerprint, BLOCK, TOKENS)
        self.slots = PoolSlots(LinkClient(link, lambda: hello), rank, BLOCK, stock=stock_for(STEP_TOKENS, TOKENS))

    @property
    def at_hand(self) -> int:
        """Granted slots."""
        return len(self.slots._grants)

    def save(self, hashes: list[bytes]) -> int:
        """What a step does with the blocks that it completed; returns how many found a slot."""
        items: list[tuple[SlotGrant, bytes, bytes]] = []
        for name in hashes:
            place = self.slots.begin_write()
            if place is not None:
                grant, room = place
                room[:] = (name * (BLOCK // len(name)))[:BLOCK]
                items.append((grant, name, block_digest(room)))
        self.slots.stored(items)
        return len(items)

    async def until(self, what: Callable[[], bool]) -> None:
        """Poll as a step does, until something is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                self.slots.poll()
                await asyncio.sleep(0.002)


Serve = Callable[..., Awaitable[tuple[EngineLink, BlockPool]]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a node's side of the link with a pool of so many blocks, not configured yet."""
    running: list[tuple[EngineLink, BlockPool]] = []

    async def start(blocks: int, ranks: int = 1) -> tuple[EngineLink, BlockPool]:
        pool = BlockPool(tmp_path / "n.kvpool", 3 * 4096 + blocks * ranks * (BLOCK + 64), Clock())
        link = EngineLink(tmp_path / "link", pool, lambda event: None)
        await link.start()
        running.append((link, pool))
        return link, pool

    yield start
    for link, pool in running:
        await link.close()
        pool.validate()
        pool.close()


def test_the_stock_is_two_full_steps() -> None:
    assert [stock_for(8192, 16), stock_for(17, 16), stock_for(16, 16)] == [1024, 4, 2]


async def test_a_step_that_completes_more_blocks_than_the_first_grant_saves_all_of_them(
    tmp_path: Path, serve: Serve
) -> None:
    _, pool = await serve(512)
    worker = Worker(tmp_path / "link")
    await worker.until(lambda: worker.at_hand >= 100)
    step = chain(50)
    assert len(step) > STOCK and worker.save(step) == 50
    await worker.until(lambda: len(pool.lookup(step, use=False)) == 50)
    await worker.until(lambda: worker.at_hand == 100)
    worker.slots.close()


async def test_the_stock_comes_back_after_a_clear_and_with_a_new_pool(tmp_path: Path, serve: Serve) -> None:
    link, pool = await serve(512)
    worker = Worker(tmp_path / "link")
    await worker.until(lambda: worker.at_hand >= 100)
    epoch = pool.header.epoch
    pool.clear()
    await link.flush()
    await worker.until(lambda: worker.at_hand == 0)
    await worker.until(lambda: worker.at_hand >= 100)
    assert pool.header.epoch != epoch and worker.save(chain(50, "b")) == 50
    await worker.until(lambda: len(pool.lookup(chain(50, "b"), use=False)) == 50)
    other = Worker(tmp_path / "link", fingerprint=OTHER_FINGERPRINT)
    await other.until(lambda: other.at_hand >= 100)
    assert other.save(chain(50, "c")) == 50
    await other.until(lambda: len(pool.lookup(chain(50, "c"), use=False)) == 50)
    worker.slots.close()
    other.slots.close()


async def test_who_wants_less_than_before_keeps_what_was_granted(tmp_path: Path, serve: Serve) -> None:
    _, pool = await serve(512)
    worker = Worker(tmp_path / "link")
    await worker.until(lambda: worker.at_hand >= 100)
    assert worker.save(chain(110)) == 100  # ten short: more are wanted from then on
    await worker.until(lambda: worker.at_hand == 110)
    worker.slots._short = 1
    assert worker.save([block_hash(1000)]) == 1
    await worker.until(lambda: pool.lookup([block_hash(1000)], use=False) != [])
    assert worker.at_hand == 109 and pool.stats().reclaimed == 0
    worker.slots.close()


async def test_the_ranks_of_an_engine_share_a_small_pool_and_leave_room_for_pulls(tmp_path: Path, serve: Serve) -> None:
    _, pool = await serve(32, ranks=4)  # 128 slots: one writer may hold 32 of them, all together 64
    workers = [Worker(tmp_path / "link", rank=rank, ranks=4) for rank in range(4)]
    for worker in workers:
        await worker.until(lambda one=worker: one.at_hand == 8)  # type: ignore[misc]
    for number in range(20):
        for worker in workers:
            await worker.until(lambda one=worker: one.at_hand > 0)  # type: ignore[misc]
            assert worker.save([block_hash(number)]) == 1
    for worker in workers:
        await worker.until(lambda one=worker: one.at_hand == 8)  # type: ignore[misc]
    assert pool.lookup([block_hash(19)], use=False) != []
    pulled = pool.grant(64)
    assert len(pulled) == 32, "a pull finds as much room as without an engine"
    for slot in pulled:
        pool.abandon(slot)
    for worker in workers:
        worker.slots.close()
