"""What a look at the cluster shows: memory of every process by what it is, pools, leases, /dev/shm, open files."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import psutil
from localcluster import LocalCluster

SHARED_MEMORY = Path("/dev/shm")
Sample = Mapping[str, float]


async def look(cluster: LocalCluster, session: aiohttp.ClientSession) -> Sample:
    """Figures by name: MiB for memory, counts for the rest."""
    sample: dict[str, float] = {"shm_mib": shutil.disk_usage(SHARED_MEMORY).used / 2**20}
    for name, node in cluster.nodes.items():
        if node.process is not None:
            sample |= {f"{name}.{what}": value for what, value in _processes(node.process.pid).items()}
        state = await cluster.state(session, name)
        pool = state["kv"]["pool"] if state is not None else {}  # type: ignore[index]
        for what in ("leases", "granted", "partial", "blocks"):
            sample[f"{name}.pool_{what}"] = float(pool.get(what, -1))
        sample[f"{name}.pool_used_mib"] = pool.get("used_bytes", 0) / 2**20
    return sample


def _processes(pid: int) -> dict[str, float]:
    """A node's own memory, and its engine's. Private memory only: the pool is shared and fills up as it should."""
    node = psutil.Process(pid)
    found: defaultdict[str, float] = defaultdict(float)
    found["node_mib"] = _private_mib(node)
    found["node_files"] = node.num_fds()
    found["node_threads"] = node.num_threads()
    for child in node.children(recursive=True):
        try:
            found["engine_mib"] += _private_mib(child)
            found["engine_files"] += child.num_fds()
        except psutil.NoSuchProcess:
            continue
    return dict(found)


def _private_mib(process: psutil.Process) -> float:
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 2**20
