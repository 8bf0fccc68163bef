"""Hand-over: the streamed answers that this node's engine runs, and asking their entries to carry them elsewhere.

Nothing is moved from here. The entry has the record of the stream, so it decides: it closes the leg, which aborts the
engine's work (the full blocks computed so far are in this node's pool), and goes on at another node; or it cannot, and
the stream stays. So asking loses nothing and may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from node.relay.answer import Relay
from node.relay.call import Call
from node.relay.carry.marks import MOVE

#: An attempt to run a stream here: its entry, and the name that the entry gave it.
Leg = tuple[str, str]


class Stream(Protocol):
    """One streamed answer that runs here."""

    @property
    def movable(self) -> bool:
        """Whether its entry can carry it, as far as is known here."""
        ...

    def move(self) -> bool:
        """Ask its entry to; False when that is known to be impossible now."""
        ...


class PeerStream:
    """A stream that runs here for another node: asked within the stream itself."""

    def __init__(self, call: Call, relay: Relay) -> None:
        carriage = call.parsed.carriage
        self.movable = relay.marked and carriage is not None and carriage.possible
        self._relay = relay

    def move(self) -> bool:
        """Ask its entry."""
        self._relay.say(MOVE)
        return True


class Fixed:
    """An answer that stays where it is."""

    movable = False

    def move(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class Running:
    """Answers that the own engine runs now."""

    movable: int
    unmovable: int


class Handovers:
    """The table; as long as there are running requests, which admission bounds."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._legs: dict[Leg, asyncio.Event] = {}

    @contextmanager
    def runs(self, stream: Stream, leg: Leg | None = None) -> Iterator[None]:
        """One runs here within the block; ``leg`` is what its entry calls it."""
        gone = asyncio.Event()
        self._streams.add(stream)
        if leg is not None:
            self._legs[leg] = gone
        try:
            yield
        finally:
            gone.set()
            self._streams.discard(stream)
            if leg is not None and self._legs.get(leg) is gone:
                del self._legs[leg]

    async def gone(self, leg: Leg, limit_s: float) -> None:
        """Wait until this one runs no more, at most ``limit_s`` seconds."""
        running = self._legs.get(leg)
        if running is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await running.wait()

    def move_all(self) -> int:
        """Ask for every movable stream; returns how many were asked."""
        return sum(stream.move() for stream in tuple(self._streams) if stream.movable)

    @property
    def running(self) -> Running:
        """How many there are, by whether they can be moved."""
        movable = sum(stream.movable for stream in self._streams)
        return Running(movable, len(self._streams) - movable)
