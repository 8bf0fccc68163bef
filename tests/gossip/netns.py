"""Hosts on two switches, as network namespaces, each with one real agent in a process of its own.

The first network has IPv4 addresses (`eth0`), the second IPv6 (`eth1`). Agents live on the first unless told.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PORT = 7946
#: Names of several labs of one process differ by a letter.
_LETTERS = itertools.cycle(string.ascii_lowercase)
#: The two switches.
BRIDGES = ("br0", "br1")
#: Seconds for a command of `ip`.
COMMAND_S = 10


class NotPermittedError(Exception):
    """This machine does not let us make network namespaces; the text says what is missing."""


def ip(*arguments: str) -> None:
    """Run `ip`. :raises NotPermittedError: it is not there, or refuses."""
    if shutil.which("ip") is None:
        raise NotPermittedError("the command ip is not installed (Debian, Ubuntu: iproute2)")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise NotPermittedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Agent:
    """The process of one agent."""

    def __init__(self, namespace: str, name: str, host: str, incarnation: int, interfaces: str) -> None:
        module = [sys.executable, "-m", "tests.gossip.netns_agent", name, host, str(PORT), str(incarnation), interfaces]
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, question: Mapping[str, Any]) -> None:
        """Send a question; `answer` reads what it says to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Give the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the agent has ended with {self._process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.communicate()


class Lab:
    """`size` hosts named h1, h2, ... on both networks. No host has a route to anywhere else."""

    def __init__(self, size: int) -> None:
        self._prefix = f"gv{os.getpid()}{next(_LETTERS)}"
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []
        self.agents: dict[str, Agent] = {}
        self.hosts: dict[str, str] = {}
        try:
            self._namespace(self._switch)
            # No snooping: there is nobody who would ask for memberships, and the switch would stop passing multicast.
            for bridge in BRIDGES:
                ip("-n", self._switch, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
                ip("-n", self._switch, "link", "set", bridge, "up")
            for number in range(1, size + 1):
                self._host(number)
        except NotPermittedError:
            self.close()
            raise

    def start(self, name: str, incarnation: int = 1) -> None:
        """Start the agent of a host; it gets no seed, and looks for peers where it listens."""
        self.agents[name] = Agent(self._prefix + name, name, self.hosts[name], incarnation, self.hosts[name])

    def start_on_second(self, name: str) -> None:
        """Start the agent of a host on its IPv6 address; it looks for peers on all interfaces."""
        self.hosts[name] = f"fd77::{name[1:]}"
        self.agents[name] = Agent(self._prefix + name, name, self.hosts[name], 1, "all")

    def cut(self, name: str) -> None:
        """Pull the cable of a host."""
        ip("-n", self._switch, "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Plug it in again."""
        ip("-n", self._switch, "link", "set", name, "up")

    def move(self, name: str, host: str) -> None:
        """Give a host another address."""
        namespace = self._prefix + name
        ip("-n", namespace, "addr", "flush", "dev", "eth0")
        self._address(namespace, host)
        self.hosts[name] = host

    def wait(self, observers: list[str], want: Mapping[str, list[str]], within_s: float) -> dict[str, Any]:
        """Wait until each observer holds everybody in `want` for one of those states, at the address of today, and
        knows nobody else. Gives what each of them says.
        """
        question = {"want": want, "hosts": self.hosts, "within_s": within_s}
        for name in observers:
            self.agents[name].ask(question)
        answers = {name: self.agents[name].answer() for name in observers}
        assert all(answer["holds"] for answer in answers.values()), answers
        return answers

    def close(self) -> None:
        """End everything that was started."""
        for agent in self.agents.values():
            agent.kill()
        for namespace in self._made:
            subprocess.run(["ip", "netns", "del", namespace], timeout=COMMAND_S, check=False)

    def _host(self, number: int) -> None:
        name = f"h{number}"
        namespace = self._prefix + name
        self._namespace(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
        for port, (interface, bridge) in enumerate(zip(("eth0", "eth1"), BRIDGES, strict=True)):
            plug = name if port == 0 else f"{name}b"
            ip("-n", self._switch, "link", "add", plug, "type", "veth", "peer", "name", interface, "netns", namespace)
            ip("-n", self._switch, "link", "set", plug, "master", bridge, "up")
        self.hosts[name] = f"10.77.0.{number}"
        self._address(namespace, self.hosts[name])
        # Without waiting for its address to be found unique: it is.
        ip("-n", namespace, "addr", "add", f"fd77::{number}/64", "dev", "eth1", "nodad")
        ip("-n", namespace, "link", "set", "eth1", "up")

    def _address(self, namespace: str, host: str) -> None:
        ip("-n", namespace, "addr", "add", f"{host}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "route", "replace", "224.0.0.0/4", "dev", "eth0")

    def _namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)
