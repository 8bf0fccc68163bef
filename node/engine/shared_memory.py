"""Shared memory that an engine's processes leave in /dev/shm when they are killed.

Whoever made it takes it away, or Python's resource tracker does; both die with their group. What stays is memory that
belongs to nobody until the host is restarted, some megabytes for each killed engine, where the KV pool lives too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

#: Names that vLLM and Python's `multiprocessing` give: queues between processes, groups of ranks, semaphores.
LEFT_BEHIND: Final = re.compile(rb"/dev/shm/(?:psm_|vllm_dist_|sem\.mp-)[\w.-]+$", re.MULTILINE)


def mapped_by(pids: Iterable[int]) -> set[bytes]:
    """Paths of such memory that living processes use; those that may not be looked at use none."""
    found: set[bytes] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(LEFT_BEHIND.findall(Path("/proc", str(pid), "maps").read_bytes()))
    return found


def remove(paths: Collection[bytes]) -> int:
    """Take away those that nobody on this host uses any more; how many there were. Blocks for some milliseconds."""
    left = [path for path in paths if os.path.exists(path)]  # noqa: PTH110 - paths of bytes
    if not left:
        return 0
    used, removed = mapped_by(int(entry) for entry in os.listdir("/proc") if entry.isdigit()), 0  # noqa: PTH208
    for path in left:
        if path not in used:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
                removed += 1
    return removed
