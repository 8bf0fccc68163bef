"""What the checks look at: values gathered once. None means that it could not be found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from node.doctor.certificate import Certificate, Files

State = Mapping[str, Any]


def members_of(state: State | None) -> list[Mapping[str, Any]]:
    """The members that a node's answer to /gossip/state names."""
    return list((state or {}).get("members") or [])


def own_of(state: State | None) -> Mapping[str, Any]:
    """What the node tells there of itself."""
    name = (state or {}).get("self")
    return next((member for member in members_of(state) if member.get("name") == name), {})


@dataclass(frozen=True, slots=True)
class Port:
    """One port of the node: ``what`` it is for, and whether it is ours, free, or somebody else's."""

    what: str
    number: int
    #: "ours": the running node has it; "free"; "taken"; "forbidden": this user may not listen there.
    state: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi names it; memory in MiB."""

    index: int
    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Another member as this host reaches it. ``failed``: what -> why, of those TCP ports that did not answer."""

    name: str
    state: str
    version: str
    failed: Mapping[str, str] = field(default_factory=dict)
    #: Its clock less ours, seconds, good to about one second; None = not asked.
    clock_offset_s: float | None = None
    #: Largest packet on the way there as the kernel knows it, bytes.
    path_mtu: int | None = None
    #: Where clients reach its HTTP port, and the certificate that they see there.
    host: str = ""
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was found out."""

    #: The node's own answer to /gossip/state; None without a running node.
    state: State | None = None
    ports: tuple[Port, ...] = ()
    peers: tuple[Peer, ...] = ()
    #: Members that were not looked at: there are too many.
    unlooked: int = 0
    #: Shared memory in bytes; None where the host has none.
    shm_total: int | None = None
    shm_free: int | None = None
    memory_total: int | None = None
    gpus: tuple[Gpu, ...] = ()
    #: Pairs of GPUs -> the link between them, as `nvidia-smi topo` words it (NV12, PIX, PHB, NODE, SYS).
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    #: Why nvidia-smi told nothing, where there are signs of a GPU.
    gpu_error: str = ""
    python: str = ""
    grapevine: str = ""
    vllm: str | None = None
    vllm_cpu: bool = False
    #: Names of nodes that multicast DNS found; None = it could not be asked.
    mdns: frozenset[str] | None = None
    mdns_error: str = ""
    #: Open files that this user may have.
    max_files: int | None = None
    #: Seconds since 1970.
    now: float = 0.0
    #: The files of the node's certificate; None where it has none, or they are on another host.
    tls_files: Files | None = None
    #: The certificate that the node shows to clients.
    shown: Certificate | None = None
