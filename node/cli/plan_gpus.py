"""Which GPUs `grapevine plan` reckons with: a kind by its name, those of this host, or those of a running cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from node.addresses import split_address
from node.sizing.hardware import GpuKind, kind_named, kind_of_smi
from node.sizing.shape import SizingError

HERE, CLUSTER = "here", "cluster"


@dataclass(frozen=True, slots=True)
class Gpus:
    """``per_host``, ``hosts``: 0 where they were not asked."""

    kind: GpuKind
    per_host: int = 0
    hosts: int = 0
    nvlink: bool = False


def gpus_of(name: str, node: str | None, state_dir: Path | None) -> Gpus:
    """What ``--gpu`` stands for. :raises SizingError: there is none, or its kind is not known."""
    if name == HERE:
        return _here()
    if name == CLUSTER:
        return _of_cluster(node, state_dir)
    kind = kind_named(name)
    return Gpus(kind, nvlink=kind.nvlink > 0)


def _here() -> Gpus:
    from node.doctor.gpus import find_gpus, joined

    gpus, links, why = find_gpus()
    if not gpus:
        raise SizingError(f"--gpu here: this host shows no NVIDIA GPU{f' ({why})' if why else ''}; name a kind instead")
    smallest = min(gpus, key=lambda one: one.memory_mib)
    return Gpus(kind_of_smi(smallest.name, smallest.memory_mib), len(gpus), nvlink=joined(links))


def _of_cluster(node: str | None, state_dir: Path | None) -> Gpus:
    """What the nodes of a cluster tell of their hosts, each asked itself."""
    from node.cli.ask import Refused, Unreachable, ask, find_node

    hosts: dict[str, Mapping[str, Any]] = {}
    for member in ask(find_node(node, state_dir), "/gossip/members")["members"]:
        if member["state"] != "alive" or not member["url"]:
            continue
        try:  # several nodes of one host tell of the same GPUs
            hosts[split_address(member["http"])[0]] = ask(member["url"], "/gossip/state").get("host") or {}
        except (Refused, Unreachable) as error:
            click.echo(f"warning: {member['name']} is left out: {error.message}", err=True)
    return together(list(hosts.values()))


def together(hosts: Sequence[Mapping[str, Any]]) -> Gpus:
    """What all hosts with GPUs have in common: the smallest kind, the fewest of them, NVLink only where all have it."""
    with_gpus = [host for host in hosts if host.get("gpus")]
    if not with_gpus:
        raise SizingError("--gpu cluster: no node tells of a GPU (of its host, by nvidia-smi); name a kind instead")
    gpus = [gpu for host in with_gpus for gpu in host["gpus"]]
    smallest = min(gpus, key=lambda gpu: gpu["memory_mib"])
    kinds = sorted({gpu["name"] for gpu in gpus})
    counts = {len(host["gpus"]) for host in with_gpus}
    if len(kinds) > 1 or len(counts) > 1:
        told = f"{', '.join(kinds)}; {min(counts)} to {max(counts)} in a host"
        click.echo(f"warning: the hosts differ ({told}): reckoned with the smallest of each", err=True)
    nvlink = all(bool(host.get("nvlink")) for host in with_gpus)
    return Gpus(kind_of_smi(smallest["name"], smallest["memory_mib"]), min(counts), len(with_gpus), nvlink)
