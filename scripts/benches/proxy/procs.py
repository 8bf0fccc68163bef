"""What processes cost: CPU seconds and resident memory of a process with all that it started (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: How Linux numbers the CPU clock of another process: clock_getcpuclockid(3).
_SCHEDULED = 2


def family(pids: Iterable[int]) -> list[int]:
    """These processes with their descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = list(pids)
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that they have used, all threads, to the nanosecond. What has ended counts nothing."""
    total = 0.0
    for pid in pids:
        try:
            total += time.clock_gettime((~pid << 3) | _SCHEDULED)
        except OSError:
            continue
    return total


def rss_mb(pids: Iterable[int]) -> float:
    """Resident memory, MB of 1e6 bytes."""
    total = 0
    for pid in pids:
        try:
            total += int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            continue
    return total / 1e6
