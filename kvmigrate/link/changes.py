"""The pool's changes on their way from the threads that make them to the event loop that sends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final

from kvmigrate.pool_types import PoolEvent

#: Changes not yet sent; a burst beyond it is replaced by a whole mirror.
MAX_PENDING: Final = 1 << 17


class Changes:
    """A bounded queue that wakes the loop. `deliver` is called in the loop when there is something to take."""

    def __init__(self, deliver: Callable[[], None], limit: int = MAX_PENDING) -> None:
        self._deliver = deliver
        self._limit = limit
        self._pending: deque[PoolEvent] = deque()
        self._overflow = False
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Deliver in the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def add(self, event: PoolEvent) -> None:
        """Take a change. Called by the pool under its lock, in any thread."""
        if len(self._pending) >= self._limit:
            self._overflow = True
        else:
            self._pending.append(event)
        if not self._woken and self._loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._deliver)

    def take(self) -> list[PoolEvent] | None:
        """Return the changes in their order; None when some were left out and only the whole state will do."""
        self._woken = False
        events = []
        while self._pending:
            events.append(self._pending.popleft())
        if self._overflow:
            self._overflow = False
            return None
        return events
