"""Memory for the next blocks of a pool, taken from the system ahead of their use.

The system gives memory at about 1 GB/s, a third of what a pull moves, so the first pulls and stores into a new pool
would wait for it. A thread keeps a reserve of slots that have theirs; used slots are used again and need none of this.

It refills the reserve when the pool is left alone and the engine computes nothing, and no sooner while half of it is
there: it takes a core and the memory's bandwidth. Beside a pull of 80 MB that cost the pull 35 ms on two cores, and
beside the step that followed it, the step 20 to 50 of 170.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from .errors import LocalError
from .pool import BlockPool
from .pool_types import Cleared, Committed, PoolEvent

#: Free slots that have their memory: more than one pull brings before the thread has run.
RESERVE_BYTES: Final = 256 << 20
#: The pool is left alone when nothing was stored for so many seconds. As often it is looked whether the engine is busy.
QUIET_S: Final = 0.25


class Reserve:
    """Keeps the reserve of one pool until `close`. `busy` is asked in its thread: whether the engine computes."""

    def __init__(
        self, pool: BlockPool, nbytes: int = RESERVE_BYTES, *, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self._pool = pool
        self._bytes = nbytes
        self._busy = busy
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
                while not self._used.wait(QUIET_S) and self._fill():
                    pass
            except LocalError:
                return  # who needs a slot is told

    def _fill(self) -> bool:
        """Take memory as long as nobody needs the machine for more. Whether some is still to be taken."""
        while not self._used.is_set() and not self._busy():
            if not self._pool.prepare(self._bytes):
                return False
        return True
