"""Which machine figures come from, and how fast it was while they were taken."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from gossip.build import is_compiled

#: Loops of the yardstick.
YARDSTICK_LOOPS = 3_000_000


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, Python, whether gossip is compiled, and the load that others put on it."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "compiled": is_compiled(),
        "load_1min": round(os.getloadavg()[0], 1),
        "yardstick_cpu_s": round(yardstick(), 3),
    }


def yardstick() -> float:
    """CPU seconds of a fixed loop of plain Python: tells a busy machine from an idle one, and one from another."""
    start = time.process_time()
    total = 0
    for i in range(YARDSTICK_LOOPS):
        total += i & 7
    return time.process_time() - start


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
