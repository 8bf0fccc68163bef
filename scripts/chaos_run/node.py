"""The processes of one node: `grapevine start` and below it the engine; started, killed, stopped and counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from chaos_run.engines import GRAPEVINE
from node.addresses import GOSSIP_OFFSET, KV_OFFSET

ROOT = Path(__file__).parents[2]
#: Seconds that a node gets to end after SIGTERM, above its own grace.
END_S = 30.0
#: The module that a worker runs, as its command line says.
WORKERS = "node.workers"


@dataclass(frozen=True, slots=True)
class Trouble:
    """That a node or its engine was away, or cut off, from then to then (monotonic seconds)."""

    what: str
    node: str
    begun: float
    ended: float = float("inf")
    #: Nobody could tell it anything meanwhile.
    excuses: bool = True


@dataclass(slots=True)
class ChaosNode:
    """One node. `prefix` puts its processes where they belong."""

    name: str
    number: int
    host: str
    port: int
    folder: Path
    prefix: Sequence[str]
    options: Sequence[str]
    #: What comes after `--`.
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    #: When its process was killed by us, monotonic seconds.
    deaths: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Its HTTP surface."""
        return f"http://{self.host}:{self.port}"

    @property
    def gossip(self) -> tuple[str, int]:
        """Where its gossip listens."""
        return self.host, self.port + GOSSIP_OFFSET

    @property
    def ports(self) -> dict[str, int]:
        """Its TCP ports by what they are for."""
        return {"http": self.port, "gossip": self.port + GOSSIP_OFFSET, "kv": self.port + KV_OFFSET}

    @property
    def log(self) -> Path:
        """Its own output."""
        return self.folder / f"{self.name}.log"

    @property
    def journal(self) -> Path:
        """What its engine did when (`node.emulator.serve.journal`)."""
        return self.folder / f"{self.name}.journal"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.returncode is None

    async def start(self, seeds: Sequence[str]) -> None:
        """Start its process; returns at once."""
        command = [
            *self.prefix, *GRAPEVINE, "start", "--name", self.name, "--host", self.host, "--port", str(self.port),
            "--advertise", self.host, *(part for seed in seeds for part in ("--join", seed)), *self.options,
            *(("--", *self.arguments) if self.arguments else ()),
        ]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT), **self.env}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the node's own process; False when it has ended."""
        if self.process is None or not self.running:
            return False
        if number is signal.SIGKILL:
            self.deaths.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return True

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL when it does not end in time; whether it ended by itself, without an error."""
        if self.process is None:
            return True
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s + END_S):
                return await self.process.wait() == 0
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.process.wait()
            return False

    def engine(self) -> psutil.Process | None:
        """The engine's process: the child of the guard, that is the node's child."""
        if self.process is None or not self.running:
            return None
        with contextlib.suppress(psutil.Error):
            for guard in psutil.Process(self.process.pid).children():
                for engine in guard.children():
                    return engine
        return None

    def pids(self) -> list[int]:
        """Its own processes: the one that was started, and its workers (`node.workers`)."""
        if self.process is None:
            return []
        found = [self.process.pid]
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    found += [child.pid] if WORKERS in child.cmdline() else []
        return found

    def tail(self, lines: int = 12) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""
