"""Who waits in one line, and whose turn it is to try for a place. See rules 2 and 3 of `node.room`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.line import Line

if TYPE_CHECKING:
    from node.room import WaitingRoom

#: A turn that came to nothing goes on to so many others before the next event.
MAX_PASSES = 2
#: Somebody of each line decides anew at least this often, in seconds, even when nothing happened that we know of; and
#: one of them asks those who seem to be full.
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Entrance:
    """Who wants to wait. Times in seconds."""

    line: str
    client: str = ""
    #: By what it is known again when it comes back: the same request has the same.
    mark: int = 0
    priority: int = 0
    #: It had its turn already and lost the place it was given: it goes to the head of its client's requests.
    first: bool = False
    #: What a request of this model usually takes, and places per second that are expected until they are counted.
    usual_s: float = 1.0
    guess_per_s: float = 1.0
    #: How long it is worth waiting, when the client has set a deadline.
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Denial:
    """Why somebody cannot wait (any longer), and after how many seconds to come back."""

    why: str
    after_s: int


class Ticket:
    """One waiting request; made by `WaitingRoom.join`."""

    __slots__ = (
        "_room",
        "client",
        "denial",
        "joined_at",
        "line",
        "mark",
        "modest",
        "priority",
        "probing",
        "usual_s",
        "woken",
    )

    def __init__(self, room: WaitingRoom, entrance: Entrance, now: float) -> None:
        self._room = room
        self.line = entrance.line
        self.client = entrance.client
        self.mark = entrance.mark
        self.priority = entrance.priority
        self.usual_s = entrance.usual_s
        #: It was let into a line that is too long, because its client has so little of it.
        self.modest = False
        self.joined_at = now
        self.woken = asyncio.Event()
        #: Set when it must go.
        self.denial: Denial | None = None
        #: Nobody has asked for a while those who seem to be full: ask them too, what is known of them may be wrong.
        self.probing = False

    async def turn(self, timeout_s: float) -> bool:
        """Wait for our turn (or our denial); False when ``timeout_s`` seconds passed first."""
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self.woken.wait()
        except TimeoutError:
            if not self.woken.is_set():
                return False
        self.woken.clear()
        return True

    def give_way(self) -> None:
        """Our turn came to nothing."""
        self._room.give_way(self)

    def leave(self, *, served: bool = False) -> None:
        """Leave the line, with a place or without; the second call does nothing."""
        self._room.quit(self, served=served)


class Queue:
    """One line with somebody in it."""

    def __init__(self, now: float) -> None:
        self.line: Line[Ticket] = Line()
        self.turn: Ticket | None = None
        self.tried: list[Ticket] = []
        #: Something changed while somebody had the turn.
        self.missed = False
        self.offered_at = self.probed_at = now
        #: Those of rule 5 who wait.
        self.modest = 0

    def offer(self, now: float) -> None:
        """Something has changed: everybody may try, beginning with the next."""
        if self.turn is not None:
            self.missed = True
            return
        self.tried.clear()
        self.missed = False
        self.offered_at = now
        probing = now - self.probed_at >= RETRY_S
        if probing:
            self.probed_at = now
        self.pass_on(probing=probing)

    def retry(self, now: float) -> None:
        """Nothing has happened for a while, as far as one of them can tell."""
        if now - self.offered_at >= RETRY_S:
            self.offer(now)

    def give_way(self, ticket: Ticket, now: float) -> None:
        """The turn of ``ticket`` came to nothing."""
        self.turn = None
        self.tried.append(ticket)
        if self.missed:
            self.offer(now)
        elif len(self.tried) <= MAX_PASSES:
            self.pass_on()

    def pass_on(self, *, probing: bool = False) -> None:
        """Give the turn to the next who has not tried."""
        ticket = self.line.next(self.tried)
        if ticket is not None:
            self.turn = ticket
            ticket.probing = probing
            ticket.woken.set()
