"""Who may use this node's engine now, and who waits for a place anywhere in the cluster.

`Admission` counts places; `WaitingRoom` keeps those whom no node would take.

Rules:
1. A request holds exactly one `Place` from its admission until its answer ended, however it ended;
   `Place.leave` may be called more than once and counts once.
2. A draining node admits nothing new. Places already held are kept.
3. The waiting room is bounded, first come first served within a model, and every wait has a deadline. A
   wake-up is a chance, not a promise: whoever is woken decides anew on fresh load (late binding) and
   either leaves or waits for the next wake-up at the head of its line.
4. What a node promises to others (running places) and what it keeps for itself (its line) never mix: a
   request that a peer sent is admitted at once or refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Place:
    """One admitted request."""

    __slots__ = ("_admission",)

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def leave(self) -> None:
        """Give the place back; the second call does nothing."""
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.left()


class Admission:
    """The places of this node's engine."""

    def __init__(self, max_running: int, room: WaitingRoom) -> None:
        self.max_running = max_running
        self.active = 0
        self.admitted = 0
        self.refused = 0
        self.draining = False
        self._room = room
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Place | None:
        """Take a place, None when there is none."""
        if self.draining or self.active >= self.max_running:
            self.refused += 1
            return None
        self.active += 1
        self.admitted += 1
        self._idle.clear()
        return Place(self)

    def left(self) -> None:
        """Called by `Place` only."""
        self.active -= 1
        if self.active == 0:
            self._idle.set()
        self._room.stir()

    def drain(self, on: bool = True) -> None:
        """Stop (or resume) admitting."""
        self.draining = on
        if not on:
            self._room.stir()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no place is held; False when ``timeout_s`` seconds passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def validate(self) -> None:
        """Check the invariants; raises AssertionError with the broken one."""
        assert 0 <= self.active <= self.max_running, f"{self.active} of {self.max_running} places held"
        assert self._idle.is_set() == (self.active == 0), "idle event and count disagree"


class Ticket:
    """One waiting request; made by `WaitingRoom.join`."""

    __slots__ = ("_room", "line", "woken")

    def __init__(self, room: WaitingRoom, line: str) -> None:
        self._room = room
        self.line = line
        self.woken = asyncio.Event()

    async def turn(self, timeout_s: float) -> bool:
        """Wait to be woken; False when ``timeout_s`` seconds passed first."""
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self.woken.wait()
        except TimeoutError:
            return False
        self.woken.clear()
        return True

    @property
    def first(self) -> bool:
        """Say whether nobody stands before us."""
        return self._room.head(self.line) is self

    def leave(self) -> None:
        """Leave the line, served or not; the next one gets its chance at once."""
        self._room.quit(self)


class WaitingRoom:
    """The bounded lines of requests that wait for a place, one line for each model."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lines: dict[str, deque[Ticket]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def join(self, line: str, *, first: bool = False) -> Ticket | None:
        """Stand in line, None when the room is full. The caller must `Ticket.leave` in the end.

        ``first``: it had its turn already and lost the place it was given; it goes to the head of the line.
        """
        if self._count >= self.limit:
            return None
        ticket = Ticket(self, line)
        waiting = self._lines.setdefault(line, deque())
        if first:
            waiting.appendleft(ticket)
        else:
            waiting.append(ticket)
        self._count += 1
        return ticket

    def waiting(self, line: str) -> bool:
        """Say whether somebody stands in this line."""
        return line in self._lines

    def head(self, line: str) -> Ticket | None:
        """Return the first of a line."""
        waiting = self._lines.get(line)
        return waiting[0] if waiting else None

    def stir(self) -> None:
        """Wake the first of every line: a place became free or the view of the cluster changed."""
        for line in self._lines.values():
            line[0].woken.set()

    def quit(self, ticket: Ticket) -> None:
        """Called by `Ticket` only."""
        line = self._lines.get(ticket.line)
        if line is None or ticket not in line:
            return
        was_first = line[0] is ticket
        line.remove(ticket)
        self._count -= 1
        if not line:
            del self._lines[ticket.line]
        elif was_first:
            line[0].woken.set()

    def validate(self) -> None:
        """Check the invariants; raises AssertionError with the broken one."""
        assert self._count == sum(map(len, self._lines.values())) <= self.limit, "the room's count is wrong"
        assert all(self._lines.values()), "an empty line was kept"
