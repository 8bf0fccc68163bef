"""Where the nodes of a run live: a network namespace each, on one switch, so that links between them can be cut.

Rules
1. No rights are needed where the kernel allows user namespaces: the whole run then happens in one (`enter`), with
   networks, mounts and shared memory of its own, and leaves nothing behind. Nothing outside can be reached from it.
2. A cut is silent: the neighbour entry of the other node points to an address that nobody has, so packets vanish on
   the switch, those of open connections too. Nobody is told, as with a pulled cable.
3. Where namespaces are not allowed all nodes share loopback, and links cannot be cut; the run says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

#: Set in the process that has entered its own namespaces.
INSIDE = "CHAOS_INSIDE"
#: Seconds for one command.
COMMAND_S = 10.0
_NOBODY = "02:00:00:00:00:ff"
#: Our own address, on the bridge.
_SWITCH = "10.77.255.254"
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--kill-child=SIGTERM", "--fork")


class Network(Protocol):
    """What a run needs of it."""

    #: Why links cannot be cut; empty when they can.
    no_cuts: str

    def host(self, number: int) -> str:
        """The address of a node, by its number from 0."""
        ...

    def prefix(self, number: int) -> list[str]:
        """What comes before the command of a process of that node."""
        ...

    def cut(self, one: int, other: int) -> None:
        """From now on they cannot reach each other."""
        ...

    def heal(self, one: int, other: int) -> None:
        """Now they can."""
        ...


class Loopback:
    """All nodes at one address, on ports of their own."""

    def __init__(self, why: str) -> None:
        self.no_cuts = why

    def host(self, number: int) -> str:
        """Loopback, whoever asks."""
        return "127.0.0.1"

    def prefix(self, number: int) -> list[str]:
        """Nothing."""
        return []

    def cut(self, one: int, other: int) -> None:
        """Never called: see `no_cuts`."""
        raise RuntimeError(self.no_cuts)

    def heal(self, one: int, other: int) -> None:
        """Never called: see `no_cuts`."""
        raise RuntimeError(self.no_cuts)


class Namespaces:
    """A namespace for each node, joined by a bridge that we sit on too."""

    no_cuts = ""

    def __init__(self, size: int) -> None:
        _run("mount", "-t", "tmpfs", "none", "/run")
        _run("mount", "-t", "tmpfs", "none", "/dev/shm")
        _run("ip", "link", "set", "lo", "up")
        # No snooping: nobody asks for memberships here, and the switch would stop passing multicast (zeroconf).
        _run("ip", "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _run("ip", "addr", "add", f"{_SWITCH}/16", "dev", "br0")
        _run("ip", "link", "set", "br0", "up")
        for number in range(size):
            self._add(number)

    def host(self, number: int) -> str:
        """The address of a node."""
        return f"10.77.{number // 250}.{number % 250 + 1}"

    def prefix(self, number: int) -> list[str]:
        """Enters the node's namespace; the process stays the same."""
        return ["nsenter", f"--net=/run/netns/n{number}"]

    def cut(self, one: int, other: int) -> None:
        """Silently, both ways."""
        for here, there in ((one, other), (other, one)):
            entry = (self.host(there), "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")
            _run("ip", "-n", f"n{here}", "neigh", "replace", *entry)

    def heal(self, one: int, other: int) -> None:
        """Both ways."""
        for here, there in ((one, other), (other, one)):
            _run("ip", "-n", f"n{here}", "neigh", "del", self.host(there), "dev", "eth0")

    def _add(self, number: int) -> None:
        name = f"n{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"h{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", f"h{number}", "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.host(number)}/16", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        # As on a real host: by its default route a node finds the address at which others reach it.
        _run("ip", "-n", name, "route", "add", "default", "via", _SWITCH)


def enter(argv: Sequence[str]) -> str:
    """Start again in namespaces of our own, as `argv`; returns only where that is impossible, with the reason."""
    try:
        _run(*_UNSHARE, "sh", "-c", "mount -t tmpfs none /run && ip link set lo up && ip netns add try")
    except (OSError, RuntimeError) as error:
        return str(error)
    os.environ[INSIDE] = "1"
    return os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, *argv])


def make(size: int, why_not: str) -> Network:
    """The network of this run: namespaces when we are inside of our own."""
    return Namespaces(size) if os.environ.get(INSIDE) else Loopback(why_not)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:8])}: {done.stderr.strip()[:200]}")
