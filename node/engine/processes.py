"""An engine process under its guard, as the node sees it; and the sweep of what a killed guard left.

Every process of an engine inherits `MARKER` in its environment. `sweep` ends each process that carries the
marker of this node: double forks and new sessions do not shake it off, and it works for what an earlier boot of
the node left. `SPT_NOENV` keeps `setproctitle` (vLLM uses it) from overwriting what /proc shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.engine import guard, shared_memory
from node.engine.log import LineSplitter

MARKER = "GRAPEVINE_ENGINE_OF"
#: Bytes read from the engine's output at once; also the room of the pipe, so that a burst never stops the engine.
PIPE_BYTES = 1024 * 1024
#: Seconds that processes left behind by a dead engine or node get before they are killed.
LEFTOVER_GRACE_S = 2.0
#: Longest time a sweep goes on, seconds: a process in an uninterruptible wait cannot be killed by anybody.
SWEEP_TIMEOUT_S = 10.0
_SWEEP_PAUSE_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kin:
    """A process that belongs to the engine; the start time tells it from a later one with the same id."""

    pid: int
    started: int


class EngineProcess:
    """One run of the engine. Made by `spawn`; `wait` returns when nothing of it is left.

    asyncio's own subprocess is no use here: in several versions its `wait` goes on until the output is closed,
    and after the guard was killed that is exactly what the processes to be swept hold open.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: int, marker: str) -> None:
        self._process = process
        self._control = control
        self._marker = marker
        self._kin: set[Kin] = set()
        self._memory: set[bytes] = set()
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._await_exit, name=f"engine-{process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask the engine to end; it may finish what it runs."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything by force, through the guard."""
        with contextlib.suppress(OSError):
            os.write(self._control, guard.KILL_NOW)

    def kill_guard(self) -> None:
        """Last resort for a guard that does not answer; `wait` then sweeps."""
        self._process.kill()

    def record(self) -> None:
        """Note who belongs to the engine now, for the case that the guard is killed, and what memory they share."""
        self._kin |= {kin for pid in guard.descendants(self.pid) if (kin := kin_of(pid))}
        self._memory |= shared_memory.mapped_by(kin.pid for kin in self._kin)

    async def pump(self, on_line: Callable[[str], None]) -> None:
        """Hand every line of output to `on_line` until the last process that can write has ended."""
        reader = asyncio.StreamReader(limit=PIPE_BYTES)
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        splitter = LineSplitter()
        try:
            while data := await reader.read(PIPE_BYTES):
                for line in splitter.feed(data):
                    on_line(line)
            for line in splitter.close():
                on_line(line)
        finally:
            transport.close()

    async def wait(self) -> int:
        """Exit status as `subprocess` gives it (negative: the signal), after the last process has ended."""
        status = await asyncio.shield(self._exited)
        if self._control >= 0:
            os.close(self._control)
            self._control = -1  # the number may name another file now
        await asyncio.to_thread(sweep, self._marker, self._kin)
        if await asyncio.to_thread(shared_memory.remove, self._memory):
            _log.info("took away shared memory that the engine had left")
        return status

    def _await_exit(self) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._exited.set_result, status)


async def spawn(
    argv: Sequence[str], env: Mapping[str, str], marker: str, *, nice: int = 0, grace_s: float = LEFTOVER_GRACE_S
) -> EngineProcess:
    """Start `argv` under a guard, `nice` steps behind this process, and give leftovers `grace_s` seconds.

    Raises `OSError` when not even the guard can be started.
    Called in the thread of the loop, because the guard is told when the thread that started it ends.
    """
    receive, control = os.pipe2(os.O_CLOEXEC)
    script = (sys.executable, "-I", "-S", guard.__file__)
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - some milliseconds
            [*script, str(receive), str(os.getpid()), str(grace_s), str(nice), *argv],
            env={**env, MARKER: marker, "SPT_NOENV": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=(receive,),
            start_new_session=True,
        )
    except BaseException:
        os.close(control)
        raise
    finally:
        os.close(receive)
    if process.stdout is not None:
        # More room than the usual 64 KiB: a node that is busy for a moment must not stop its engine.
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return EngineProcess(process, control, marker)


def sweep(marker: str, kin: Iterable[Kin] = ()) -> int:
    """Kill every process with `marker` and all of `kin`, until none is left; how many there were. Blocks."""
    seen: set[Kin] = set()
    until = time.monotonic() + SWEEP_TIMEOUT_S
    while time.monotonic() < until:
        left = {found for found in kin if kin_of(found.pid) == found} | set(_marked(marker))
        if not left:
            break
        seen |= left
        for found in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found.pid, signal.SIGKILL)
        time.sleep(_SWEEP_PAUSE_S)
    return len(seen)


def kin_of(pid: int) -> Kin | None:
    """The living process `pid`, None when there is none (a zombie is none)."""
    try:
        words = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else Kin(pid, int(words[19]))


def oom_kills() -> int:
    """How many processes the kernel has ended on this host for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _marked(marker: str) -> Iterable[Kin]:
    wanted = f"{MARKER}={marker}".encode()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - a thousand Path objects cost more than the scan
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found = kin_of(int(entry))
                if found:
                    yield found
