"""From the samples of all rounds to the figures: ratios within a round, the median over the rounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

from benches.proxy.measure import Sample
from benches.result import Result

#: (kind of load, subject) -> one sample per round.
Table = dict[tuple[str, str], list[Sample]]
Read = Callable[[Sample], float]

#: Routers for language models, of which the best is compared with.
ROUTERS = ("sglang", "smg", "vllm-router", "litellm")
OURS = ("local", "forwarded", "cluster")
#: Cores on which two workers can be seen to scale: themselves, the main process, the generator and two backends.
SCALING_CORES = 6


def report(result: Result, table: Table) -> None:
    """Add every figure that the table has the samples for."""
    _against_sglang(result, table)
    _against_the_best(result, table)
    _add(result, "added_ttft_220kb_c20_ms", _added(table, "large", "local", lambda s: s.ttft50 * 1e3))
    for name in ("local", "cluster"):
        _add(result, f"{name}_sessions_affinity", _each(table, "sessions", name, lambda s: s.affinity))
    _workers(result, table, os.cpu_count() or 1)
    _raw(result, table)
    for (kind, name), samples in table.items():
        if failed := sum(sample.failed for sample in samples):
            result.note(f"{name}, {kind}: {failed} requests failed; its figures are of the others")


def _against_sglang(result: Result, table: Table) -> None:
    for name, most in (("local", "local"), ("forwarded", "forwarded")):
        ratio = _ratio(table, "c1", name, "sglang", lambda s: s.p50, less="direct")
        _add(result, f"{most}_added_p50_c1_over_sglang", ratio)
    _add(result, "local_rps_c16_over_sglang", _ratio(table, "c16", "local", "sglang", lambda s: s.rps))
    _add(result, "local_cpu_per_request_over_sglang", _ratio(table, "c16", "local", "sglang", _cpu))
    _add(result, "local_sessions_rps_over_sglang", _ratio(table, "sessions", "local", "sglang", lambda s: s.rps))
    _add(result, "cluster_sessions_rps_over_sglang", _ratio(table, "sessions", "cluster", "sglang", lambda s: s.rps))
    _add(result, "local_cpu_per_chunk_over_sglang", _ratio(table, "paced", "local", "sglang", _cpu_per_chunk))
    _add(result, "forwarded_cpu_per_request_over_smg", _ratio(table, "c16", "forwarded", "smg", _cpu))
    _add(result, "local_rps_c16_over_litellm", _ratio(table, "c16", "local", "litellm", lambda s: s.rps))
    stack = _ratio(table, "c16", "local", "production-stack", lambda s: s.rps)
    _add(result, "local_rps_c16_over_production_stack", stack)


def _workers(result: Result, table: Table, cores: int) -> None:
    """What two workers give, and what they cost; the CPU tells what they would give on cores of their own."""
    scale = _ratio(table, "c16", "workers", "local", lambda s: s.rps)
    if scale is None:
        return
    if cores >= SCALING_CORES:
        result.add("workers2_rps_scale", scale)
    else:
        result.add("workers2_rps_scale_on_few_cores", scale)
        result.note(f"workers2_rps_scale: {cores} cores run everything, {SCALING_CORES} are wanted to see it")
    main = _each(table, "c16", "workers", lambda s: s.main_cpu_per_request * 1e6)
    rest = _each(table, "c16", "workers", lambda s: (s.cpu_per_request - s.main_cpu_per_request) * 1e6)
    _add(result, "workers2_main_cpu_us_per_request", main)
    _add(result, "workers2_worker_cpu_us_per_request", rest)
    _add(result, "workers2_cpu_per_request_over_local", _ratio(table, "c16", "workers", "local", _cpu))
    _add(result, "workers2_rps_scale_by_cpu", _by_cpu(table, "c16", _cpu, lambda s: s.main_cpu_per_request))
    _add(
        result, "workers2_main_cpu_us_per_chunk", _each(table, "paced", "workers", lambda s: s.main_cpu_per_chunk * 1e6)
    )
    by_chunk = _by_cpu(table, "paced", _cpu_per_chunk, lambda s: s.main_cpu_per_chunk)
    _add(result, "workers2_chunks_scale_by_cpu", by_chunk)


def _by_cpu(table: Table, kind: str, cpu: Read, main: Read) -> float | None:
    """How many times as much two workers could do with a core for each process: the busiest of them is the limit."""
    pairs = zip(_good(table, kind, "local"), _good(table, kind, "workers"), strict=False)
    scales = [cpu(one) / max(main(two), (cpu(two) - main(two)) / 2) for one, two in pairs if cpu(two)]
    return median(scales) if scales else None


def _against_the_best(result: Result, table: Table) -> None:
    best50 = _over_best(table, "paced", lambda s: s.ttft50, min)
    best99 = _over_best(table, "paced", lambda s: s.ttft99, min)
    _add(result, "local_paced_ttft_p50_over_best_router", best50)
    _add(result, "local_paced_ttft_p99_over_best_router", best99)
    _add(result, "local_burst_tokens_over_best_router", _over_best(table, "burst", lambda s: s.tokens_s, max))


def _raw(result: Result, table: Table) -> None:
    """What the ratios are made of."""
    for kind, name in table:
        if name != "direct" and kind == "c1":
            _add(result, f"{name}_added_p50_us_c1", _added(table, kind, name, lambda s: s.p50 * 1e6))
            _add(result, f"{name}_added_p99_us_c1", _added(table, kind, name, lambda s: s.p99 * 1e6))
    for kind, name in table:
        if kind in ("c16", "sessions"):
            _add(result, f"{name}_rps_{kind}", _each(table, kind, name, lambda s: s.rps))
        if name != "direct" and kind == "c16":
            _add(result, f"{name}_cpu_us_per_request", _each(table, kind, name, lambda s: s.cpu_per_request * 1e6))
        if kind == "burst":
            _add(result, f"{name}_burst_tokens_s", _each(table, kind, name, lambda s: s.tokens_s))
        if kind == "paced":
            _add(result, f"{name}_paced_ttft_p50_ms", _each(table, kind, name, lambda s: s.ttft50 * 1e3))
            _add(result, f"{name}_paced_ttft_p99_ms", _each(table, kind, name, lambda s: s.ttft99 * 1e3))
            if name != "direct":
                _add(result, f"{name}_cpu_us_per_chunk", _each(table, kind, name, lambda s: s.cpu_per_chunk * 1e6))


def _cpu(sample: Sample) -> float:
    return sample.cpu_per_request


def _cpu_per_chunk(sample: Sample) -> float:
    return sample.cpu_per_chunk


def _add(result: Result, name: str, value: float | None) -> None:
    if value is not None:
        result.add(name, value)


def _good(table: Table, kind: str, name: str) -> list[Sample]:
    """The samples in which requests were answered, in the order of the rounds."""
    samples = table.get((kind, name), [])
    return samples if all(sample.rps for sample in samples) else []


def _each(table: Table, kind: str, name: str, read: Read) -> float | None:
    samples = _good(table, kind, name)
    return median(map(read, samples)) if samples else None


def _added(table: Table, kind: str, name: str, read: Read) -> float | None:
    pairs = list(zip(_good(table, kind, name), _good(table, kind, "direct"), strict=False))
    return median(read(sample) - read(direct) for sample, direct in pairs) if pairs else None


def _ratio(table: Table, kind: str, name: str, other: str, read: Read, *, less: str = "") -> float | None:
    """The median of the ratios of each round; with `less`, both less what that subject took in it."""
    ours, theirs = _good(table, kind, name), _good(table, kind, other)
    base = [read(sample) for sample in _good(table, kind, less)] if less else [0.0] * len(ours)
    pairs = [(read(a) - z, read(b) - z) for a, b, z in zip(ours, theirs, base, strict=False)]
    ratios = [a / b for a, b in pairs if b > 0]
    return median(ratios) if ratios else None


def _over_best(table: Table, kind: str, read: Read, best: Callable[[list[float]], float]) -> float | None:
    """Ours against the router that was best in the same round."""
    ours = _good(table, kind, "local")
    rivals = [samples for name in ROUTERS if (samples := _good(table, kind, name))]
    if not ours or not rivals:
        return None
    return median(read(sample) / best([read(r[i]) for r in rivals if i < len(r)]) for i, sample in enumerate(ours))
