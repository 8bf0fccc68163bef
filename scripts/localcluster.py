"""Three nodes on this host, as separate processes: what `scripts/quickstart` shows and the end-to-end tests test.

Nothing in here is a stand-in: each node is `grapevine start` as a user would type it, with its own engine.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from node.addresses import GOSSIP_OFFSET, KV_OFFSET

ENGINE_START_LIMIT_S = 420.0
"""Three engines that start together on two cores need 100-150 s; slower machines get three times that."""
STOP_LIMIT_S = 45.0
POLL_S = 0.5
GRAPEVINE = str(Path(sys.executable).with_name("grapevine"))
"""The command that a user types, of the environment that this runs in."""

State = Mapping[str, object]
Progress = Callable[[str, str], None]
"""Called with (node name, what it is doing now)."""


class ClusterFailed(Exception):
    """A node did not come up; the message holds its last lines."""


def free_ports(count: int, first: int | None = None) -> list[int]:
    """HTTP ports whose neighbours for gossip and KV (see node/addresses.py) are free on loopback as well.

    Counted from `first`, or from a random place. All stay below the ports that Linux gives to outgoing connections
    (32768 and up): one of those may take a port between this look and the node's start.
    """
    start = random.randint(9000, 12000) if first is None else first
    found: list[int] = []
    for port in range(start, start + 500):
        if all(_is_free(port + offset) for offset in (0, GOSSIP_OFFSET, KV_OFFSET)):
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterFailed(f"no {count} free ports from {start} on")


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


@dataclass(slots=True)
class LocalNode:
    """One `grapevine start` process and how to reach it."""

    name: str
    port: int
    workdir: Path
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Base URL of the node's HTTP surface."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def gossip_address(self) -> str:
        """What other nodes join."""
        return f"127.0.0.1:{self.port + GOSSIP_OFFSET}"

    @property
    def log(self) -> Path:
        """Where the node's own output goes."""
        return self.workdir / f"{self.name}.log"

    async def start(self, join: Sequence[str], engine_args: Sequence[str]) -> None:
        """Start the process; returns at once, readiness is awaited elsewhere."""
        command = [
            GRAPEVINE, "start",
            "--name", self.name, "--port", str(self.port),
            *(part for seed in join for part in ("--join", seed)),
            *self.args, *(("--", *engine_args) if engine_args else ()),
        ]  # fmt: skip
        env = {**os.environ, "GRAPEVINE_STATE_DIR": str(self.workdir / self.name), **self.env}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self.process is not None and self.process.returncode is None

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the node process alone, as a crash would."""
        if self.process is not None and self.running:
            self.process.send_signal(sig)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_LIMIT_S. Idempotent."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.kill(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_LIMIT_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def tail(self, lines: int = 25) -> str:
        """The last lines of the node's output, for an error message."""
        if not self.log.exists():
            return "(no output)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class LocalCluster:
    """Several nodes on this host that join each other by seed address."""

    def __init__(
        self,
        workdir: Path,
        names: Sequence[str],
        *,
        ports: Sequence[int] | None = None,
        args: Sequence[str] = (),
        engine_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        ports = ports or free_ports(len(names))
        self.engine_args = tuple(engine_args)
        self.nodes = {
            name: LocalNode(name, port, workdir, tuple(args), dict(env or {}))
            for name, port in zip(names, ports, strict=True)
        }

    def __getitem__(self, name: str) -> LocalNode:
        return self.nodes[name]

    async def start(self, name: str) -> None:
        """Start one node, joined to every other by seed address."""
        seeds = [other.gossip_address for other in self.nodes.values() if other.name != name]
        await self.nodes[name].start(seeds, self.engine_args)

    async def start_all(self) -> None:
        """Start every node without waiting for its engine."""
        for name in self.nodes:
            await self.start(name)

    async def stop_all(self) -> None:
        """Stop every node at the same time."""
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))

    async def state(self, session: aiohttp.ClientSession, name: str) -> dict[str, object] | None:
        """The gossip state as one node sees it; None while it does not answer."""
        try:
            async with session.get(
                self.nodes[name].url + "/gossip/state", timeout=aiohttp.ClientTimeout(total=5)
            ) as answer:
                return dict(await answer.json()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def wait_ready(
        self,
        session: aiohttp.ClientSession,
        progress: Progress = lambda name, text: None,
        limit_s: float = ENGINE_START_LIMIT_S,
    ) -> None:
        """Wait until every node sees every node alive with a ready engine.

        Raises ClusterFailed with the node's own last lines when a process ends, an engine fails for good, or the
        limit passes.
        """
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(self._wait_node(session, name, progress) for name in self.nodes))
        except TimeoutError:
            tails = "\n\n".join(f"--- {node.name}\n{node.tail()}" for node in self.nodes.values())
            raise ClusterFailed(f"the cluster was not ready after {limit_s:.0f} s\n{tails}") from None

    async def _wait_node(self, session: aiohttp.ClientSession, name: str, progress: Progress) -> None:
        async for state in self._states(session, name):
            engine = state.get("engine")
            engine = engine if isinstance(engine, dict) else {}
            phase = str(engine.get("state", ""))
            if phase == "failed":
                raise ClusterFailed(f"{name}: the engine failed: {engine.get('reason')}\n{self[name].tail()}")
            ready = ready_members(state)
            progress(name, str(engine.get("progress") or phase) if len(ready) < len(self.nodes) else "ready")
            if set(ready) >= set(self.nodes):
                return

    async def _states(self, session: aiohttp.ClientSession, name: str) -> AsyncIterator[dict[str, object]]:
        while True:
            if not self[name].running:
                raise ClusterFailed(f"{name} ended while it was starting:\n{self[name].tail()}")
            state = await self.state(session, name)
            if state is not None:
                yield state
            await asyncio.sleep(POLL_S)


def ready_members(state: State) -> list[str]:
    """Names of the members that are alive with a ready engine in this view."""
    members = state.get("members")
    return [
        str(member["name"])
        for member in (members if isinstance(members, list) else [])
        if member["state"] == "alive" and (member.get("load") or {}).get("ready")
    ]
