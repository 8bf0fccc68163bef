"""A CUDA whose streams run only as far as events allow, and whose engine works only when a test lets it.

Work is queued on streams and done by whoever waits: `synchronize` runs every stream as far as it can. The engine's
stream takes a step when `Engine.allow` lets it.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from kvmigrate.connector.cuda_copies import address_of
from tests.waiting import PATIENCE_S


class FakeStream:
    def __init__(self, cuda: "FakeCuda", *, held: bool = False) -> None:
        self._cuda = cuda
        self.held = held
        self.work: deque[Callable[[], bool]] = deque()

    def queue(self, work: Callable[[], bool]) -> None:
        """Work says whether it is done; if not, it is asked again."""
        with self._cuda.lock:
            self.work.append(work)

    def wait_event(self, event: "FakeEvent") -> None:
        self.queue(lambda: event.done)


class FakeEvent:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.done = False

    def record(self, stream: FakeStream) -> None:
        def come() -> bool:
            self.done = True
            return True

        stream.queue(come)

    def synchronize(self) -> None:
        with self._cuda.lock:
            self._cuda.run()
            self._cuda.waits += 1
            self._cuda.lock.notify_all()
            assert self._cuda.lock.wait_for(lambda: self._cuda.run() and self.done, PATIENCE_S), "never came"


class FakeCuda:
    """Implements `cuda_copies.CudaApi`."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.engine = FakeStream(self, held=True)
        self._streams = [self.engine]
        self._here = threading.local()
        self.pinned: set[int] = set()
        self.registrations = 0
        self.pins = True
        self.fail_copy: int | None = None
        self.copies = 0
        self.waits = 0

    def allow(self) -> None:
        """Let the engine do what it has queued."""
        with self.lock:
            self.engine.held = False
            self.run()
            self.engine.held = True
            self.lock.notify_all()

    def until_waits(self, count: int) -> None:
        """Until copying threads have waited so often: what can be copied by then, is."""
        with self.lock:
            assert self.lock.wait_for(lambda: self.waits >= count, PATIENCE_S)

    def run(self) -> bool:
        """Do what can be done; always True."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while stream.work and not stream.held and stream.work[0]():
                    stream.work.popleft()
                    moved = True
        return True

    def current_stream(self) -> FakeStream:
        return getattr(self._here, "stream", self.engine)

    def new_stream(self) -> FakeStream:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        self._here.stream = stream
        try:
            yield
        finally:
            del self._here.stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        if self.copies == self.fail_copy:
            raise RuntimeError("an illegal memory access was encountered")

        def move() -> bool:
            target.copy_(source)
            return True

        self.current_stream().queue(move)

    def register(self, slot: memoryview) -> bool:
        self.registrations += 1
        if self.pins:
            assert address_of(slot) not in self.pinned
            self.pinned.add(address_of(slot))
        return self.pins

    def unregister(self, slot: memoryview) -> None:
        self.pinned.remove(address_of(slot))
