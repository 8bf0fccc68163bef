"""The two ways from a source's pool into ours: over the connection, or out of the source's file on the same host.

Both are used the same: `ask` for a window of blocks, `begin` it when its turn comes, `take` one block after the other,
`finish` it. They raise what `Transport` raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from . import messages
from .errors import RemoteError
from .neighbour import NeighbourFile
from .transport import Deadline, Transport, unexpected


@dataclass(frozen=True, slots=True)
class Arrived:
    """A block's bytes are in the target. `announced` by the source, `found` over what came."""

    announced: bytes
    found: bytes


@dataclass(frozen=True, slots=True)
class Stopped:
    """No block, and nothing more of this window comes: `gone` or `busy`."""

    reason: str


class Way(Protocol):
    """How blocks come."""

    @property
    def name(self) -> str:
        """The word that people are shown."""
        ...

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None:
        """Ask for a window; several may be under way."""
        ...

    def begin(self, deadline: Deadline) -> None:
        """The oldest window is to be taken."""
        ...

    def take(
        self, place: int, entry: messages.Entry, target: memoryview | None, deadline: Deadline
    ) -> Arrived | Stopped | None:
        """Take the next block into the target; without one it is passed over, and the answer is None."""
        ...

    def finish(self, deadline: Deadline) -> None:
        """The oldest window was taken, or is not wanted any more."""
        ...


def keys_of(entries: Sequence[messages.Entry]) -> tuple[messages.Key, ...]:
    """Return what FETCH and PIN name blocks by."""
    return tuple(messages.Key(entry.block_hash, entry.rank) for entry in entries)


class OverTcp:
    """Blocks come over the connection."""

    name = "tcp"

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None:
        """Send a FETCH."""
        self._transport.send(messages.Fetch(keys_of(entries)), deadline)

    def begin(self, deadline: Deadline) -> None:
        """Nothing: the blocks follow each other."""

    def take(
        self, place: int, entry: messages.Entry, target: memoryview | None, deadline: Deadline
    ) -> Arrived | Stopped | None:
        """Receive a block straight into the target, or receive and forget it."""
        answer = self._transport.receive(deadline)
        match answer:
            case messages.BlockHeader() if answer.index == place:
                if answer.nbytes != entry.nbytes:
                    raise RemoteError("transfer: a block of another size than announced")
                if target is None:
                    self._transport.discard_data(answer.nbytes, deadline)
                    return None
                return Arrived(answer.digest, self._transport.receive_data(target, deadline))
            case messages.Miss() if answer.index == place:
                return Stopped("gone")
            case messages.Busy() if place == 0:
                return Stopped("busy")
            case messages.Error():
                raise RemoteError(f"transfer: {answer.message}")
            case _:
                raise unexpected(answer)

    def finish(self, deadline: Deadline) -> None:
        """Nothing: the next window follows."""


class FromFile:
    """Blocks are pinned by the source and copied out of its file."""

    name = "same host"

    def __init__(self, transport: Transport, file: NeighbourFile) -> None:
        self._transport = transport
        self._file = file
        self._places: deque[messages.Place] = deque()
        self._busy = False

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None:
        """Send a PIN."""
        self._transport.send(messages.Pin(keys_of(entries)), deadline)

    def begin(self, deadline: Deadline) -> None:
        """Learn where the blocks lie."""
        answer = self._transport.receive(deadline)
        match answer:
            case messages.Pinned():
                self._places = deque(answer.places)
            case messages.Busy():
                self._busy = True
            case messages.Error():
                raise RemoteError(f"transfer: {answer.message}")
            case _:
                raise unexpected(answer)

    def take(
        self, place: int, entry: messages.Entry, target: memoryview | None, deadline: Deadline
    ) -> Arrived | Stopped | None:
        """Copy a block. The deadline is looked at before each."""
        deadline.wait()
        if not self._places:
            return Stopped("busy" if self._busy else "gone")
        place_in_file = self._places.popleft()
        if target is None:
            return None
        found = self._file.copy(place_in_file.slot, entry.nbytes, target)
        if found != entry.digest and not self._file.unchanged(*place_in_file):
            return Stopped("gone")  # the source dropped it although it was pinned: its engine is another one now
        return Arrived(entry.digest, found)

    def finish(self, deadline: Deadline) -> None:
        """Give the pins back."""
        if not self._busy:
            self._transport.send(messages.Unpin(), deadline)
        self._busy = False
        self._places.clear()
