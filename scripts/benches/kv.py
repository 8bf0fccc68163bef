"""KV blocks between two pools: over TCP against this machine's own limit, on the same host, from two sources at once,
lookups, the node's loop.

Two processes with real pools on loopback. The limit is a minimal sendall / recv_into program without digests over one
connection, measured before or after each pull in turn, so that both see the same machine: once from one buffer into one
buffer of a message's size (the strict limit, which lives in the CPU's caches), and once through as much memory as the
blocks take (`same_memory`).
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import statistics
import tempfile
import time
from pathlib import Path

from benches import kv_libraries, kv_several
from benches.child import Child
from benches.kv_pair import Pair, no_digests
from benches.result import Result

SIZES = {"64k": 64 << 10, "1m": 1 << 20, "3m": 3 << 20, "16m": 16 << 20}
LARGE = ("1m", "3m", "16m")
TARGETS = {
    **{f"pull_over_tcp_limit_nodigest_{size}": (">=", 0.8) for size in LARGE},
    **{f"pull_over_tcp_limit_{size}": (">=", 0.6) for size in LARGE},
    **{f"same_host_gb_s_{size}": (">=", 8.0) for size in ("1m", "3m")},
    **kv_libraries.TARGETS,
    **kv_several.TARGETS,
    "lookup_first_block_ms": ("<=", 2.0),
    "lookup_1000_ms": ("<=", 5.0),
    "loop_blocked_max_ms": ("<=", 5.0),
}
#: Bytes of one pull, and of the smallest blocks, which are too many otherwise.
TOTAL = 128 << 20
TOTAL_SMALL = 32 << 20
#: Blocks of the lookups.
MANY = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench."""
    parser.add_argument("--pairs", type=int, default=9, help="pulls, and runs of the TCP program, per size (9)")


def run(options: argparse.Namespace) -> Result:
    """Measure everything."""
    result = Result("kv", TARGETS)
    pairs = 3 if options.quick else options.pairs
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        directory = Path(name)
        with Child("benches.kv_source", name) as source:
            for size, block_bytes in SIZES.items():
                asyncio.run(_rates(result, source, directory, size, block_bytes, pairs))
            asyncio.run(_lookups(result, source, directory, 10 * pairs))
            asyncio.run(_encrypted(result, source, directory, pairs))
            asyncio.run(kv_several.several(result, directory, pairs))
            for library in kv_libraries.LIBRARIES:
                asyncio.run(kv_libraries.compare(result, source, directory, library, pairs))
    result.note("tcp_limit: sendall / recv_into, one buffer each; same_memory: through as much memory as the blocks")
    result.note("pull_fresh: into slots that have no memory yet; pull_prepared: the node's reserve has taken it ahead")
    result.note(
        "loop_blocked_*: how late a timer of 1 ms is in the source while it serves, waiting for a core included; "
        "loop_blocked_with_a_core: without the time that its thread was ready to run and got none"
    )
    return result


async def _rates(  # noqa: PLR0917 - one call
    result: Result, source: Child, directory: Path, size: str, block_bytes: int, pairs: int
) -> None:
    count = max(8, (TOTAL_SMALL if size == "64k" else TOTAL) // block_bytes)
    pair = Pair(source, directory, block_bytes, count)
    try:
        if size == "3m":
            result.add("pull_fresh_gb_s_3m", await pair.pull() / 1e9)
            pair.renew()
            result.add("pull_prepared_gb_s_3m", await pair.pull() / 1e9)
        await pair.pull()
        pair.plain()
        rates = _Rates(source, pair)
        for turn in range(pairs):
            await rates.turn(pull_first=turn % 2 == 1)
        rates.report(result, size)
        if size == "3m":
            await _costs(result, source, pair, pairs)
        await _same_host(result, pair, size, pairs)
    finally:
        await pair.close()
    await _without_digests(result, source, directory, size, block_bytes, pairs)


class _Rates:
    """Pulls and runs of the minimal program, in turns, by the clock and by the CPU time of both sides."""

    def __init__(self, source: Child, pair: Pair) -> None:
        self._source = source
        self._pair = pair
        self._rates: dict[str, list[float]] = {name: [] for name in ("pull", "plain", "memory")}
        #: CPU seconds of target and source.
        self._cpu = {name: [0.0, 0.0] for name in self._rates}

    async def turn(self, *, pull_first: bool) -> None:
        """One of each; the pull and the strict limit take turns in going first."""
        order = ("pull", "plain", "memory") if pull_first else ("plain", "pull", "memory")
        for name in order:
            here, there = time.process_time(), self._source.ask("cpu")
            if name == "pull":
                rate = await self._pair.pull()
            else:
                rate = self._pair.plain(same_memory=name == "memory")
            self._rates[name].append(rate)
            self._cpu[name][0] += time.process_time() - here
            self._cpu[name][1] += self._source.ask("cpu") - there

    def report(self, result: Result, size: str) -> None:
        """Add the figures."""
        pull, plain, memory = (self._rates[name] for name in ("pull", "plain", "memory"))
        busiest = {name: max(sides) for name, sides in self._cpu.items()}
        result.add(f"tcp_limit_gb_s_{size}", statistics.median(plain) / 1e9)
        result.add(f"pull_gb_s_{size}", statistics.median(pull) / 1e9)
        result.add(f"pull_over_tcp_limit_{size}", statistics.median(map(operator.truediv, pull, plain)))
        result.add(f"pull_over_tcp_same_memory_{size}", statistics.median(map(operator.truediv, pull, memory)))
        result.add(f"busier_side_cpu_over_tcp_{size}", busiest["plain"] / busiest["pull"])
        result.add(f"busier_side_cpu_over_tcp_same_memory_{size}", busiest["memory"] / busiest["pull"])


async def _costs(result: Result, source: Child, pair: Pair, pairs: int) -> None:
    """CPU of both sides, and the source's event loop, in pulls one after the other."""
    cpu = time.process_time() + source.ask("cpu")
    for _ in range(pairs):
        await pair.pull()
    spent = time.process_time() + source.ask("cpu") - cpu
    source.ask("watch")
    for _ in range(pairs):
        await pair.pull()
    late = source.ask("loop")
    result.add("cpu_s_per_gb", spent / (pairs * pair.bytes / 1e9))
    result.add("loop_blocked_max_ms", late["max"] * 1000)
    result.add("loop_blocked_p99_ms", late["p99"] * 1000)
    result.add("loop_blocked_with_a_core_max_ms", late["own"] * 1000)


async def _same_host(result: Result, pair: Pair, size: str, pairs: int) -> None:
    await pair.pull(same_host=True)
    rates, plain, spent = [], [], 0.0
    for _ in range(pairs):
        cpu = time.process_time()
        rates.append(await pair.pull(same_host=True))
        spent += time.process_time() - cpu
        plain.append(pair.memcpy())
    result.add(f"same_host_gb_s_{size}", statistics.median(rates) / 1e9)
    result.add(f"same_host_cpu_s_per_gb_{size}", spent / (pairs * pair.bytes / 1e9))
    result.add(f"memcpy_gb_s_{size}", statistics.median(plain) / 1e9)


async def _without_digests(  # noqa: PLR0917 - one call
    result: Result, source: Child, directory: Path, size: str, block_bytes: int, pairs: int
) -> None:
    count = max(8, (TOTAL_SMALL if size == "64k" else TOTAL) // block_bytes)
    with no_digests():
        pair = Pair(source, directory, block_bytes, count, digests=False)
        try:
            await pair.pull()
            over, over_memory = [], []
            for _ in range(pairs):
                plain = pair.plain()
                rate = await pair.pull()
                over.append(rate / plain)
                over_memory.append(rate / pair.plain(same_memory=True))
            result.add(f"pull_over_tcp_limit_nodigest_{size}", statistics.median(over))
            result.add(f"pull_over_tcp_same_memory_nodigest_{size}", statistics.median(over_memory))
        finally:
            await pair.close()


async def _encrypted(result: Result, source: Child, directory: Path, pairs: int) -> None:
    """Over TLS."""
    pair = Pair(source, directory, SIZES["3m"], TOTAL // SIZES["3m"], encrypt=True)
    try:
        await pair.pull()
        cpu = time.process_time() + source.ask("cpu")
        rates = [await pair.pull() for _ in range(pairs)]
        spent = time.process_time() + source.ask("cpu") - cpu
        result.add("pull_encrypted_gb_s_3m", statistics.median(rates) / 1e9)
        result.add("cpu_s_per_gb_encrypted", spent / (pairs * pair.bytes / 1e9))
    finally:
        await pair.close()


async def _lookups(result: Result, source: Child, directory: Path, times: int) -> None:
    """A warm connection: one block of 1 MiB looked up and pulled; many small ones that are all here, or nowhere."""
    pair = Pair(source, directory, 1 << 20, 16)
    try:
        await pair.pull()
        first = []
        for _ in range(times):
            pair.pool.clear()
            first.append(await _milliseconds(pair, 1))
        result.add("lookup_first_block_ms", statistics.median(first))
    finally:
        await pair.close()
    pair = Pair(source, directory, 4096, MANY)
    try:
        await pair.pull()
        known = [await _milliseconds(pair, MANY) for _ in range(times)]
        unknown = [await _milliseconds(pair, MANY, 10 * MANY) for _ in range(times)]
        result.add("lookup_1000_ms", max(statistics.median(known), statistics.median(unknown)))
    finally:
        await pair.close()


async def _milliseconds(pair: Pair, count: int, first: int = 0) -> float:
    started = time.perf_counter()
    await pair.ask(count, first=first)
    return (time.perf_counter() - started) * 1000
