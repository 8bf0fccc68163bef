"""The worker half: moves block bytes between paged memory and the pool's shared memory, one per rank.

Rules:
1. The engine never waits for the node. Without a granted slot a save is skipped and counted, not delayed.
2. Saves are copied after the forward pass that completed the block and before vLLM may reuse it: on a CPU within
   `save`, on a GPU in a thread, while `pins` keeps the blocks. Each step's saves are reported done exactly once.
3. Loads run on one background thread. A job is reported finished exactly once, whether it succeeded, failed or its
   request was aborted, and only after the thread has stopped writing its blocks.
4. A block counts as loaded only if the slot header named the wanted hash and generation before and after the copy and
   the digest of the bytes was right. Anything else names the paged block, and all that follow it in the chain, as
   failed, and vLLM recomputes from there.
5. A step that computes nothing waits a moment for a load that is under way. vLLM repeats such steps without a pause, in
   two processes that spin in between, and on a host with few cores the load is what they take the time from.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmigrate.connector.copies import Copies, Fence
from kvmigrate.connector.metadata import BlockLoad, BlockSave, LoadJob, SlotRef
from kvmigrate.connector.saving import Save, SaveBatch, SavesInPlace, SavesInThread
from kvmigrate.link.messages import SlotGrant
from kvmigrate.reader import ReadFault

logger = logging.getLogger("vllm.grapevine")

IDLE_WAIT_S = 0.02
"""How long an empty step waits for a load, and so a request that comes just then for its first step."""

STOP_LIMIT_S = 5.0
"""How long `close` waits for a copy in progress; one block takes milliseconds."""


class SlotAccess(Protocol):
    """The pool as the worker sees it through shared memory (`slots.PoolSlots`)."""

    def poll(self) -> None:
        """Take what the node has sent: where the pool is, grants. Returns at once."""

    def begin_write(self) -> tuple[SlotGrant, memoryview] | None:
        """Take a granted slot and its writable bytes, or None when the node has granted none."""

    def stored(self, items: Sequence[tuple[SlotGrant, bytes, bytes]]) -> None:
        """Tell the node which (slot, block hash, digest) are complete; it indexes them."""

    def unused(self, grants: Sequence[SlotGrant]) -> None:
        """Give slots back that nothing came of."""

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
    """Use it in the engine's main thread."""

    def __init__(self, copies: Copies, slots: SlotAccess, rank: int, clock: Callable[[], float]) -> None:
        self._copies = copies
        self._slots = slots
        self._rank = rank
        self._clock = clock
        self.counters = WorkerCounters()
        # Unbounded by type, bounded by vLLM: at most one job per request that it holds blocks for.
        self._jobs: queue.SimpleQueue[tuple[LoadJob, Fence | None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._loading = 0  # jobs whose result was not taken yet
        self._failed: set[int] = set()
        self._saves = SavesInThread(copies) if copies.overlapped else SavesInPlace(copies)
        self._thread = threading.Thread(target=self._load_forever, name="grapevine-load", daemon=True)
        self._thread.start()

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Queue jobs for the load thread.

        The scheduler half may know the pool before we do: the first step of an engine can be one that loads.
        """
        if not jobs:
            return
        self._slots.poll()
        after = self._copies.fence()
        for job in jobs:
            self._loading += 1
            self._jobs.put((job, after))

    def save(self, step: int, saves: Sequence[BlockSave]) -> None:
        """Save finished blocks into granted slots. Each step that has saves ends in `take_saved`, once."""
        if not saves:
            return
        granted: list[Save] = []
        for save in saves:
            place = self._slots.begin_write()
            if place is not None:
                granted.append(Save(save.block_id, save.block_hash, *place))
        self.counters.skipped_saves += len(saves) - len(granted)
        self._saves.submit(SaveBatch(step, self._copies.fence() if granted else None, tuple(granted)))

    def take_saved(self) -> list[int]:
        """Steps whose saves have ended since the last call; the node is told of their blocks."""
        steps: list[int] = []
        for batch in self._saves.finished():
            steps.append(batch.step)
            self.counters.saved_blocks += len(batch.stored)
            if batch.stored:
                self._slots.stored(batch.stored)
            if batch.failed:
                self._slots.unused(batch.failed)
        return steps

    def take_finished(self, *, idle: bool = False) -> set[str]:
        """Requests whose load has ended since the last call. Call it before `take_failed` in the same step.

        `idle`: the step has nothing else to do and waits for the first of them, for IDLE_WAIT_S at most.
        """
        finished: set[str] = set()
        while (result := self._next_result(wait=idle and not finished)) is not None:
            finished.add(result.job.request_id)
            self._failed |= result.failed
            self.counters.loaded_blocks += result.good
            self.counters.failed_blocks += len(result.failed)
            self._slots.loaded(result.job.rid, result.good, result.seconds)
            if result.corrupt:
                self._slots.corrupt(result.corrupt)
        return finished

    def _next_result(self, *, wait: bool) -> LoadResult | None:
        if not self._loading:
            return None
        try:
            result = self._results.get(timeout=IDLE_WAIT_S) if wait else self._results.get_nowait()
        except queue.Empty:
            return None
        self._loading -= 1
        return result

    def take_failed(self) -> set[int]:
        """Paged blocks of the loads just reported whose bytes must not be used."""
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Let the copies in progress end and stop the threads. Idempotent."""
        self._jobs.put(None)
        self._saves.close(STOP_LIMIT_S)
        self._thread.join(STOP_LIMIT_S)
        self._copies.close()

    def _load_forever(self) -> None:
        while (asked := self._jobs.get()) is not None:
            self._results.put(self._load(*asked))

    def _load(self, job: LoadJob, after: Fence | None) -> LoadResult:
        began = self._clock()
        good = 0
        corrupt: list[int] = []
        try:
            while good < len(job.blocks) and self._load_block(job.blocks[good], after, corrupt):
                good += 1
        except Exception:  # a job that is never reported leaves its request asleep and its blocks leaked for ever
            logger.exception("loading KV blocks of request %s failed; it will be recomputed", job.request_id)
        failed = frozenset(block.block_id for block in job.blocks[good:])
        return LoadResult(job, good, failed, tuple(corrupt), self._clock() - began)

    def _load_block(self, block: BlockLoad, after: Fence | None, corrupt: list[int]) -> bool:
        ref = next((ref for ref in block.slots if ref.rank == self._rank), None)
        if ref is None:
            return False
        fault = self._slots.read(ref, block.block_hash, lambda data: self._copies.load(block.block_id, data, after))
        if fault is ReadFault.CORRUPT:
            corrupt.append(ref.slot)
        return fault is None
