"""A plan as text and as JSON."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from pathlib import Path

from node.sizing.advice import HEADROOM, Advice, Stage
from node.sizing.engine import Rate

_UNKNOWN = (
    "how your requests differ from their means and come in bursts; what the engine's version, kernels, CUDA graphs and "
    "speculative decoding do; whether prompts that are shared meet in time to be found in a cache. "
    "Measure one node with `vllm bench serve` before you buy ten."
)


def as_text(advice: Advice, model: Path | None) -> str:
    """For people."""
    load, engine, hardware = advice.load, advice.engine, advice.engine.hardware
    hosts = f"hosts with {hardware.per_host} x {hardware.gpu.name}"
    joined = "NVLink" if hardware.joined else "PCIe"
    shared = f" ({100 * load.shared:.0f} % seen before)" if load.shared else ""
    shape = engine.model
    experts = f", {shape.active / 1e9:.1f} B of them at work for a token" if shape.experts else ""
    lines = [
        f"{shape.name}: {shape.parameters / 1e9:.1f} B weights in {shape.precision}{experts}",
        f"{hosts}, {joined} inside, {hardware.network_gbit:g} Gbit/s between",
        f"{load.requests_s:g} requests/s: prompts of {load.prompt} tokens{shared}, answers of {load.output}, at most "
        f"{load.context} together; first token within {load.ttft_s:g} s, the next within {load.between_s * 1000:g} ms",
        "",
    ]
    if advice.stage is Stage.NONE:
        lines.append("It does not fit.")
    else:
        each = f"{engine.gpus} GPU{'s' if engine.gpus > 1 else ''}"
        nodes, on = _plural(advice.nodes, "node"), _plural(advice.hosts, "host")
        lines += [
            f"Stage {advice.stage.number} of 4: {advice.stage.value}",
            f"{nodes} of {each} each, {advice.nodes * engine.gpus} GPUs on {on}",
            "",
            *_table(advice),
        ]
    lines += ["", "Why", *(f"  - {reason}" for reason in advice.reasons)]
    if advice.warnings:
        lines += ["", "Beware", *(f"  - {warning}" for warning in advice.warnings)]
    if advice.stage is not Stage.NONE:
        lines += ["", "Start each node with", f"  {command(advice, model)}", *_beside(advice)]
    return "\n".join([*lines, "", f"What this cannot know: {_UNKNOWN}"])


def as_dict(advice: Advice) -> dict[str, object]:
    """JSON-able; rates that do not exist are null."""
    engine = advice.engine
    return {
        "stage": advice.stage.number,
        "stage_name": advice.stage.value,
        "nodes": advice.nodes,
        "hosts": advice.hosts,
        "gpus_per_node": engine.gpus,
        "tensor_parallel": engine.tensor,
        "pipeline_parallel": engine.pipeline,
        "kv_tokens_per_node": engine.kv_tokens,
        "kv_bytes_per_token": engine.model.kv_token_bytes(engine.kv_precision),
        "weight_bytes": engine.model.weight_bytes,
        "parameters": engine.model.parameters,
        "limit": _rate(advice.capacity),
        "planned": _rate(advice.planned),
        "bottleneck": advice.bottleneck,
        "pull_s": advice.pull_s,
        "recompute_s": advice.recompute_s,
        "reasons": list(advice.reasons),
        "warnings": list(advice.warnings),
        "vllm_flags": list(advice.flags),
        "max_running": advice.slots,
    }


def command(advice: Advice, model: Path | None) -> str:
    """The command that starts one node."""
    name = str(model.parent if model.is_file() else model) if model else "MODEL"
    own = ["grapevine", "start", "--host", "0.0.0.0", "--model", name, "--max-running", str(advice.slots)]
    return shlex.join([*own, "--", *advice.flags])


def _table(advice: Advice) -> list[str]:
    engine, load = advice.engine, advice.load
    limit, planned = advice.capacity, advice.planned
    rows = [
        ("", "a node at its limit", f"planned ({100 * HEADROOM:.0f} %)"),
        ("requests/s", f"{limit.requests_s:.2f}", f"{planned.requests_s:.2f}"),
        ("requests at once", _number(limit.sequences), _number(planned.sequences)),
        ("first token", _time(limit.ttft_s), _time(planned.ttft_s)),
        ("between tokens", _time(limit.between_s), _time(planned.between_s)),
        ("time spent on prompts", f"{100 * limit.busy:.0f} %", f"{100 * planned.busy:.0f} %"),
    ]
    room = engine.kv_tokens / (load.prompt + load.output)
    return [
        *(f"  {name:24}{one:>22}{two:>18}" for name, one, two in rows),
        f"  {'room for KV':24}{f'{engine.kv_tokens:,} tokens':>22}   = {room:.0f} requests of the mean length",
        f"  {'stopped by':24}{advice.bottleneck:>22}",
    ]


def _beside(advice: Advice) -> list[str]:
    lines = []
    per_host = advice.engine.hardware.per_host // advice.engine.tensor
    if advice.nodes > 1:
        lines.append("every one but the first with --join FIRST_HOST:18100")
    if advice.nodes > 1 and per_host > 1:
        lines.append(f"up to {per_host} on a host: CUDA_VISIBLE_DEVICES, and a --port of its own for each")
    if advice.engine.pipeline > 1:
        lines.append("the hosts of one engine are joined by vLLM's own multi-node runtime, below the node")
    return [f"    {line}" for line in lines]


def _rate(rate: Rate) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in asdict(rate).items()}


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "-"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
