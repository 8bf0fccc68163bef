"""What each process of an engine holds of the connector: a half, its link, and what it needs of vLLM to make them."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvmigrate.connector import identity
from kvmigrate.connector.copies import Copies, CpuCopies
from kvmigrate.connector.cuda_copies import CudaCopies, TorchCuda
from kvmigrate.connector.metadata import BlockSave
from kvmigrate.connector.mirror import PoolMirror
from kvmigrate.connector.regions import BlockMemory, map_blocks
from kvmigrate.connector.reports import LinkReports, PoolFeed
from kvmigrate.connector.scheduler import SchedulerHalf
from kvmigrate.connector.slots import PoolSlots, stock_for
from kvmigrate.connector.worker import WorkerHalf
from kvmigrate.errors import LocalError
from kvmigrate.fingerprint import NO_FINGERPRINT, Fingerprint
from kvmigrate.link import Hello, LinkClient, Reset
from kvmigrate.link.messages import Role

logger = logging.getLogger("vllm.grapevine")

LOOK_INTERVAL_S = 0.1
"""A worker with nothing to save or load looks at its link this often: grants can wait, a node that was lost cannot."""


class SchedulerSide:
    """The scheduler half with its link."""

    def __init__(self, link_path: str, block_size: int, ranks: int, why_not: str) -> None:
        hello = Hello(
            role=Role.SCHEDULER,
            rank=0,
            ranks=ranks,
            pid=os.getpid(),
            fingerprint=NO_FINGERPRINT,
            block_bytes=0,
            block_size=block_size,
            supported=not why_not,
            why=why_not,
            holds=True,
        )
        self.link = LinkClient(link_path, lambda: hello)
        self.reports = LinkReports(self.link, time.monotonic)
        mirror = PoolMirror(ranks)
        self.half = SchedulerHalf(block_size=block_size, mirror=mirror, reports=self.reports, clock=time.monotonic)
        self.feed = PoolFeed(
            self.link,
            mirror,
            on_saved=self.half.confirm_saved,
            on_lost=self.half.forget_pool,
            on_pulled=self.half.pull_over,
        )
        self.feed.poll()

    def reset(self) -> bool:
        """Ask the node to drop the pool's contents. False when it could not be told."""
        self.half.forget_pool()
        return self.link.send(Reset())


class WorkerSide:
    """The worker half with its link; `half` is None when this engine does not take part."""

    def __init__(self, slots: PoolSlots, half: WorkerHalf | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self.half = half
        self.saved: list[int] = []
        self._clock = clock
        self._look_due = 0.0
        slots.poll()

    @classmethod
    def create(
        cls,
        link_path: str,
        why_not: str,
        *,
        vllm_config: Any,
        config: Any,
        rank: int,
        kv_caches: dict[str, torch.Tensor],
    ) -> "WorkerSide":
        """Map the memory, take the fingerprint, connect. `why_not`: why this engine does not take part, if so."""
        memory = copies = None
        fingerprint = Fingerprint()
        if not why_not:
            try:
                memory = map_blocks(kv_caches, config.kv_cache_tensors, config.num_blocks)
                copies = _copies_of(memory)
                fingerprint = identity.fingerprint_of(vllm_config, config, memory, next(iter(kv_caches)))
            except LocalError as error:
                why_not = str(error)
                logger.warning("KV migration is off for this engine: %s. It serves without.", why_not)
        if fingerprint.missing and not why_not:
            logger.warning("KV blocks are not shared: %s unknown", ", ".join(fingerprint.missing))
        hello = Hello(
            role=Role.WORKER,
            rank=rank,
            ranks=int(vllm_config.parallel_config.tensor_parallel_size),
            pid=os.getpid(),
            fingerprint=fingerprint.digest(),
            block_bytes=memory.block_bytes if memory is not None else 0,
            block_size=identity.block_size_of(vllm_config, config),
            supported=not why_not,
            why=why_not,
            fields=fingerprint.to_fields(),
        )
        link = LinkClient(link_path, lambda: hello)
        slots = PoolSlots(
            link,
            rank,
            hello.block_bytes,
            stock=stock_for(int(vllm_config.scheduler_config.max_num_batched_tokens), hello.block_size),
            pinned=copies is not None and copies.overlapped,
        )
        half = None if why_not or copies is None else WorkerHalf(copies, slots, rank, time.monotonic)
        return cls(slots, half)

    def save(self, step: int, saves: Sequence[BlockSave]) -> None:
        """Begin a step's saves, and note which steps' saves have ended: of those that cannot be made, at once."""
        now = self._clock()
        if saves or now >= self._look_due:
            self._look_due = now + LOOK_INTERVAL_S
            self.slots.poll()
        if self.half is not None:
            self.half.save(step, saves)
            self.saved += self.half.take_saved()
        elif saves:
            self.saved.append(step)

    def close(self) -> None:
        """Stop the threads, then the link."""
        if self.half is not None:
            self.half.close()
        self.slots.close()


def _copies_of(memory: BlockMemory) -> Copies:
    """Copies for the device that the KV cache is on. Raises LocalError for one that there are none for."""
    match memory.device.type:
        case "cpu":
            return CpuCopies(memory)
        case "cuda":
            return CudaCopies(memory, TorchCuda(memory.device))
        case other:
            raise LocalError(f"KV caches on {other} devices cannot be copied")
