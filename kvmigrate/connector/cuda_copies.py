"""Copies for memory of a GPU: on streams of their own, from and to slots that the GPU's DMA reaches directly.

Not yet run on a GPU; tested with a CUDA of fakes, which runs streams in the order that events allow.

How: the engine's thread only records an event (`fence`). The thread of the saves lets its stream wait for that event,
queues one copy a buffer, and sleeps until an event behind them has come. The compute stream never waits for a copy; who
keeps its next kernels off blocks that are still read is `pins`. Loads do the same on a second stream, which waits for
whatever the engine had queued when the load was started: a block's former user may still be among it.

Slots are registered with CUDA ("pinned") when they are first used, in the copying thread, because that takes about a
millisecond; where it fails, copies go through CUDA's own buffers, slower and right.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kvmigrate.connector.copies import BlockSlot, Fence, PagedBlocks

logger = logging.getLogger("vllm.grapevine")


class Event(Fence, Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Put it behind everything that is queued in a stream."""


class CudaApi(Protocol):
    """What is used of `torch.cuda`."""

    def current_stream(self) -> Any:
        """The stream that the calling thread queues on."""

    def new_stream(self) -> Any:
        """A stream that runs beside the others; it has `wait_event`."""

    def new_event(self) -> Event:
        """An event; who waits for it sleeps."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Queue on this stream in this thread."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; returns before it is done."""

    def register(self, slot: memoryview) -> bool:
        """Let the GPU reach these bytes directly; False when it cannot."""

    def unregister(self, slot: memoryview) -> None:
        """Take that back."""


class CudaCopies:
    """Implements `copies.Copies`."""

    overlapped = True

    def __init__(self, memory: PagedBlocks, cuda: CudaApi) -> None:
        self._memory = memory
        self._cuda = cuda
        self._saves = _Lane(cuda)
        self._loads = _Lane(cuda)

    def fence(self) -> Event:
        """Everything that the calling thread has queued so far."""
        event = self._cuda.new_event()
        event.record(self._cuda.current_stream())
        return event

    def save(self, blocks: Sequence[BlockSlot], after: Fence | None) -> None:
        """Copy paged blocks into slots."""
        with self._saves.behind(after):
            for block_id, slot in blocks:
                self._saves.slots.reach(slot)
                for paged, part in self._memory.parts(block_id, slot):
                    self._cuda.copy(part, paged)

    def load(self, block_id: int, slot: memoryview, after: Fence | None) -> None:
        """Copy a slot into a paged block."""
        with self._loads.behind(after):
            self._loads.slots.reach(slot)
            for paged, part in self._memory.parts(block_id, slot):
                self._cuda.copy(paged, part)

    def close(self) -> None:
        """Take back what was registered. The copying threads have ended."""
        self._saves.slots.forget()
        self._loads.slots.forget()


class _Lane:
    """A stream for one thread."""

    def __init__(self, cuda: CudaApi) -> None:
        self.slots = ReachedSlots(cuda)
        self._cuda = cuda
        self._stream = cuda.new_stream()

    @contextmanager
    def behind(self, after: Fence | None) -> Iterator[None]:
        """What is queued within is behind the fence, and done when it is left, however it is left."""
        with self._cuda.use(self._stream):
            try:
                if after is not None:
                    self._stream.wait_event(after)
                yield
            finally:
                # Also when a copy could not be queued: those before it may still be writing.
                done = self._cuda.new_event()
                done.record(self._stream)
                done.synchronize()


class ReachedSlots:
    """Slots that are registered, of the pool file used last. One thread uses it.

    A registration must not outlive the map that it is of: the map is kept until then.
    """

    def __init__(self, cuda: CudaApi) -> None:
        self._cuda = cuda
        self._map: object = None
        self._slots: dict[int, memoryview] = {}
        self._failed = False

    def reach(self, slot: memoryview) -> None:
        """Register a slot unless it is; once that fails it is not tried again until the pool file is another one."""
        if slot.obj is not self._map:
            self.forget()
            self._map = slot.obj
        address = address_of(slot)
        if address in self._slots or self._failed:
            return
        if self._cuda.register(slot):
            self._slots[address] = slot
        else:
            self._failed = True
            logger.warning("CUDA cannot pin the KV pool's memory (ulimit -l?): blocks are copied slower")

    def forget(self) -> None:
        """Take all registrations back."""
        for slot in self._slots.values():
            self._cuda.unregister(slot)
        self._slots.clear()
        self._map, self._failed = None, False


class TorchCuda:
    """The real thing, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> Any:
        """See CudaApi."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        """See CudaApi."""
        return torch.cuda.Stream(device=self._device)

    def new_event(self) -> Event:
        """See CudaApi."""
        event: Event = torch.cuda.Event(blocking=True)
        return event

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """See CudaApi."""
        using: AbstractContextManager[object] = torch.cuda.stream(stream)
        return using

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See CudaApi."""
        target.copy_(source, non_blocking=True)

    def register(self, slot: memoryview) -> bool:
        """See CudaApi."""
        from vllm.v1.kv_offload.cpu.host_register import host_register

        return bool(host_register(address_of(slot), slot.nbytes))

    def unregister(self, slot: memoryview) -> None:
        """See CudaApi."""
        from vllm.v1.kv_offload.cpu.host_register import host_unregister

        host_unregister(address_of(slot))


def address_of(slot: memoryview) -> int:
    """Where the bytes are in this process."""
    return int(torch.frombuffer(slot, dtype=torch.uint8).data_ptr())
