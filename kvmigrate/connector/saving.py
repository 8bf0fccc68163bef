"""Saves of one engine step: from paged blocks into granted slots, with their digests.

Each step's saves are reported exactly once, whatever became of them: somebody holds their blocks until then.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvmigrate.connector.copies import Copies, Fence
from kvmigrate.digest import block_digest
from kvmigrate.link.messages import SlotGrant

logger = logging.getLogger("vllm.grapevine")


@dataclass(frozen=True, slots=True)
class Save:
    """A paged block on its way into a granted slot."""

    block_id: int
    block_hash: bytes
    grant: SlotGrant
    slot: memoryview


@dataclass(frozen=True, slots=True)
class SaveBatch:
    """The saves of one step, behind that step's work."""

    step: int
    after: Fence | None
    saves: tuple[Save, ...]


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """What became of a batch: `stored` are its slots' grants, hashes and digests, none when it failed."""

    step: int
    stored: tuple[tuple[SlotGrant, bytes, bytes], ...] = ()
    failed: tuple[SlotGrant, ...] = ()


def run(copies: Copies, batch: SaveBatch) -> SavedBatch:
    """Copy and digest; never raises."""
    try:
        copies.save([(save.block_id, save.slot) for save in batch.saves], batch.after)
        stored = tuple((save.grant, save.block_hash, block_digest(save.slot)) for save in batch.saves)
    except Exception:  # a batch that is never reported keeps its blocks from the engine for ever
        logger.exception("saving %d KV blocks into the pool failed; they are not shared", len(batch.saves))
        return SavedBatch(batch.step, failed=tuple(save.grant for save in batch.saves))
    return SavedBatch(batch.step, stored=stored)


class SavesInPlace:
    """Saves where it is asked to; for copies that are quick and need no device."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._done: list[SavedBatch] = []

    def submit(self, batch: SaveBatch) -> None:
        """Save."""
        self._done.append(run(self._copies, batch))

    def finished(self) -> Iterator[SavedBatch]:
        """Batches that ended since the last call."""
        done, self._done = self._done, []
        return iter(done)

    def close(self, limit_s: float) -> None:
        """Nothing is under way."""


class SavesInThread:
    """Saves in a thread of its own; `submit` returns at once."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        # Unbounded by type, bounded by `pins`: each batch holds blocks of the engine.
        self._batches: queue.SimpleQueue[SaveBatch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[SavedBatch] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grapevine-save", daemon=True)
        self._thread.start()

    def submit(self, batch: SaveBatch) -> None:
        """Hand a batch over."""
        self._batches.put(batch)

    def finished(self) -> Iterator[SavedBatch]:
        """Batches that ended since the last call."""
        while not self._done.empty():
            yield self._done.get()

    def close(self, limit_s: float) -> None:
        """Let what is under way end and stop the thread. Idempotent."""
        self._batches.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._done.put(run(self._copies, batch))
