"""Copies of blocks out of a neighbour's file, several at a time.

One core copies memory at a part of the machine's bandwidth. So the thread of a pull shares its copies with a few
helpers; it copies as long as anything is left to copy, and waits only for the last ones.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

#: Threads that copy for all pulls together, beside the pulls' own: what saturates the memory of a usual host.
MAX_HELPERS: Final = 3
#: Below it a helper costs more than it saves.
MIN_SHARED_BYTES: Final = 256 << 10


class Copy:
    """A copy to make. `make` does it, returns the digest of what is in the target then, and may raise."""

    def __init__(self, make: Callable[[], bytes], nbytes: int) -> None:
        self.nbytes = nbytes
        self._make = make
        self._done = threading.Event()
        self._digest = b""
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the copy, once."""
        try:
            self._digest = self._make()
        except BaseException as error:
            self._error = error  # for whom it is made
        finally:
            self._done.set()

    def cancel(self) -> None:
        """It is never made."""
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether the target is left alone from now on."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the target is left alone: as long as a copy of one block takes."""
        self._done.wait()

    def result(self) -> bytes:
        """Return the digest of a finished copy, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._digest


class Helpers:
    """The threads that help; made when first needed. Thread-safe."""

    def __init__(self) -> None:
        self.most = min(MAX_HELPERS, len(os.sched_getaffinity(0)) - 1)
        self._threads = ThreadPoolExecutor(max(1, self.most), thread_name_prefix="kv-copy")

    def call(self, work: Callable[[], None]) -> None:
        """Have a helper do this when it has time, unless this is the end."""
        try:
            self._threads.submit(work)
        except RuntimeError:  # closed: whoever asked does all the work
            return

    def close(self) -> None:
        """Wait for what runs; what was not begun is not done. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)


class Copier:
    """The copies of one pull. Used by its thread; the helpers only take from the queue."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._queue: deque[Copy] = deque()
        self._begun: deque[Copy] = deque()

    def begin(self, copies: list[Copy]) -> None:
        """Start these; they are finished in any order."""
        self._queue.extend(copies)
        self._begun.extend(copies)
        if sum(copy.nbytes for copy in copies) >= MIN_SHARED_BYTES:
            for _ in range(min(self._helpers.most, len(copies))):
                self._helpers.call(self._work)

    def finish(self) -> bytes:
        """Finish the oldest copy, and make others while it is under way; returns its digest, raises what it raised."""
        copy = self._begun.popleft()
        while not copy.done:
            try:
                self._queue.popleft().run()
            except IndexError:
                copy.wait()
        return copy.result()

    def stop(self) -> None:
        """Begin no more of them; no target is written to after this."""
        while self._queue:
            try:
                self._queue.popleft().cancel()
            except IndexError:
                break  # a helper was faster
        while self._begun:
            self._begun.popleft().wait()

    def _work(self) -> None:
        while True:
            try:
                copy = self._queue.popleft()
            except IndexError:
                return
            copy.run()
