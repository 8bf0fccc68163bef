"""One prefix from one source, and from two at once, where the source is what is slow.

Two sources in processes of their own send at a given rate: the kernel paces their connections (SO_MAX_PACING_RATE), so
everything else is the real code path. Then the same on loopback as fast as it goes, where all share the same cores.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benches.child import Child
from benches.kv_pair import DEADLINE_S
from benches.kv_source import LABEL, SECRET, make_pool
from benches.result import Result
from kvmigrate.planner import PRIOR_LOOKUP_S
from kvmigrate.pull_types import Reason, Source
from kvmigrate.puller import Puller

TARGETS = {"two_sources_over_one": (">=", 1.7)}
BLOCK_BYTES = 3 << 20
COUNT = 42
#: Bytes per second of a source: 2 Gb/s. Two of them are far below what one connection on loopback does.
PACE = 250_000_000
#: What a source is taken for that is not paced: about what the pull rates of this bench are.
FREE = 3e9


async def several(result: Result, directory: Path, pairs: int) -> None:
    """Add the figures."""
    places = [directory / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    pool = make_pool(directory / "several.kvpool", BLOCK_BYTES, 4 * COUNT + 8)
    puller = Puller(pool, SECRET, LABEL, name="bench", same_host=False)

    async def pull(*sources: Source) -> float:
        pool.clear()
        came = await puller.pull(sources, range(COUNT), DEADLINE_S)
        if (came.reason, came.blocks) != (Reason.COMPLETE, COUNT):
            raise RuntimeError(f"the pull ended with {came}")
        return came.bytes / came.seconds

    with Child("benches.kv_source", str(places[0])) as first, Child("benches.kv_source", str(places[1])) as second:
        children = (first, second)
        ports = [child.ask(f"fill {BLOCK_BYTES} {COUNT} 1 0")["port"] for child in children]

        def sources(promised: float) -> list[Source]:
            return [Source(f"127.0.0.1:{port}", COUNT, promised, PRIOR_LOOKUP_S) for port in ports]

        def pace(*rates: int) -> None:
            for child, rate in zip(children, rates, strict=True):
                child.ask(f"pace {rate}")

        async def rates_of(both: list[Source]) -> tuple[float, float]:
            await pull(*both)  # connections are dialled, and slots have their memory
            one, two = [], []
            for _ in range(pairs):
                one.append(await pull(both[0]))
                two.append(await pull(*both))
            return statistics.median(one), statistics.median(two)

        one, two = await rates_of(sources(FREE))
        result.add("two_free_sources_over_one", two / one)
        pace(PACE, PACE)
        one, two = await rates_of(sources(PACE))
        result.add("one_source_gb_s", one / 1e9)
        result.add("two_sources_gb_s", two / 1e9)
        result.add("two_sources_over_one", two / one)
        pace(PACE // 10, PACE)
        slow = [await pull(*sources(PACE)) for _ in range(pairs)]
        result.add("two_sources_first_at_a_tenth_over_one", statistics.median(slow) / one)
    await puller.close()
    pool.close()
    result.note(
        f"one_source, two_sources: {COUNT} blocks of 3 MiB over TCP, each source paced to {PACE / 1e6:.0f} MB/s by the "
        "kernel; free: not paced, on the same cores; first_at_a_tenth: promised the full rate, gives a tenth"
    )
