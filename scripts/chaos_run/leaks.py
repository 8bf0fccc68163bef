"""What must be gone when all is quiet again: places, tickets, leases, work in engines, descriptors, processes.

Rules
1. A node that was idle for a while holds nothing for any request. Some of it ends by deadlines (an idle connection to
   a peer is closed after seconds), so it is asked again until `PATIENCE_S`; what is left then is a leak.
2. Descriptors are compared with those of the same node when it had just become ready: files by number, sockets by those
   whose other side has closed long ago (CLOSE_WAIT) and by those that are far more than there are peers. The one warm
   connection for KV blocks that is kept for each peer is found dead at its next use, and not before: that is no leak.
3. A node's workers are looked at with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from chaos_run.node import ChaosNode
from node import peers
from node.engine.processes import MARKER

#: Connections to peers that a burst has left are kept for a while.
PATIENCE_S = peers.IDLE_S + 5.0
LOOK_EVERY_S = 1.0
#: Sockets of a quiet node for each peer (gossip, HTTP, KV, both ways), and besides.
SOCKETS_PER_PEER, SOCKETS_BESIDES = 6, 24
#: Files that come and go (a log that is turned, a look at /proc).
FILES_SPARE = 4
#: Gauges of /metrics that are 0 on a quiet node.
GAUGES = ("active_requests", "queued_requests", "queued_tokens")
_CLOSE_WAIT = "08"
#: What every process of a node inherits.
RUN_DIR = "GRAPEVINE_RUN_DIR"


async def look_until_none(
    session: aiohttp.ClientSession, nodes: Mapping[str, ChaosNode], files_before: Mapping[str, int]
) -> list[str]:
    """The leaks of nodes that are all up and have nothing to do."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = [leak for node in nodes.values() for leak in await look(session, node, len(nodes), files_before)]
        if not found or time.monotonic() > until:
            return found
        await asyncio.sleep(LOOK_EVERY_S)


async def look(
    session: aiohttp.ClientSession, node: ChaosNode, size: int, files_before: Mapping[str, int]
) -> list[str]:
    """What one node still holds."""
    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with session.get(node.url + "/metrics", timeout=timeout) as answer:
            metrics = await answer.text()
        async with session.get(node.url + "/gossip/state", timeout=timeout) as answer:
            state = await answer.json()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return [f"{node.name} does not answer: {error!r}"]
    found = [f"{name} {value:g}" for name in GAUGES if (value := gauge(metrics, f"grapevine_{name}"))]
    found += _in_state(state)
    found += _descriptors(node, size, files_before.get(node.name, 0))
    return [f"{node.name}: {leak}" for leak in found]


def gauge(metrics: str, name: str, label: str = "") -> float:
    """The sum of a metric over its labels, or over those lines that have this one; 0 without any."""
    lines = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? ([0-9.eE+-]+)$", metrics, re.MULTILINE)
    return sum(float(value) for labels, value in lines if label in labels)


def _in_state(state: dict[str, Any]) -> list[str]:
    found = []
    kv = state.get("kv") or {}
    if leases := (kv.get("pool") or {}).get("leases"):
        found.append(f"{leases} leases")
    if pulls := (kv.get("pulls") or {}).get("running"):
        found.append(f"{pulls} pulls")
    own: dict[str, Any] = next((member for member in state["members"] if member["name"] == state["self"]), {})
    load = own.get("load") or {}
    found += [f"engine {name} {load[name]}" for name in ("running", "waiting", "queued_tokens") if load.get(name)]
    return found


def files_of(node: ChaosNode) -> int:
    """Open descriptors of a node that are no sockets, and no pools: one for each peer of this host stays mapped."""
    if node.process is None:
        return 0
    return sum(1 for link in _links(node) if ".kv" not in link) - len(_sockets(node))


def _descriptors(node: ChaosNode, size: int, files_before: int) -> list[str]:
    files, sockets = files_of(node), _sockets(node)
    waiting = {inode: peer for inode, peer in _close_wait(node).items() if inode in sockets}
    found = []
    if files_before and files > files_before + FILES_SPARE:
        found.append(f"{files} files, {files_before} at its start")
    warm = [peer for peer in waiting.values() if peer.endswith(f" to {node.ports['kv']}")]
    if len(waiting) > len(warm) or len(warm) > size:
        found.append(f"{len(waiting)} sockets whose other side has closed ({', '.join(waiting.values())})")
    if len(sockets) > (size * SOCKETS_PER_PEER + SOCKETS_BESIDES) * len(node.pids()):
        found.append(f"{len(sockets)} sockets")
    return found


def _links(node: ChaosNode) -> list[str]:
    links = []
    for pid in node.pids():
        folder = Path(f"/proc/{pid}/fd")
        with contextlib.suppress(OSError):  # what goes away meanwhile is skipped
            for entry in os.listdir(folder):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    links.append(os.readlink(folder / entry))  # noqa: PTH115 - they are no paths
    return links


def _sockets(node: ChaosNode) -> set[str]:
    return {link[8:-1] for link in _links(node) if link.startswith("socket:[")}


def _close_wait(node: ChaosNode) -> dict[str, str]:
    """Sockets by inode, with both ports."""
    assert node.process is not None
    lines = Path(f"/proc/{node.process.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {row[9]: f"{_port(row[1])} to {_port(row[2])}" for row in rows if row[3] == _CLOSE_WAIT}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def processes_left(folder: Path) -> list[str]:
    """Processes of this run that outlived their nodes: engines by their mark, workers by where their node ran."""
    wanted = str(folder)
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if any(wanted in environ.get(name, "") for name in (MARKER, RUN_DIR)):
                found.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return found
