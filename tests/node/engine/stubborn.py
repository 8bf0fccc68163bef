"""Stands for an engine whose processes do not want to end. Prints `pid KIND NUMBER` for each and then `up`.

Usage: stubborn.py KIND...   KINDs: ignores (ignores SIGTERM), orphan (double fork, own session, ignores SIGTERM),
bare (as orphan, with an empty environment), storm (forks a successor and exits, again and again),
memory (leaves shared memory behind, of the name in STUBBORN_MEMORY).
The first process ends at SIGTERM, unless `main-ignores` is given.
"""

import mmap
import os
import signal
import sys
from pathlib import Path


def ignore() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def wait_for_ever() -> None:
    while True:
        signal.pause()


def told(kind: str, pid: int) -> None:
    os.write(1, f"pid {kind} {pid}\n".encode())


def orphan(kind: str, work) -> None:
    """Start `work` in a grandchild of its own session, and come back when it has told its id."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ignore()
            told(kind, os.getpid())
            os.write(tell, b"x")
            work()
        os._exit(0)
    os.wait()
    os.read(ready, 1)


def bare() -> None:
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", IGNORING], {})


def storm() -> None:
    while True:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()


IGNORING = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
WORK = {"orphan": wait_for_ever, "bare": bare, "storm": storm}

if __name__ == "__main__":
    held = []
    told("main", os.getpid())
    for kind in sys.argv[1:]:
        if kind == "ignores":
            child = os.fork()
            if child == 0:
                ignore()
                wait_for_ever()
            told(kind, child)
        elif kind == "memory":
            with Path(os.environ["STUBBORN_MEMORY"]).open("xb+") as file:
                file.truncate(4096)
                held.append(mmap.mmap(file.fileno(), 4096))
        elif kind in WORK:
            orphan(kind, WORK[kind])
    if "main-ignores" in sys.argv:
        ignore()
    os.write(1, b"up\n")
    wait_for_ever()
