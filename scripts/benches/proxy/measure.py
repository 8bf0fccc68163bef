"""One measurement: load on a subject, with what its processes used meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benches.child import Child
from benches.proxy import procs
from benches.proxy.load import KINDS, Ask
from benches.proxy.subjects import Subject
from benches.result import say

#: Share of failed requests from which a measurement counts as none.
MAX_FAILED = 0.01
#: Paced streams are measured for the time of so many of them, one after the other.
ANSWERS = 3
#: Seconds from the start of the idle streams to the look at the memory: all are open then, none has ended.
SETTLE_S = 3.2
#: The soak warms up with this share of its requests before it looks at the memory, and looks so many times.
WARM_SHARE = 0.2
LOOKS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement gave. Seconds; `cpu` of all processes of the subject."""

    rps: float
    p50: float
    p99: float
    ttft50: float
    ttft99: float
    tokens_s: float
    cpu_per_request: float
    cpu_per_chunk: float
    affinity: float
    failed: int
    #: The same of the first process alone: of a node with workers the one that decides.
    main_cpu_per_request: float = 0.0
    main_cpu_per_chunk: float = 0.0


class Measure:
    """Asks the load generator and reads the clocks of the processes around it."""

    def __init__(self, load: Child) -> None:
        self._load = load

    def sample(self, subject: Subject, kind: str, *, seconds: float, warm: int) -> Sample:
        """Measure once, for at least a few answers a client. What warms up goes first, and is not in the CPU."""
        seconds = max(seconds, ANSWERS * KINDS[kind].lasts_s)
        self._load.ask(Ask(subject.ports, kind, seconds, requests=warm).line())
        processes = subject.family()
        before, main = procs.cpu_s(processes), procs.cpu_s(subject.pids)
        told = self._load.ask(Ask(subject.ports, kind, seconds).line())
        used, main = procs.cpu_s(processes) - before, procs.cpu_s(subject.pids) - main
        sample = sample_of(told, used, KINDS[kind].stream, main=main)
        say(
            f"  {subject.name:12} {sample.rps:8.0f} req/s  p50/p99 {sample.p50 * 1e3:8.2f}/{sample.p99 * 1e3:8.2f} ms"
            f"  ttft {sample.ttft50 * 1e3:7.2f}/{sample.ttft99 * 1e3:7.2f} ms  cpu {sample.cpu_per_request * 1e6:7.0f}"
            f" us/req  {sample.cpu_per_chunk * 1e6:6.1f} us/chunk  affinity {sample.affinity:.2f}"
            + (f"  FAILED {sample.failed}" if sample.failed else "")
        )
        return sample


def sample_of(told: dict[str, Any], cpu: float, stream: bool, *, main: float = 0.0) -> Sample:
    """The figures of an answer of the generator. ``main``: CPU of the first process."""
    requests, events, seconds = told["requests"], told["events"], told["seconds"]
    return Sample(
        rps=requests / seconds,
        p50=told["whole"][0],
        p99=told["whole"][1],
        ttft50=told["first"][0],
        ttft99=told["first"][1],
        tokens_s=events / seconds,
        cpu_per_request=cpu / requests if requests else 0.0,
        cpu_per_chunk=cpu / events if stream and events else 0.0,
        affinity=told["affinity"],
        failed=told["failed"] if told["failed"] > MAX_FAILED * max(1, requests) else 0,
        main_cpu_per_request=main / requests if requests else 0.0,
        main_cpu_per_chunk=main / events if stream and events else 0.0,
    )


def idle_streams(load: Child, subject: Subject) -> tuple[float, float]:
    """Kilobytes that each of 1,000 open, nearly silent streams holds, and megabytes before them."""
    kind = KINDS["idle"]
    processes = subject.family()
    before = procs.rss_mb(processes)
    ask = Ask(subject.ports, "idle", seconds=kind.lasts_s * 2, requests=kind.clients)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(load.ask, ask.line())
        time.sleep(SETTLE_S)
        during = procs.rss_mb(processes)
        told = waiting.result()
    if told["requests"] < kind.clients:
        say(f"  {subject.name}: only {told['requests']} of {kind.clients} streams were whole")
    return max(0.0, during - before) * 1e3 / kind.clients, before


def soak(load: Child, subject: Subject, requests: int) -> float:
    """Megabytes that resident memory grows by in a million requests: the slope over `requests`, after a warm-up."""
    return slope(lambda n: _some(load, subject, n), requests)


def slope(more: Callable[[int], float], requests: int) -> float:
    """The least-squares slope of memory over requests, in MB per million; `more` sends some and tells the memory."""
    more(int(requests * WARM_SHARE))
    step = max(1, int(requests * (1 - WARM_SHARE)) // LOOKS)
    xs = [step * (i + 1) / 1e6 for i in range(LOOKS)]
    ys = [more(step) for _ in xs]
    x_mean, y_mean = sum(xs) / LOOKS, sum(ys) / LOOKS
    rise = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)
    return round(rise, 3)


def _some(load: Child, subject: Subject, requests: int) -> float:
    load.ask(Ask(subject.ports, "c16", seconds=120.0, requests=requests).line())
    return procs.rss_mb(subject.family())
