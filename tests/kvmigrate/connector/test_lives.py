"""A node that is killed under a living engine, an engine that is killed while it loads, a request that is aborted then.

Both halves of the connector are real, so are link and pool; only paged memory is a plain tensor. Each fault ends with
the right bytes or none, with every slot back, and with everybody served again by whoever comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from kvmigrate.connector.copies import CpuCopies
from kvmigrate.connector.metadata import BlockLoad, BlockSave, LoadJob
from kvmigrate.connector.mirror import PoolMirror
from kvmigrate.connector.reports import LinkReports, PoolFeed
from kvmigrate.connector.scheduler import SchedulerHalf
from kvmigrate.connector.slots import PoolSlots
from kvmigrate.connector.worker import WorkerHalf
from kvmigrate.link import Hello, LinkClient
from kvmigrate.link.messages import Role
from kvmigrate.link.server import EngineLink, Gone
from kvmigrate.pool import BlockPool
from tests.kvmigrate.helpers import FINGERPRINT
from tests.waiting import PATIENCE_S

from .test_scheduler import BLOCK as TOKENS
from .test_scheduler import FakeRequest, block_hash
from .test_worker import BLOCKS, layer_outermost, map_blocks

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # as the connector does
POOL_BYTES = 1 << 20
CHAIN = [block_hash(1 + n) for n in range(3)]


class Engine:
    """One engine process in small: `step` is what vLLM does in one."""

    def __init__(self, link: Path) -> None:
        caches, placed = layer_outermost()
        self.memory = map_blocks(caches, placed, BLOCKS)
        self.copies = CpuCopies(self.memory)
        hello = Hello(Role.WORKER, 0, 1, os.getpid(), FINGERPRINT, self.memory.block_bytes, TOKENS)
        self.slots = PoolSlots(LinkClient(link, lambda: hello), 0, self.memory.block_bytes)
        self.worker = WorkerHalf(self.copies, self.slots, 0, lambda: 0.0)
        self.mirror = PoolMirror(1)
        scheduler = Hello(Role.SCHEDULER, 0, 1, os.getpid(), bytes(16), 0, TOKENS)
        self.link = client = LinkClient(link, lambda: scheduler)
        self.half = SchedulerHalf(
            block_size=TOKENS, mirror=self.mirror, reports=LinkReports(client, lambda: 0.0), clock=lambda: 0.0
        )
        self.feed = PoolFeed(client, self.mirror, on_saved=self.half.confirm_saved, on_lost=self.half.forget_pool)
        self.finished: list[str] = []
        self.failed: set[int] = set()

    def step(self) -> None:
        self.feed.poll()
        self.slots.poll()
        self.finished += self.worker.take_finished()
        self.failed |= self.worker.take_failed()
        self.worker.take_saved()

    def until(self, what: Callable[[], bool]) -> None:
        """Step until something is so."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_S / 0.005)):
            self.step()
            if what():
                return
            pause.wait(0.005)
        raise AssertionError("never so")

    def fill(self, *block_ids: int) -> None:
        """Paged block n holds the bytes n."""
        for block_id in block_ids:
            self.copies.load(block_id, memoryview(bytearray([block_id]) * self.memory.block_bytes), None)

    def bytes_of(self, block_id: int) -> set[int]:
        room = bytearray(self.memory.block_bytes)
        self.copies.save([(block_id, memoryview(room))], None)
        return set(room)

    def save(self) -> None:
        """Save the chain from blocks 0, 1, 2 until the node has it."""
        self.fill(0, 1, 2)
        for block_id, name in enumerate(CHAIN):
            while name not in self.mirror:
                skipped = self.worker.counters.skipped_saves
                self.worker.save(1, [BlockSave(block_id, name)])
                self.until(lambda n=name, s=skipped: n in self.mirror or self.worker.counters.skipped_saves > s)  # type: ignore[misc]

    def job(self, request_id: str = "a") -> LoadJob:
        """Load the chain into blocks 3, 4, 5."""
        return LoadJob(
            request_id, "", tuple(BlockLoad(3 + n, name, self.mirror.slots(name)) for n, name in enumerate(CHAIN))
        )

    def offered(self) -> int:
        """Tokens that a new request would be offered from the pool."""
        request = FakeRequest("probe", 3 * TOKENS + 1)
        self.half.on_new_request(request)
        tokens, _ = self.half.matched(request, 0)
        self.half.finished(request)
        assert tokens is not None
        return tokens

    def loads_right(self) -> None:
        """The whole chain loads, with its own bytes."""
        self.worker.start_loads([self.job("check")])
        self.until(lambda: "check" in self.finished)
        assert not self.failed
        assert [self.bytes_of(3 + n) for n in range(3)] == [{0}, {1}, {2}]

    def close(self) -> None:
        self.worker.close()
        self.slots.close()
        self.link.close()


NODE = """
import asyncio, pathlib, sys
from kvmigrate.link.server import EngineLink
from kvmigrate.pool import BlockPool
async def main():
    folder = pathlib.Path(sys.argv[1])
    link = EngineLink(folder / "link", BlockPool(folder / "n.kvpool", int(sys.argv[2])), lambda event: None)
    await link.start()
    print("up", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def process(script: str, *args: object) -> AsyncIterator[subprocess.Popen[bytes]]:  # type: ignore[misc]
    running = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=10)


def test_a_node_that_is_killed_and_restarted_under_a_living_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path / "link")
    with process(NODE, tmp_path, POOL_BYTES) as node:
        assert node.stdout is not None and node.stdout.readline() == b"up\n"
        engine.save()
        assert engine.offered() == 3 * TOKENS
        job = engine.job()
        node.send_signal(signal.SIGKILL)
        node.wait(10)
    engine.worker.start_loads([job])  # planned before the kill: from a file that nobody owns any more
    engine.until(lambda: engine.finished == ["a"])
    assert engine.failed == {3, 4, 5} or [engine.bytes_of(3 + n) for n in range(3)] == [{0}, {1}, {2}]
    engine.failed.clear()
    engine.until(lambda: len(engine.mirror) == 0)
    assert engine.offered() == 0
    engine.worker.save(2, [BlockSave(0, CHAIN[0])])  # no node, no slot, no wait
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2 and all("serving without the KV pool" in line for line in said)  # one for each half
    with process(NODE, tmp_path, POOL_BYTES) as node:
        assert node.stdout is not None and node.stdout.readline() == b"up\n"
        engine.save()
        engine.loads_right()
        engine.close()


LOADING_ENGINE = """
import pathlib, sys, time
from tests.kvmigrate.connector.test_lives import CHAIN, Engine
engine = Engine(pathlib.Path(sys.argv[1]))
engine.until(lambda: all(name in engine.mirror for name in CHAIN))
load = engine.copies.load
def stuck(block_id, slot, after):
    if block_id == 4:
        print("half", flush=True)
        time.sleep(60)
    load(block_id, slot, after)
engine.copies.load = stuck
engine.worker.start_loads([engine.job()])
sys.stdin.read()
"""


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[EngineLink]:
    link = EngineLink(tmp_path / "link", BlockPool(tmp_path / "n.kvpool", POOL_BYTES), lambda event: None)
    await link.start()
    yield link
    await link.close()
    link._pool.validate()
    link._pool.close()


async def test_an_engine_that_is_killed_while_it_loads_leaves_the_pool_to_the_next(
    tmp_path: Path, link: EngineLink
) -> None:
    first = await asyncio.to_thread(Engine, tmp_path / "link")
    await asyncio.to_thread(first.save)
    first.close()
    pool = link._pool
    with process(LOADING_ENGINE, tmp_path / "link") as victim:
        assert victim.stdout is not None
        assert await asyncio.to_thread(victim.stdout.readline) == b"half\n"
        victim.kill()
    gone = asyncio.Event()
    link._listener = lambda event: gone.set() if isinstance(event, Gone) else None
    async with asyncio.timeout(PATIENCE_S):
        while link.status().workers:
            await gone.wait()
            gone.clear()
    stats = pool.stats()
    assert (stats.blocks, stats.granted, stats.leases) == (3, 0, 0)
    assert stats.free + stats.blocks == stats.slots
    third = await asyncio.to_thread(Engine, tmp_path / "link")
    await asyncio.to_thread(third.until, lambda: all(name in third.mirror for name in CHAIN))
    await asyncio.to_thread(third.loads_right)
    third.close()


async def test_a_request_that_is_aborted_while_it_loads_is_reported_once_and_its_blocks_are_not_written_after(
    tmp_path: Path, link: EngineLink
) -> None:
    engine = await asyncio.to_thread(Engine, tmp_path / "link")
    await asyncio.to_thread(engine.save)
    request = FakeRequest("a", 3 * TOKENS + 1, rid="r")
    engine.half.on_new_request(request)
    tokens, _ = engine.half.matched(request, 0)
    assert tokens == 3 * TOKENS
    engine.half.allocated(request, [3, 4, 5], tokens)
    loads, _ = engine.half.plan_step({}, lambda _: None)
    begun, go_on = threading.Event(), threading.Event()
    load = engine.copies.load

    def wait(block_id: int, slot: memoryview, after: object) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        load(block_id, slot, None)

    engine.copies.load = wait  # type: ignore[method-assign]
    engine.worker.start_loads(loads)
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    engine.half.finished(request)  # vLLM keeps the blocks until the load is reported
    engine.step()
    assert engine.finished == []
    go_on.set()
    await asyncio.to_thread(engine.until, lambda: engine.finished == ["a"])
    engine.fill(3, 4, 5)  # their next user's
    for _ in range(5):
        engine.step()
    assert engine.finished == ["a"]
    assert [engine.bytes_of(block) for block in (3, 4, 5)] == [{3}, {4}, {5}]
    assert link._pool.stats().leases == 0
    engine.close()


def test_the_helper_tells_bytes_apart() -> None:
    """The negative control: another block's bytes are not taken for a block's own."""
    engine = Engine(Path("/nonexistent/link"))
    engine.fill(0, 1)
    assert (engine.bytes_of(0), engine.bytes_of(1)) == ({0}, {1})
    assert torch.equal(engine.memory._regions[0].view[1], torch.ones_like(engine.memory._regions[0].view[1]))
    engine.close()
