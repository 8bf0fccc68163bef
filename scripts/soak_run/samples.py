"""What a look at the cluster shows: memory of every process by what it is, pools, leases, engines, open files."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from localcluster import LocalCluster

SHARED_MEMORY = Path("/dev/shm")
POOL = ("leases", "expired_leases", "granted", "partial", "blocks")
ENGINE = ("running", "waiting", "kv_use")
Sample = Mapping[str, float]


async def look(cluster: LocalCluster, session: aiohttp.ClientSession) -> Sample:
    """Figures by name: MiB for memory, counts for the rest."""
    sample: dict[str, float] = {}
    for name, node in cluster.nodes.items():
        if node.process is not None:
            sample |= {f"{name}.{what}": value for what, value in _processes(node.process.pid).items()}
        sample |= {f"{name}.{what}": value for what, value in _told(name, await cluster.state(session, name)).items()}
    used = sum(value for what, value in sample.items() if what.endswith(".pool_used_mib"))
    sample["shm_beyond_pools_mib"] = sum(_size_mib(path) for path in shared_files(processes(cluster))) - used
    return sample


def processes(cluster: LocalCluster) -> list[psutil.Process]:
    """All processes of the nodes and their engines."""
    found: list[psutil.Process] = []
    for node in cluster.nodes.values():
        if node.process is not None and node.running:
            top = psutil.Process(node.process.pid)
            found += [top, *top.children(recursive=True)]
    return found


def shared_files(owners: Iterable[psutil.Process]) -> set[Path]:
    """Files in shared memory that they map: others on this host may have theirs."""
    found: set[Path] = set()
    for process in owners:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    found.add(Path(fields[5]))
    return found


def _told(name: str, state: Mapping[str, Any] | None) -> Mapping[str, float]:
    """What a node says of its pool and its engine; -1 for what it does not say."""
    pool = state["kv"]["pool"] if state is not None else {}
    members = state["members"] if state is not None else []
    load = next((member["load"] for member in members if member["name"] == name), None) or {}
    told = {f"pool_{what}": float(pool.get(what, -1)) for what in POOL}
    told |= {f"engine_{what}": float(load.get(what, -1)) for what in ENGINE}
    return told | {"pool_used_mib": pool.get("used_bytes", 0) / 2**20}


def _size_mib(path: Path) -> float:
    try:
        return path.stat().st_blocks * 512 / 2**20
    except OSError:  # removed, and mapped by somebody still
        return 0.0


def _processes(pid: int) -> dict[str, float]:
    """A node's own memory, and its engine's. Private memory only: the pool is shared and fills up as it should."""
    node = psutil.Process(pid)
    found: defaultdict[str, float] = defaultdict(float)
    found["node_mib"] = _private_mib(node)
    found["node_files"] = node.num_fds()
    found["node_threads"] = node.num_threads()
    for child in node.children(recursive=True):
        try:
            found[f"{_part(child)}_mib"] += _private_mib(child)
            found["engine_files"] += child.num_fds()
        except psutil.NoSuchProcess:
            continue
    return dict(found)


def _part(process: psutil.Process) -> str:
    """Which process of an engine it is: our connector's halves live in the core and in the workers."""
    name = process.name()  # its first 15 characters
    return "core" if name.startswith("VLLM::Engine") else "worker" if name.startswith("VLLM::Worker") else "engine"


def _private_mib(process: psutil.Process) -> float:
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 2**20
