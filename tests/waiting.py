"""How long a test waits for what must come, and how it waits where nothing tells it.

Where there is an event, a condition variable or a file descriptor, wait for that. These are for what another process,
another thread or the kernel does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""Far beyond what it takes on a busy machine: a test that gets here has found something that never happens."""
_LOOK_S = 0.005


async def until(condition: Callable[[], T], limit_s: float = PATIENCE_S) -> T:
    """Look until the condition is true, while the loop goes on; returns what it gave."""
    async with asyncio.timeout(limit_s):
        while not (value := condition()):  # noqa: ASYNC110 - see above
            await asyncio.sleep(_LOOK_S)
    return value


def until_here(condition: Callable[[], T], limit_s: float = PATIENCE_S) -> T:
    """As :func:`until`, for a test without a loop."""
    end, pause = time.monotonic() + limit_s, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, "it never came"
        pause.wait(_LOOK_S)
    return value
