"""The worker half: moves block bytes between paged memory and the pool's shared memory, one per rank.

Rules:
1. The engine never waits for the node. Without a granted slot a save is skipped and counted, not delayed.
2. Saves are copied in `save`, after the forward pass that completed the block and before vLLM may reuse it.
3. Loads run on one background thread. A job is reported finished exactly once, whether it succeeded, failed or its
   request was aborted, and only after the thread has stopped writing its blocks.
4. A block counts as loaded only if the slot header named the wanted hash and generation before and after the copy and
   the digest of the bytes was right. Anything else names the paged block, and all that follow it in the chain, as
   failed, and vLLM recomputes from there.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmigrate.connector.metadata import BlockLoad, BlockSave, LoadJob, SlotRef
from kvmigrate.link.messages import SlotGrant
from kvmigrate.reader import ReadFault

logger = logging.getLogger("vllm.grapevine")

STOP_LIMIT_S = 5.0
"""How long `close` waits for a copy in progress; one block takes milliseconds."""


class Memory(Protocol):
    """Paged memory, block by block (`regions.BlockMemory`)."""

    def save(self, block_id: int, slot: memoryview) -> None: ...  # noqa: D102
    def load(self, block_id: int, slot: memoryview) -> None: ...  # noqa: D102


class SlotAccess(Protocol):
    """The pool as the worker sees it through shared memory (`slots.PoolSlots`)."""

    def poll(self) -> None:
        """Take what the node has sent: where the pool is, grants. Returns at once."""

    def begin_write(self) -> tuple[SlotGrant, memoryview] | None:
        """Take a granted slot and its writable bytes, or None when the node has granted none."""

    def stored(self, items: Sequence[tuple[SlotGrant, bytes]]) -> None:
        """Tell the node which (slot, block hash) are complete; it indexes them."""

    def read(self, ref: SlotRef, block_hash: bytes, copy: Callable[[memoryview], None]) -> ReadFault | None:
        """Copy the slot's bytes if they are that block's; None when they were, before and after the copy."""

    def loaded(self, rid: str, blocks: int, seconds: float) -> None:
        """Report a finished load to the node."""

    def corrupt(self, slots: Sequence[int]) -> None:
        """Report slots whose bytes do not match their digest."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of one job: `failed` are the paged blocks that hold nothing to be trusted."""

    job: LoadJob
    good: int
    failed: frozenset[int]
    corrupt: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class WorkerCounters:
    """Counts since the start, for the engine's log."""

    saved_blocks: int = 0
    skipped_saves: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0


class WorkerHalf:
    """Saves in the caller's thread, loads in its own."""

    def __init__(self, memory: Memory, slots: SlotAccess, rank: int, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._slots = slots
        self._rank = rank
        self._clock = clock
        self.counters = WorkerCounters()
        # Unbounded by type, bounded by vLLM: at most one job per request that it holds blocks for.
        self._jobs: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._failed: set[int] = set()
        self._thread = threading.Thread(target=self._load_forever, name="grapevine-load", daemon=True)
        self._thread.start()

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Queue jobs for the load thread.

        The scheduler half may know the pool before we do: the first step of an engine can be one that loads.
        """
        if jobs:
            self._slots.poll()
        for job in jobs:
            self._jobs.put(job)

    def save(self, saves: Iterable[BlockSave]) -> None:
        """Copy finished blocks into granted slots and report them in one message."""
        stored: list[tuple[SlotGrant, bytes]] = []
        for save in saves:
            granted = self._slots.begin_write()
            if granted is None:
                self.counters.skipped_saves += 1
                continue
            grant, target = granted
            self._memory.save(save.block_id, target)
            stored.append((grant, save.block_hash))
        if stored:
            self.counters.saved_blocks += len(stored)
            self._slots.stored(stored)

    def take_finished(self) -> set[str]:
        """Requests whose load has ended since the last call. Call it before `take_failed` in the same step."""
        finished: set[str] = set()
        while not self._results.empty():
            result = self._results.get()
            finished.add(result.job.request_id)
            self._failed |= result.failed
            self.counters.loaded_blocks += result.good
            self.counters.failed_blocks += len(result.failed)
            self._slots.loaded(result.job.rid, result.good, result.seconds)
            if result.corrupt:
                self._slots.corrupt(result.corrupt)
        return finished

    def take_failed(self) -> set[int]:
        """Paged blocks of the loads just reported whose bytes must not be used."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Let the copy in progress end and stop the thread. Idempotent."""
        self._jobs.put(None)
        self._thread.join(STOP_LIMIT_S)

    def _load_forever(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(self._load(job))

    def _load(self, job: LoadJob) -> LoadResult:
        began = self._clock()
        good = 0
        corrupt: list[int] = []
        try:
            while good < len(job.blocks) and self._load_block(job.blocks[good], corrupt):
                good += 1
        except Exception:  # a job that is never reported leaves its request asleep and its blocks leaked for ever
            logger.exception("loading KV blocks of request %s failed; it will be recomputed", job.request_id)
        failed = frozenset(block.block_id for block in job.blocks[good:])
        return LoadResult(job, good, failed, tuple(corrupt), self._clock() - began)

    def _load_block(self, block: BlockLoad, corrupt: list[int]) -> bool:
        ref = next((ref for ref in block.slots if ref.rank == self._rank), None)
        if ref is None:
            return False
        fault = self._slots.read(ref, block.block_hash, lambda data: self._memory.load(block.block_id, data))
        if fault is ReadFault.CORRUPT:
            corrupt.append(ref.slot)
        return fault is None
