"""Who may use this node's engine now. Those who may not wait in `node.room`.

Rules:
1. A request holds exactly one `Place` from its admission until its answer ended, however it ended;
   `Place.leave` may be called more than once and counts once.
2. A draining node admits nothing new. Places already held are kept.
3. What a node promises to others (running places) and what it keeps for itself (its lines) never mix: a
   request that a peer sent is admitted at once or refused at once.
4. A request whose KV blocks are being pulled rests: others may have its share of the engine meanwhile, so who needs no
   pull is not delayed by it. When it goes on, more may run than were asked for, at most twice as many: the engine has
   a queue too.
"""

from __future__ import annotations

import asyncio

from node.room import WaitingRoom


class Place:
    """One admitted request."""

    __slots__ = ("_admission", "_rests")

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission
        self._rests = False

    def rest(self) -> None:
        """Its request takes nothing of the engine until `wake`."""
        if self._admission is not None and not self._rests:
            self._rests = True
            self._admission.rests()

    def wake(self) -> None:
        """End the rest; does nothing without one."""
        if self._admission is not None and self._rests:
            self._rests = False
            self._admission.resting -= 1

    def leave(self) -> None:
        """Give the place back; the second call does nothing."""
        self.wake()
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.left()


class Admission:
    """The places of this node's engine."""

    def __init__(self, max_running: int, room: WaitingRoom) -> None:
        self.max_running = max_running
        self.active = 0
        self.resting = 0  #: of them, those that wait for their KV blocks
        self.admitted = 0
        self.refused = 0
        self.draining = False
        self._room = room
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Place | None:
        """Take a place, None when there is none."""
        running = self.active - self.resting
        if self.draining or running >= self.max_running or self.active >= 2 * self.max_running:
            self.refused += 1
            return None
        self.active += 1
        self.admitted += 1
        self._idle.clear()
        return Place(self)

    def rests(self) -> None:
        """Called by `Place` only."""
        self.resting += 1
        self._room.stir()

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
        assert 0 <= self.active <= 2 * self.max_running, f"{self.active} of {self.max_running} places held"
        assert 0 <= self.resting <= self.active, f"{self.resting} of {self.active} rest"
        assert self._idle.is_set() == (self.active == 0), "idle event and count disagree"
