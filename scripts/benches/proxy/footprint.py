"""What a node costs that does nothing: seconds until it answers, memory, and the share of a core it uses, alone and
among peers."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from benches.proxy import procs
from benches.proxy.subjects import Stage, Subject
from benches.result import Result, say

#: Sizes of the clusters, and seconds from the last join to the measurement and of the measurement itself.
SIZES = (1, 3, 12)
CALM_S = 4.0
WATCH_S = 10.0
#: A start is looked at this often, and given up after so long; so many starts are timed.
POLL_S = 0.005
START_S = 30.0
STARTS = 5


def footprint(
    result: Result,
    *,
    sizes: Sequence[int] = SIZES,
    starts: int = STARTS,
    calm_s: float = CALM_S,
    watch_s: float = WATCH_S,
) -> None:
    """Add start-up time, memory, and idle shares of a core for each size of cluster."""
    with Stage() as stage:
        _timed_start(stage, "first")  # compiles what an installed node finds compiled
        times = sorted(_timed_start(stage, f"start{i}") for i in range(starts))
        result.add("start_s", times[len(times) // 2])
        result.add("start_least_s", times[0])
    for size in sizes:
        with Stage() as stage:
            nodes = _cluster(stage, size)
            time.sleep(calm_s)
            each = [node.family() for node in nodes]
            before = [procs.cpu_s(pids) for pids in each]
            time.sleep(watch_s)
            used = sorted(procs.cpu_s(pids) - was for pids, was in zip(each, before, strict=True))
            result.add(f"idle_core_share_n{size}", used[len(used) // 2] / watch_s)
            result.add(f"idle_rss_mb_n{size}", max(map(procs.rss_mb, each)))


def _timed_start(stage: Stage, name: str) -> float:
    """Seconds from the start of the process to its first answer; its engine is not there."""
    began = time.monotonic()
    node = stage.node(name, "http://127.0.0.1:9")
    while not _alive(node.ports[0]):
        if time.monotonic() - began > START_S:
            raise TimeoutError(f"{name} did not answer within {START_S} s")
        time.sleep(POLL_S)
    took = time.monotonic() - began
    say(f"  {name}: {took:.2f} s, {procs.rss_mb(node.family()):.0f} MB, {procs.cpu_s(node.family()):.2f} CPU s")
    stage.stop(node)
    return took


def _alive(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=1) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _cluster(stage: Stage, size: int) -> list[Subject]:
    nodes: list[Subject] = []
    for i in range(size):
        nodes.append(stage.node(f"idle{i}", stage.backends[i % 2], join=nodes[0].ports[0] if nodes else 0))
        stage.ready(nodes[-1])
    return nodes
