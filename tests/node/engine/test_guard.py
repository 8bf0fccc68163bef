"""No engine process outlives its node, with real processes that resist."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from node.engine.guard import Guard, stand_back
from node.engine.processes import EngineProcess, kin_of, spawn, sweep
from tests.node.engine.gone import gone, wait_gone, watch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STUBBORN = (sys.executable, str(HERE / "stubborn.py"))
STORM_S = 120.0
"""A storm of forks leaves its killer little of a busy machine."""
TELL_NICE = """
import os, pathlib
print(os.nice(0), os.getpriority(os.PRIO_PROCESS, os.getppid()), sep="\\n")
if (group := pathlib.Path("/proc/self/autogroup")).exists():
    print(group.read_text().split()[-1])
"""
KINDS = ("ignores", "orphan", "bare")


@pytest.fixture
def marker() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    assert sweep(name) == 0, "the test left processes behind"


@dataclass
class Tree:
    """A running stubborn.py under a guard."""

    process: EngineProcess
    pids: dict[str, int] = field(default_factory=dict)
    up: asyncio.Event = field(default_factory=asyncio.Event)

    def line(self, text: str) -> None:
        match text.split():
            case ["pid", kind, number]:
                self.pids[kind] = int(number)
            case ["up"]:
                self.up.set()


@asynccontextmanager
async def tree(marker: str, *kinds: str, grace_s: float = 0.2) -> AsyncIterator[Tree]:
    found = Tree(await spawn([*STUBBORN, *kinds], dict(os.environ), marker, grace_s=grace_s))
    pump = asyncio.create_task(found.process.pump(found.line))
    try:
        await asyncio.wait_for(found.up.wait(), 60)
        yield found
    finally:
        found.process.kill()
        await asyncio.wait_for(found.process.wait(), 20)
        await asyncio.wait_for(pump, 20)


@contextmanager
def fake_node(marker: str, *kinds: str) -> Iterator[dict[str, int]]:
    """Ids of a process that holds a guarded tree, and of the tree."""
    argv = [sys.executable, str(HERE / "fake_node.py"), marker, "0.2", *kinds]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as node:
        pids = {"node": node.pid}
        assert node.stdout is not None
        for line in node.stdout:
            match line.split():
                case ["pid", kind, number]:
                    pids[kind] = int(number)
                case ["up"]:
                    break
        assert len(pids) == 3 + len(kinds)
        yield pids


@pytest.mark.parametrize("victims", [("node",), ("node", "main"), ("node", "guard"), ("node", "guard", "main")])
def test_a_killed_node_takes_every_process_along(marker: str, victims: tuple[str, ...]) -> None:
    kinds = KINDS if "guard" not in victims else ()  # without the guard only what carries the marker is found later
    with fake_node(marker, *kinds) as pids:
        fds = watch(pid for kind, pid in pids.items() if kind != "node")
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
    wait_gone(fds)


def test_a_pipe_that_somebody_else_keeps_open_does_not_hide_the_death_of_the_node(marker: str) -> None:
    with fake_node(marker, "leak", "ignores") as pids:
        fds = watch(pid for kind, pid in pids.items() if kind not in ("node", "leak"))
        os.kill(pids["node"], signal.SIGKILL)
        try:
            wait_gone(fds)
        finally:
            os.kill(pids["leak"], signal.SIGKILL)


def test_the_end_of_the_pipe_is_told_once() -> None:
    receive, control = os.pipe()
    guarded = Guard(receive, os.getppid(), 0, 0)
    os.close(control)
    try:
        assert guarded._wait(10) == b""
        assert guarded._wait(0) is None, "it would be readable for ever, and the guard would spin"
    finally:
        for fd in (receive, guarded._wake, guarded._wake_write):
            os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
async def test_an_engine_that_dies_alone_leaves_nothing_and_the_guard_ends_the_same_way(
    marker: str, number: signal.Signals
) -> None:
    async with tree(marker, *KINDS) as engine:
        fds = watch(engine.pids.values())
        os.kill(engine.pids["main"], number)
        assert await asyncio.wait_for(engine.process.wait(), 60) == -number
        await gone(fds)


@pytest.mark.parametrize("status", [0, 3, 255])
async def test_the_guard_exits_with_the_status_of_the_engine(marker: str, status: int) -> None:
    process = await spawn([sys.executable, "-c", f"import os; os._exit({status})"], {}, marker)
    await asyncio.wait_for(process.pump(lambda line: None), 60)
    assert await asyncio.wait_for(process.wait(), 60) == status


@pytest.mark.parametrize("nice", [0, 7])
async def test_the_engine_stands_back_and_its_guard_does_not(marker: str, nice: int) -> None:
    ours = os.nice(0)
    lines: list[str] = []
    process = await spawn([sys.executable, "-c", TELL_NICE], {}, marker, nice=nice)
    await asyncio.wait_for(process.pump(lines.append), 60)
    assert await process.wait() == 0
    engine, guarded, *session = map(int, lines)
    assert (engine, guarded) == (min(ours + nice, 19), ours)
    assert session in ([], [nice]), "empty where the kernel does not group by session"


def test_a_change_of_the_sessions_nice_value_that_comes_too_soon_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [BlockingIOError(), BlockingIOError(), None]
    written: list[str] = []
    pauses: list[float] = []

    def write_text(_path: Path, text: str) -> None:
        if error := answers.pop(0):
            raise error
        written.append(text)

    monkeypatch.setattr(os, "nice", lambda _step: 0)
    monkeypatch.setattr("time.sleep", pauses.append)
    monkeypatch.setattr(Path, "write_text", write_text)
    stand_back(3)
    assert (written, len(pauses)) == (["3"], 2)


async def test_a_program_that_is_not_there_is_told_and_ends_with_127(marker: str) -> None:
    lines: list[str] = []
    process = await spawn(["/nowhere/python"], {}, marker)
    await asyncio.wait_for(process.pump(lines.append), 60)
    assert await process.wait() == 127
    assert lines == ["grapevine: cannot start /nowhere/python: [Errno 2] No such file or directory"]


async def test_a_stop_is_passed_to_the_engine_alone_and_the_rest_ends_after_it(marker: str) -> None:
    async with tree(marker, *KINDS) as engine:
        fds = watch(engine.pids.values())
        engine.process.terminate()
        assert await asyncio.wait_for(engine.process.wait(), 60) == -signal.SIGTERM
        await gone(fds)


async def test_force_ends_an_engine_that_ignores_the_stop(marker: str) -> None:
    async with tree(marker, "main-ignores", *KINDS, grace_s=3600) as engine:
        fds = watch(engine.pids.values())
        engine.process.terminate()
        engine.process.kill()
        assert await asyncio.wait_for(engine.process.wait(), 60) == -signal.SIGKILL
        await gone(fds)


async def test_the_end_of_the_pipe_alone_ends_everything(marker: str) -> None:
    async with tree(marker, *KINDS) as engine:
        fds = watch(engine.pids.values())
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, engine.process._control, inheritable=False)
        os.close(null)
        await gone(fds)


async def test_a_stopped_process_is_ended_too(marker: str) -> None:
    async with tree(marker, "ignores") as engine:
        fds = watch(engine.pids.values())
        os.kill(engine.pids["ignores"], signal.SIGSTOP)
        engine.process.terminate()
        await asyncio.wait_for(engine.process.wait(), 60)
        await gone(fds)


async def test_a_process_that_forks_faster_than_it_is_seen_is_caught_in_the_end(marker: str) -> None:
    async with tree(marker, "storm") as engine:
        engine.process.kill()
        assert await asyncio.wait_for(engine.process.wait(), STORM_S) == -signal.SIGKILL
    assert sweep(marker) == 0


async def test_when_the_guard_is_killed_the_node_ends_the_rest(marker: str) -> None:
    async with tree(marker, *KINDS) as engine:
        engine.process.record()
        fds = watch(engine.pids.values())
        os.kill(engine.process.pid, signal.SIGKILL)
        assert await asyncio.wait_for(engine.process.wait(), 60) == -signal.SIGKILL
        await gone(fds)


@pytest.mark.parametrize("used", [False, True])
async def test_memory_that_a_killed_engine_shared_is_taken_away_when_nobody_uses_it(
    marker: str, monkeypatch: pytest.MonkeyPatch, *, used: bool
) -> None:
    memory = Path("/dev/shm", f"psm_{marker}")
    monkeypatch.setenv("STUBBORN_MEMORY", str(memory))
    async with tree(marker, "memory") as engine:
        engine.process.record()
        ours = await asyncio.to_thread(mapped, memory) if used else None
        engine.process.kill()
        await asyncio.wait_for(engine.process.wait(), 60)
        assert await asyncio.to_thread(memory.exists) == used
    if ours is not None:
        ours.close()
        await asyncio.to_thread(memory.unlink)


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


async def test_only_memory_of_engines_is_taken_away(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path("/dev/shm", f"other_{marker}")
    monkeypatch.setenv("STUBBORN_MEMORY", str(memory))
    async with tree(marker, "memory") as engine:
        engine.process.record()
    await asyncio.to_thread(memory.unlink)  # it is there


async def test_a_sweep_touches_nobody_else(marker: str) -> None:
    async with tree(marker) as engine:
        assert sweep("another-marker") == 0
        assert sweep(marker + "x") == 0
        assert kin_of(engine.pids["main"]) is not None


def test_the_thread_that_started_the_guard_may_end(marker: str) -> None:
    """The kernel reports the end of the thread, not of the process: the guard must look before it believes."""
    started: list[EngineProcess] = []

    async def start() -> None:
        started.append(await spawn([*STUBBORN], dict(os.environ), marker, grace_s=0.2))

    thread = threading.Thread(target=lambda: asyncio.run(start()))
    thread.start()
    thread.join()
    process = started[0]._process
    assert process.stdout is not None
    with process.stdout as output:
        said = b""
        while b"up\n" not in said:
            said += output.read(4096)
        main = int(said.split()[2])
        os.kill(process.pid, signal.SIGUSR2)  # what the kernel sends when the thread has ended
        assert kin_of(main) is not None
        # A guard that had believed it would end its engine by itself; this one still passes our signal on.
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(15) == -signal.SIGTERM
    os.close(started[0]._control)
