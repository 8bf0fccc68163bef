"""A small process between the node and its engine, so that no engine process ever outlives its node.

An engine is a tree: API server, engine core, workers. When the API server is killed the others stay and hold
gigabytes. This guard is the parent of the tree and ends all of it.

Rules:
1. The node holds the write end of a pipe and nobody else does. End of file on it means that the node is dead,
   however it died; then all below the guard is ended. The byte `K` means: end everything now, by force.
2. The guard is a subreaper: a process of the tree that loses its parent (double fork, setsid, a killed API
   server) becomes the guard's own child. "No child left" is therefore the same as "nothing left".
3. When the engine itself exits, what it left behind is ended too, and the guard exits the same way: same
   status, or the same signal.
4. Signals that the node sends (TERM, INT, HUP, USR1) go on to the engine's main process, which knows how to
   stop its children.
5. Should the guard be killed, the kernel kills the engine's main process (parent-death signal) and the node
   sweeps the rest (`node.engine.processes`).

6. The engine gives way to the node: it runs at a higher nice value (`stand_back`).

Nothing but the standard library, and no other module of ours: it runs as a script with `-I -S`, within 10 ms
and 10 MB, and must not fail because of what the engine or the node need. Linux only, no rights needed.

Usage: `guard.py CONTROL_FD NODE_PID GRACE_S NICE ARGV...`
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
#: Sent by the kernel when the thread that started us ends; not proof that the node is dead, so we look.
PARENT_GONE = signal.SIGUSR2
#: Shortest and longest pause between two rounds of killing, seconds.
FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.5
#: The kernel's out-of-memory killer takes the engine rather than the node (range -1000 to 1000).
ENGINE_OOM_SCORE = "400"
#: How often the session's nice value is tried, and the pause between, seconds: together longer than 64 starts need.
AUTOGROUP_TRIES = 64
AUTOGROUP_PAUSE_S = 0.11
#: Exit status when the engine's program could not be started, as a shell has it.
CANNOT_START = 127
KILL_NOW = b"K"

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def descendants(root: int) -> list[int]:
    """Ids of all living processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - a thousand Path objects cost more than the scan
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name in brackets may hold blanks and brackets itself: what counts comes after the last one.
            parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


class Guard:
    """Starts one engine, waits for it, ends whatever is left."""

    def __init__(self, control: int, node: int, grace_s: float, nice: int) -> None:
        self._control = control
        self._node = node
        self._grace_s = grace_s
        self._nice = nice
        self._wake, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._inputs = [self._wake, control]
        self._engine = 0
        self._status: int | None = None

    def run(self, argv: list[str]) -> NoReturn:
        """Do everything; ends the process."""
        # Held back until there is an engine to pass them to: none is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _prctl(PR_SET_PDEATHSIG, PARENT_GONE)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*FORWARDED, PARENT_GONE, signal.SIGCHLD):
            signal.signal(number, self._note)
        os.set_inheritable(self._control, False)
        if not self._node_is_gone():
            self._engine = self._start(argv)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            by_force = self._watch()
            self._end_all(0.0 if by_force else self._grace_s)
        self._leave()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in FORWARDED and self._engine and self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._engine, number)

    def _node_is_gone(self) -> bool:
        return os.getppid() != self._node

    def _start(self, argv: list[str]) -> int:
        pid = os.fork()
        if pid == 0:
            _become_engine(argv, self._nice)
        with contextlib.suppress(OSError):  # both sides set it, so that it holds whichever runs first
            os.setpgid(pid, pid)
        return pid

    def _watch(self) -> bool:
        """Until the engine or the node has ended; true when the rest is to be ended by force."""
        while True:
            self._reap()
            if self._status is not None:
                return False
            if self._node_is_gone():
                return False
            told = self._wait(None)
            if told is not None:
                return told == KILL_NOW

    def _end_all(self, grace_s: float) -> None:
        """Ask all to end, wait `grace_s` seconds, then kill until there is nothing left."""
        until = time.monotonic() + grace_s
        if grace_s > 0:
            _signal_all(signal.SIGTERM)
        pause = FIRST_PAUSE_S
        while self._reap():
            left = until - time.monotonic()
            if left <= 0:
                _signal_all(signal.SIGKILL)
            # SIGCHLD ends the pause early. A fork that a killing round missed is ours now: the next sees it.
            if self._wait(pause) == KILL_NOW:
                until = time.monotonic()
            pause = min(pause * 2, LONGEST_PAUSE_S)

    def _wait(self, longest_s: float | None) -> bytes | None:
        """Until a signal, a word of the node or the end of the pause; the word, empty when the node is gone."""
        readable, _, _ = select.select(self._inputs, [], [], longest_s)
        if self._wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if self._control not in readable:
            return None
        word = os.read(self._control, 1)
        if not word:  # an end of file stays readable for ever
            self._inputs.remove(self._control)
        return word

    def _reap(self) -> bool:
        """Collect all that ended; false when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._engine:
                self._status = status

    def _leave(self) -> NoReturn:
        status = self._status or 0
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the engine's core dump is enough
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def stand_back(nice: int) -> None:
    """Let this process and its children, `nice` steps behind the others, have the CPU only when it is to spare.

    Where the kernel groups processes by session (`sched_autogroup_enabled`, see sched(7)) a nice value counts inside
    the session alone, and the session has one of its own. It matters: Linux 6.18 hands a session whose many threads
    wake often more than its share, so that the busy workers of a tensor-parallel engine kept everybody else, its node
    too, off a core for seconds.
    """
    os.nice(nice)
    for _ in range(AUTOGROUP_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:  # one such change in 0.1 s on the whole host, unless by root
            time.sleep(AUTOGROUP_PAUSE_S)
        except OSError:  # no such grouping here
            return
        else:
            return


def _become_engine(argv: list[str], nice: int) -> NoReturn:
    """In the child: own process group, dies with the guard, gives way to the node, then the engine's program."""
    try:
        os.setpgid(0, 0)
        guard = os.getppid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above
            os._exit(CANNOT_START)
        for number in (*FORWARDED, PARENT_GONE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(ENGINE_OOM_SCORE)
        stand_back(nice)
        os.execvp(argv[0], argv)
    except BaseException as error:
        os.write(2, f"grapevine: cannot start {argv[0]}: {error}\n".encode())
        os._exit(CANNOT_START)


def _signal_all(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    Guard(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])).run(sys.argv[5:])
