"""Memory for the next blocks of a pool, taken from the system ahead of their use.

The system gives memory at about 1 GB/s, a third of what a pull moves, so the first pulls and stores into a new pool
would wait for it. A thread keeps a reserve of slots that have theirs; used slots are used again and need none of this.

It refills the reserve when the pool is left alone, and no sooner while half of it is there: beside a pull it takes the
core and the memory's bandwidth that the pull has use for, and made one of 80 MB take 35 ms longer on two cores.
"""

from __future__ import annotations

import threading
from typing import Final

from .errors import LocalError
from .pool import BlockPool
from .pool_types import Cleared, Committed, PoolEvent

#: Free slots that have their memory: more than one pull brings before the thread has run.
RESERVE_BYTES: Final = 256 << 20
#: The pool is left alone when nothing was stored for so many seconds.
QUIET_S: Final = 0.1


class Reserve:
    """Keeps the reserve of one pool until `close`."""

    def __init__(self, pool: BlockPool, nbytes: int = RESERVE_BYTES) -> None:
        self._pool = pool
        self._bytes = nbytes
        self._used = threading.Event()
        self._used.set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-reserve", daemon=True)
        pool.subscribe(self._on_event)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the slot that it is at. Idempotent; before the pool is closed."""
        self._pool.unsubscribe(self._on_event)
        self._closing = True
        self._used.set()
        self._thread.join()

    def _on_event(self, event: PoolEvent) -> None:
        if isinstance(event, Committed | Cleared):
            self._used.set()

    def _run(self) -> None:
        while not self._closing:
            self._used.wait()
            self._used.clear()
            try:
                while not self._closing and self._pool.prepare(self._bytes // 2):
                    pass
                if self._used.wait(QUIET_S):
                    continue
                while not self._used.is_set() and self._pool.prepare(self._bytes):
                    pass
            except LocalError:
                return  # who needs a slot is told
