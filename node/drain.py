"""Emptying a node: nothing new, what can move goes to peers, the rest is waited for up to a deadline.

Rules
1. The peers hear that the node takes nothing new (its load row) before anybody is asked to take over what runs here.
2. Whoever can be moved is asked to, again every `MOVE_EVERY_S`: a stream that found no other place may find one later.
   Nobody is lost by asking: the entry of a stream decides, and what it cannot carry elsewhere goes on here.
3. Only work on our own engine counts. A drained node is a member like any other: it gives KV blocks away, and its own
   clients are served through it, by its peers.
4. The deadline ends the waiting, not the work: what still runs then goes on, and the node stays closed for new work
   until `resume`.
5. KV blocks that only this node holds are copied to peers meanwhile, in a part of the time: begun when what moves has
   moved, or a short time later, and once more for what was computed until the end. The node is not drained before.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Protocol

from node.admission import Admission

#: Seconds between two requests to move what runs here.
MOVE_EVERY_S = 1.0
#: Seconds in which the streams that move have the node's transfers for themselves.
MOVES_ALONE_S = 2.0
#: The largest part of the time that KV blocks are copied in.
COPY_SHARE = 0.5


class Phase(enum.Enum):
    """How far a drain has come; the strings are what `/admin/drain` shows."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    OVERDUE = "overdue"  # the deadline has passed and something still runs


class Running(Protocol):
    """Streams on our engine."""

    @property
    def movable(self) -> int:
        """Those that a peer could go on with."""
        ...


class Mover(Protocol):
    """Hands running work to peers; `node.relay.handover` is one."""

    @property
    def running(self) -> Running:
        """What runs now."""
        ...

    def move_all(self) -> int:
        """Ask for every stream that can move; returns how many were asked for."""
        ...


class Copies(Protocol):
    """Copies KV blocks to peers; `node.kv_rescue` is one."""

    async def run(self, until: float) -> None:
        """Copy until this time at most. Never raises."""
        ...

    def forget(self) -> None:
        """A new drain begins."""
        ...

    def status(self) -> dict[str, object]:
        """What came of it, JSON-able."""
        ...


class Drain:
    """The drain of one node. Lives in the event loop; `publish` sends the load row at once.

    `copy_s`: most seconds in which KV blocks are copied.
    """

    def __init__(
        self,
        admission: Admission,
        mover: Mover,
        copies: Copies,
        *,
        copy_s: float,
        publish: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._admission = admission
        self._mover = mover
        self._copies = copies
        self._copy_s = copy_s
        self._publish = publish
        self._clock = clock
        #: Seconds that this drain may still copy in; whether it does or will.
        self._copy_left = 0.0
        self._copying = False
        self._begun = 0.0
        self._until = 0.0
        self._at_begin = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        """How far it has come."""
        if not self._admission.draining:
            return Phase.SERVING
        if self._admission.active == 0 and not self._copying:
            return Phase.DRAINED
        return Phase.DRAINING if self._clock() < self._until else Phase.OVERDUE

    def begin(self, timeout_s: float) -> None:
        """Take nothing new, and wait at most ``timeout_s`` seconds for what runs. Again: the new deadline counts."""
        now = self._clock()
        if not self._admission.draining:
            self._begun, self._at_begin = now, self._admission.active
            self._copies.forget()
        self._until = now + timeout_s
        self._admission.drain(True)
        self._publish()
        if self._task is None or self._task.done():
            self._copy_left = min(self._copy_s, COPY_SHARE * timeout_s)
            self._copying = self._copy_left > 0
            self._task = asyncio.get_running_loop().create_task(self._empty(), name="grapevine-drain")

    async def over(self) -> Phase:
        """Wait until all is done, or the deadline has passed."""
        if self._task is not None:
            await asyncio.shield(self._task)
        return self.phase

    async def resume(self) -> None:
        """Take work again."""
        await self.close()
        self._admission.drain(False)
        self._publish()

    async def close(self) -> None:
        """Stop asking and waiting. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._copying = False

    def status(self) -> dict[str, object]:
        """How it goes, as plain JSON values; times in seconds."""
        now, phase = self._clock(), self.phase
        serving = phase is Phase.SERVING
        return {
            "phase": phase.value,
            "running": self._admission.active,
            "movable": self._mover.running.movable,
            "running_at_begin": 0 if serving else self._at_begin,
            "since_s": 0.0 if serving else round(now - self._begun, 1),
            "left_s": round(max(0.0, self._until - now), 1) if phase is Phase.DRAINING else 0.0,
            "copying": self._copying,
            "kv": self._copies.status(),
        }

    async def _empty(self) -> None:
        alone_until = self._clock() + MOVES_ALONE_S
        copying: asyncio.Task[None] | None = None
        try:
            while self._admission.active and (left := self._until - self._clock()) > 0:
                moving = self._mover.move_all()
                if copying is None and (not moving or self._clock() >= alone_until):
                    copying = asyncio.create_task(self._copy(), name="grapevine-copies")
                await self._admission.idle(min(left, MOVE_EVERY_S))
            if copying is not None:
                await copying
            await self._copy()
        finally:
            self._copying = False
            if copying is not None:
                copying.cancel()
                await asyncio.gather(copying, return_exceptions=True)

    async def _copy(self) -> None:
        began = self._clock()
        until = min(began + self._copy_left, self._until)
        if until > began:
            await self._copies.run(until)
            self._copy_left -= self._clock() - began
