"""Collects `Facts`: the only part that touches host and network. Everything has a deadline, nothing is changed."""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gossip.build import is_compiled
from node import __version__, addresses, dirs
from node.doctor.certificate import read_files
from node.doctor.facts import Facts, Port, members_of, own_of
from node.doctor.gpus import find_gpus
from node.doctor.reach import ask_clock, look_at
from node.engine.command import is_cpu_build, vllm_version

#: Peers that are dialled, and how many at a time.
MAX_PEERS = 64
AT_ONCE = 16
#: Seconds that multicast DNS gets to answer.
MDNS_S = 2.0


def gather(
    state: Mapping[str, Any] | None, http_port: int, *, tls_files: tuple[str, str] = ("", ""), mdns: bool = True
) -> Facts:
    """Look at this host, and from here at the members that ``state`` (of /gossip/state) names.

    Without a state, ``http_port`` is the port that a node would be started with. ``tls_files``: certificate and key of
    the HTTP port, where they are on this host.
    """
    own = own_of(state)
    members = [member for member in members_of(state) if member is not own]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.submit(_mdns) if mdns else None
        peers = tuple(pool.map(look_at, members[:MAX_PEERS]))
        names, mdns_error = found.result() if found else (None, "")
    gpus, links, gpu_error = find_gpus()
    shm = _statvfs(str(dirs.SHARED_MEMORY))
    return Facts(
        state=state,
        ports=tuple(_ports(state, http_port)),
        peers=peers,
        unlooked=max(0, len(members) - MAX_PEERS),
        shm_total=shm[0] if shm else None,
        shm_free=shm[1] if shm else None,
        gpus=gpus,
        links=links,
        gpu_error=gpu_error,
        python=platform.python_version(),
        grapevine=f"{__version__} (compiled)" if is_compiled() else __version__,
        vllm=vllm_version(),
        vllm_cpu=is_cpu_build(),
        mdns=names,
        mdns_error=mdns_error,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        now=time.time(),
        tls_files=read_files(*tls_files) if tls_files[0] else None,
        shown=ask_clock(url)[1] if (url := str(own.get("url") or "")) else None,
    )


def _ports(state: Mapping[str, Any] | None, http_port: int) -> Iterable[Port]:
    if state is not None:
        me = own_of(state)
        for what, key in (("HTTP", "http"), ("gossip", "address"), ("KV blocks", "kv")):
            if me.get(key):
                yield Port(what, addresses.split_address(str(me[key]))[1], "ours")
        return
    for what, offset in (("HTTP", 0), ("gossip", addresses.GOSSIP_OFFSET), ("KV blocks", addresses.KV_OFFSET)):
        number = addresses.beside(http_port, offset)
        kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM) if what == "gossip" else (socket.SOCK_STREAM,)
        states = [_port_state(number, kind) for kind in kinds]
        yield Port(what, number, next((word for word in states if word != "free"), "free"))


def _port_state(number: int, kind: socket.SocketKind) -> str:
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind is socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            return "forbidden" if error.errno == errno.EACCES else "taken"
    return "free"


def _statvfs(path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _mdns() -> tuple[frozenset[str] | None, str]:
    """Names of nodes that answer to multicast DNS."""
    from zeroconf import ServiceBrowser, ServiceStateChange, Zeroconf

    from gossip.discovery import SERVICE_TYPE

    found: set[str] = set()

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Added:
            info = zeroconf.get_service_info(service_type, name, timeout=int(MDNS_S * 500))
            value = info.properties.get(b"name") if info is not None else None
            if value:
                found.add(value.decode("ascii", "replace"))

    try:
        with Zeroconf() as zeroconf:
            browser = ServiceBrowser(zeroconf, SERVICE_TYPE, handlers=[changed])
            time.sleep(MDNS_S)
            browser.cancel()
    except OSError as error:
        return None, error.strerror or str(error)
    return frozenset(found), ""
