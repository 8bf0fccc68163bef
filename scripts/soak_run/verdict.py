"""Judges a soak: nothing grows once it is warm, nothing is open at the end, every answer is right. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from soak_run.load import Tally
from soak_run.samples import Sample

GROWTH_PERCENT = 5.0
"""Growth from the second third of the run to the last that is still flat: allocators breathe. One block lost at each
pull would be about 9 % of a worker."""
GROWTH_MIB = 16.0
GROWTH_COUNT = 8.0
NOTHING_AT_THE_END = (
    ".pool_leases",
    ".pool_expired_leases",
    ".pool_partial",
    ".engine_running",
    ".engine_waiting",
    ".engine_kv_use",
)
"""A lease that ended by itself is one that nobody gave back; an engine without a request holds no block."""
DIFFER_SHARE = 0.01
"""Answers that may differ from the first one to the same prompt: another chunking of a prefill rounds differently, and
near a tie that changes a token, in float32 about never."""


def faults(samples: Sequence[Sample], end: Sample, tally: Tally) -> list[str]:
    """What is wrong, one line each; empty when nothing is."""
    found = [line for name in sorted(samples[0]) if (line := _growth(name, samples))]
    for name, value in sorted(end.items()):
        if name.endswith(NOTHING_AT_THE_END) and value != 0:
            found.append(f"{name} is {value:g} at the end")
        if name.endswith(".pool_granted") and value > samples[0][name]:
            found.append(f"{name} was {samples[0][name]:g} before the first request and is {value:g} at the end")
    answered = tally.requests - tally.cut
    if tally.failures:
        found.append(f"{sum(tally.failures.values())} requests failed: {dict(tally.failures.most_common(3))}")
    if answered and tally.differ > DIFFER_SHARE * answered:
        found.append(f"{tally.differ} of {answered} answers differ from the first one to the same prompt")
    if not tally.pulls:
        found.append("no block was ever pulled: nothing was tested")
    return found


def thirds(name: str, samples: Sequence[Sample]) -> tuple[float, float]:
    """Medians of the second and the last third of a figure."""
    values = [sample[name] for sample in samples if name in sample]
    third = max(1, len(values) // 3)
    return statistics.median(values[third : 2 * third] or values), statistics.median(values[-third:])


def _growth(name: str, samples: Sequence[Sample]) -> str:
    if not name.endswith(("_mib", "_files", "_threads")) or ".pool_" in name:
        return ""  # a pool fills up to its size, which is fixed
    middle, last = thirds(name, samples)
    allowed = GROWTH_MIB if name.endswith("_mib") else GROWTH_COUNT
    if last - middle <= max(allowed, middle * GROWTH_PERCENT / 100):
        return ""
    return f"{name} grew from {middle:.0f} to {last:.0f}"
