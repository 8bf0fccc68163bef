"""`grapevine plan`: which stage of scaling a model and a load need."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from node.cli.inspect import node_options
from node.cli.number import NumberRange


@click.command(context_settings={"max_content_width": 110})
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Directory of a model, or its config.json.")
@click.option("--parameters", type=float, metavar="BILLIONS", help="Instead of --model: weights of a dense model.")
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp8", "int4", "mxfp4"]),
    help="Of the weights.  [default: that of --model, else bf16]",
)
@click.option("--kv-precision", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--requests", type=NumberRange(0.001, 1e6), required=True, help="Requests per second, all together.")
@click.option("--prompt", type=click.IntRange(1, 10_000_000), required=True, help="Tokens of a prompt, mean.")
@click.option("--output", type=click.IntRange(1, 1_000_000), required=True, help="Tokens of an answer, mean.")
@click.option(
    "--longest", type=click.IntRange(0), default=0, help="Longest prompt and answer.  [default: 4 times the mean]"
)
@click.option(
    "--shared",
    type=NumberRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of prompt tokens that were seen before (system prompts, conversations, documents).",
)
@click.option("--ttft", type=NumberRange(0.001), default=2.0, show_default=True, help="First token within, seconds.")
@click.option("--between", type=NumberRange(0.001), default=0.1, show_default=True, help="Next token within, seconds.")
@click.option(
    "--gpu",
    default="H100",
    show_default=True,
    help="Kind of GPU; `here`: those of this host, by nvidia-smi; `cluster`: those of the hosts of a running cluster.",
)
@click.option(
    "--gpus-per-host", type=click.IntRange(1, 64), help="[default: 8, with `here` or `cluster` what there is]"
)
@click.option(
    "--hosts",
    type=click.IntRange(0),
    default=0,
    help="Hosts that you have.  [default: as many as it takes, with `cluster` those there are]",
)
@click.option("--nvlink/--pcie", default=None, help="What joins the GPUs of a host.  [default: what the GPU has]")
@click.option("--network", type=NumberRange(0.01), default=25.0, show_default=True, help="Between hosts, Gbit/s.")
@click.option(
    "--utilization",
    type=NumberRange(0.1, 0.99),
    default=0.9,
    show_default=True,
    help="vLLM's --gpu-memory-utilization.",
)
@click.option("--tensor", type=click.IntRange(0, 64), default=0, help="Force a degree of tensor parallelism.")
@node_options
def plan(
    *,
    model: Path | None,
    parameters: float | None,
    precision: str | None,
    kv_precision: str,
    requests: float,
    ttft: float,
    between: float,
    gpu: str,
    gpus_per_host: int | None,
    hosts: int,
    nvlink: bool | None,
    network: float,
    utilization: float,
    tensor: int,
    node: str | None,
    state_dir: Path | None,
    as_json: bool,
    **lengths: Any,
) -> None:
    """Plan: one machine, replicas, tensor parallelism inside a host, or a cluster that moves KV blocks?

    Says how many nodes, their room for KV and requests, what stops them, why, what does not pay, and the command for
    each node. It is arithmetic on data sheets: measure before you buy. docs/sizing.md has the formulas and how far they
    were from published deployments.

    Exit status: 0 a plan was found, 1 it does not fit, 2 wrong usage.
    """
    from node.cli.plan_gpus import gpus_of
    from node.sizing.advice import Stage, advise
    from node.sizing.config_json import read_model
    from node.sizing.engine import Load
    from node.sizing.hardware import Hardware
    from node.sizing.shape import SizingError, shape_of

    if (model is None) == (parameters is None):
        raise click.UsageError("give either --model PATH or --parameters BILLIONS")
    try:
        shape = read_model(model, precision) if model else shape_of(parameters or 0.0, precision or "bf16")
        found = gpus_of(gpu, node, state_dir)
        hardware = Hardware(
            gpu=found.kind,
            per_host=gpus_per_host or found.per_host or 8,
            hosts=hosts or found.hosts,
            nvlink=found.nvlink if nvlink is None else nvlink,
            network_gbit=network,
            utilization=utilization,
        )
        load = Load(requests_s=requests, ttft_s=ttft, between_s=between, **lengths)
        if shape.max_len and load.context > shape.max_len:
            load = Load(requests_s=requests, ttft_s=ttft, between_s=between, **{**lengths, "longest": shape.max_len})
        if tensor and (tensor > hardware.per_host or shape.heads % tensor):
            raise SizingError(
                f"--tensor {tensor}: the {shape.heads} heads and {hardware.per_host} GPUs do not allow it"
            )
        advice = advise(shape, hardware, load, kv_precision=kv_precision, tensor=tensor)
    except SizingError as error:
        raise click.UsageError(str(error)) from error
    from node.cli import plan_view

    if as_json:
        click.echo(json.dumps(plan_view.as_dict(advice)))
    else:
        click.echo(plan_view.as_text(advice, model))
    sys.exit(1 if advice.stage is Stage.NONE else 0)
