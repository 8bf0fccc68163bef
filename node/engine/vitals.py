"""Whether an engine's processes do anything, from /proc: a busy engine uses processor time, a hung one does not.

Two looks are needed, some time apart. A process that waits for a processor, or for the disk, counts as working: on a
host with too little of either it is slow, not dead. A stopped one (SIGSTOP, a debugger) never does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: Share of one processor that all its processes together use at least when they work. An idle vLLM uses 1-2 %.
WORKING_SHARE = 0.05

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Look:
    """Processor seconds that a group of processes has used; whether one is ready to run, and whether one is stopped."""

    at: float
    used_s: float
    ready: bool
    stopped: bool = False


def look(pids: Iterable[int], at: float) -> Look:
    """Look at these processes at monotonic time `at`; those that are gone count nothing."""
    ticks, ready, stopped = 0, False, False
    for pid in pids:
        try:
            words = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
            ready = ready or words[0] in "RD"
            stopped = stopped or words[0] in "Tt"
            ticks += int(words[11]) + int(words[12])
        except (OSError, ValueError, IndexError):
            continue
    return Look(at, ticks / _TICKS_PER_S, ready, stopped)


def works(before: Look, now: Look) -> bool:
    """Whether something was done between two looks."""
    if now.stopped:
        return False
    return now.ready or now.used_s - before.used_s >= WORKING_SHARE * (now.at - before.at)
