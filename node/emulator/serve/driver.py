"""Moves the engine through real time, `speedup` times as fast, and hands its actions to whoever waits for them.

Rules
1. Virtual time is real time since the start, multiplied. The engine is advanced whenever something arrives and
   whenever it has something due, never by polling.
2. A listener hears of its own request only, in order, and nothing after its last action or its abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.emulator.engine import EmulatedEngine
from node.emulator.job import Action, Done, Evicted, Job

Listener = Callable[[Action], None]


class Driver:
    """One engine in the running event loop. `watch` hears of every action."""

    def __init__(self, engine: EmulatedEngine, *, speedup: float = 1.0) -> None:
        self.engine = engine
        self.speedup = speedup
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._listeners: dict[str, Listener] = {}
        self._watchers: list[Callable[[Action], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return (self._loop.time() - self._start) * self.speedup

    def watch(self, watcher: Callable[[Action], None]) -> None:
        """Tell `watcher` of everything, before the request's own listener."""
        self._watchers.append(watcher)

    def submit(self, job: Job, listener: Listener) -> None:
        """A request arrives now."""
        self._listeners[job.rid] = listener
        self.engine.submit(job, self.now)
        self._pump()

    def abort(self, rid: str) -> bool:
        """Nobody wants it any more. False: it had ended."""
        if self._listeners.pop(rid, None) is None:
            return False
        aborted = self.engine.abort(rid, self.now)
        self._pump()
        return aborted

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def _pump(self) -> None:
        for action in self.engine.advance(self.now):
            for watcher in self._watchers:
                watcher(action)
            if not isinstance(action, Evicted):
                self._tell(action.rid, action)
        self._arm()

    def _tell(self, rid: str, action: Action) -> None:
        listener = self._listeners.get(rid)
        if isinstance(action, Done):
            self._listeners.pop(rid, None)
        if listener is not None:
            listener(action)

    def _arm(self) -> None:
        self.close()
        due = self.engine.due
        self._timer = None if due is None else self._loop.call_at(self._start + due / self.speedup, self._pump)
