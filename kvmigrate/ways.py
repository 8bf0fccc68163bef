"""The two ways from a source's pool into ours: over the connection, or out of the source's file on the same host.

Both are used the same: `ask` for a window of blocks, `begin` it when its turn comes, `take` one block after the other,
`finish` it. They raise what `Transport` raises. After `stop` no target is written to any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from . import messages
from .copier import Copier, Copy, Helpers
from .errors import RemoteError
from .neighbour import NeighbourFile
from .transport import Deadline, Transport, unexpected

#: Where the blocks of a window go; None where one is not wanted.
Targets: TypeAlias = Sequence[memoryview | None]


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

    @property
    def depth(self) -> int:
        """Windows that are asked for ahead, the one that is taken included."""
        ...

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None:
        """Ask for a window; several may be under way."""
        ...

    def begin(self, entries: Sequence[messages.Entry], targets: Targets, deadline: Deadline) -> None:
        """The oldest window that was asked for and not begun is taken next, or after the one that is taken now."""
        ...

    def take(
        self, place: int, entry: messages.Entry, target: memoryview | None, deadline: Deadline
    ) -> Arrived | Stopped | None:
        """Take the next block into the target; without one it is passed over, and the answer is None.

        The target is that of `begin`, if the block is still wanted.
        """
        ...

    def finish(self, deadline: Deadline) -> None:
        """The oldest window was taken, or is not wanted any more."""
        ...

    def stop(self) -> None:
        """Whatever is under way ends here."""
        ...


def keys_of(entries: Sequence[messages.Entry]) -> tuple[messages.Key, ...]:
    """Return what FETCH and PIN name blocks by."""
    return tuple(messages.Key(entry.block_hash, entry.rank) for entry in entries)


class OverTcp:
    """Blocks come over the connection."""

    name = "tcp"
    depth = 2

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None:
        """Send a FETCH."""
        self._transport.send(messages.Fetch(keys_of(entries)), deadline)

    def begin(self, entries: Sequence[messages.Entry], targets: Targets, deadline: Deadline) -> None:
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

    def stop(self) -> None:
        """Nothing: only `take` writes."""


class FromFile:
    """Blocks are pinned by the source and copied out of its file, while the next window's pins are asked for."""

    name = "same host"
    depth = 3

    def __init__(self, transport: Transport, file: NeighbourFile, helpers: Helpers) -> None:
        self._transport = transport
        self._file = file
        self._copier = Copier(helpers)
        self._begun: deque[_Pins] = deque()

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None:
        """Send a PIN."""
        self._transport.send(messages.Pin(keys_of(entries)), deadline)

    def begin(self, entries: Sequence[messages.Entry], targets: Targets, deadline: Deadline) -> None:
        """Learn where the blocks lie, and begin to copy them."""
        answer = self._transport.receive(deadline)
        match answer:
            case messages.Pinned():
                places = answer.places[: len(entries)]
                self._begun.append(_Pins(deque(places)))
                self._copier.begin(list(map(self._copy, places, entries, targets)))
            case messages.Busy():
                self._begun.append(_Pins(deque(), busy=True))
            case messages.Error():
                raise RemoteError(f"transfer: {answer.message}")
            case _:
                raise unexpected(answer)

    def take(
        self, place: int, entry: messages.Entry, target: memoryview | None, deadline: Deadline
    ) -> Arrived | Stopped | None:
        """Wait for the copy of a block. The deadline is looked at before each."""
        deadline.wait()
        pins = self._begun[0]
        if not pins.places:
            return Stopped("busy" if pins.busy else "gone")
        place_in_file = pins.places.popleft()
        found = self._copier.finish()
        if target is None:
            return None
        if found != entry.digest and not self._file.unchanged(*place_in_file):
            return Stopped("gone")  # the source dropped it although it was pinned: its engine is another one now
        return Arrived(entry.digest, found)

    def finish(self, deadline: Deadline) -> None:
        """Give the pins back."""
        pins = self._begun.popleft()
        for _ in pins.places:
            self._copier.finish()
        if not pins.busy:
            self._transport.send(messages.Unpin(), deadline)

    def stop(self) -> None:
        """Wait for the copies that are being made; the others are never made."""
        self._copier.stop()

    def _copy(self, place: messages.Place, entry: messages.Entry, target: memoryview | None) -> Copy:
        if target is None:
            return Copy(bytes, 0)
        return Copy(partial(self._file.copy, place.slot, entry.nbytes, target[: entry.nbytes]), entry.nbytes)


@dataclass(slots=True)
class _Pins:
    """Where the blocks of a window lie that were not taken yet."""

    places: deque[messages.Place]
    busy: bool = False
