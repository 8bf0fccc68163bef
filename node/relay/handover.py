"""Hand-over: the streamed answers that this node's engine runs, and asking their entries to carry them elsewhere.

Nothing is moved from here. The entry has the record of the stream, so it decides: it closes the leg, which aborts the
engine's work (the full blocks computed so far are in this node's pool), and goes on at another node; or it cannot, and
the stream stays. So asking loses nothing and may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from node.relay.answer import Relay
from node.relay.call import Call
from node.relay.carry.marks import MOVE


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
        self.movable = call.carries and carriage is not None and carriage.possible
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

    @contextmanager
    def runs(self, stream: Stream) -> Iterator[None]:
        """One runs here within the block."""
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    def move_all(self) -> int:
        """Ask for every movable stream; returns how many were asked."""
        return sum(stream.move() for stream in tuple(self._streams) if stream.movable)

    @property
    def running(self) -> Running:
        """How many there are, by whether they can be moved."""
        movable = sum(stream.movable for stream in self._streams)
        return Running(movable, len(self._streams) - movable)
