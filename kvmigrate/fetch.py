"""Fetch the blocks of a manifest from one source into granted slots.

The list is cut into windows. The next window is asked for before the current one has arrived, so the source never
waits for us; each is granted its slots first, so what arrives always has a place. After the first bad or missing
block nothing more is asked for or committed, and what is still under way is received and forgotten, which leaves the
connection usable.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from . import messages
from .pool import BlockPool
from .pool_types import Slot
from .transport import Deadline
from .ways import Arrived, Stopped, Way

#: Windows that are begun at a time: one is taken, and there is work while its last blocks are waited for.
_BEGUN: Final = 2
_NUMBERS: Final = itertools.count(1)


@dataclass(slots=True)
class _Window:
    entries: Sequence[messages.Entry]
    slots: deque[Slot]
    begun: bool = False


class Fetching:
    """Progress of one fetch. Not thread-safe."""

    def __init__(self, pool: BlockPool, way: Way, entries: Sequence[messages.Entry], window_bytes: int) -> None:
        self._pool = pool
        self._way = way
        self._writer = f"pull {next(_NUMBERS)}"  # grants are bounded for each fetch
        self._ranks = pool.header.geometry.ranks
        self._todo = _windows(entries, window_bytes)
        self._under_way: deque[_Window] = deque()
        self._stop: str | None = None
        self._ranks_done = 0
        self.blocks = 0  #: committed on all ranks
        self.bytes = 0
        self.corrupt: list[messages.Key] = []

    def run(self, deadline: Deadline) -> str:
        """Fetch everything; returns the name of the reason why it ended. Raises what `Transport` raises."""
        while True:
            while self._todo and len(self._under_way) < self._way.depth and self._ask(deadline):
                pass
            if not self._under_way:
                return self._stop or ("full" if self._todo else "complete")
            for window in itertools.islice(self._under_way, _BEGUN):
                self._begin(window, deadline)
            self._take(self._under_way[0], deadline)
            self._give_back(self._under_way.popleft())

    def give_back(self) -> None:
        """Return the slots of windows that did not arrive."""
        self._way.stop()
        while self._under_way:
            self._give_back(self._under_way.popleft())

    def _ask(self, deadline: Deadline) -> bool:
        """Ask for the next window, or the part of it that there are slots for. False: there is no slot now."""
        entries = self._todo.popleft()
        slots = self._pool.grant(len(entries), self._writer)
        if len(slots) < len(entries):
            self._todo.appendleft(entries[len(slots) :])
            entries = entries[: len(slots)]
        if not entries:
            return False
        self._under_way.append(_Window(entries, deque(slots)))
        self._way.ask(entries, deadline)
        return True

    def _begin(self, window: _Window, deadline: Deadline) -> None:
        if not window.begun:
            window.begun = True
            wanted = self._stop is None
            targets = [self._pool.writable(slot) if wanted else None for slot in window.slots]
            self._way.begin(window.entries, targets, deadline)

    def _take(self, window: _Window, deadline: Deadline) -> None:
        for place, entry in enumerate(window.entries):
            if not self._block(place, entry, window.slots[0], deadline):
                break
            self._pool.abandon(window.slots.popleft())  # nothing happens after a commit
        self._way.finish(deadline)

    def _block(self, place: int, entry: messages.Entry, slot: Slot, deadline: Deadline) -> bool:
        """Take one block. False: nothing more of this window comes. The slot stays granted: it may be written still."""
        target = self._pool.writable(slot) if self._stop is None else None
        room = target[: entry.nbytes] if target is not None else None
        match self._way.take(place, entry, room, deadline):
            case Stopped(reason):
                self._end(reason)
                return False
            case None:
                self._end("full")  # the pool was cleared; or it had ended before
            case Arrived(announced, found):
                self._judge(slot, entry, announced, found)
        return True

    def _judge(self, slot: Slot, entry: messages.Entry, announced: bytes, found: bytes) -> None:
        if announced != entry.digest:
            self._end("gone")  # stored again in the meantime, by another computation
        elif found != entry.digest:
            self.corrupt.append(messages.Key(entry.block_hash, entry.rank))
            self._end("corrupt")
        else:
            self._commit(slot, entry)

    def _commit(self, slot: Slot, entry: messages.Entry) -> None:
        if not self._pool.commit(slot, entry.block_hash, entry.rank, entry.nbytes, entry.digest):
            return  # here already: the engine computed it meanwhile, or another pull was faster
        self.bytes += entry.nbytes
        self._ranks_done += 1
        self.blocks = self._ranks_done // self._ranks

    def _end(self, reason: str) -> None:
        if self._stop is None:
            self._stop = reason
        self._todo.clear()

    def _give_back(self, window: _Window) -> None:
        while window.slots:
            self._pool.abandon(window.slots.popleft())


def _windows(entries: Sequence[messages.Entry], window_bytes: int) -> deque[Sequence[messages.Entry]]:
    """Cut a list so that no window is larger than a FETCH may be, and few are larger than `window_bytes`."""
    windows: deque[Sequence[messages.Entry]] = deque()
    start = size = 0
    for place, entry in enumerate(entries):
        if place > start and (size + entry.nbytes > window_bytes or place - start == messages.MAX_FETCH):
            windows.append(entries[start:place])
            start, size = place, 0
        size += entry.nbytes
    if start < len(entries):
        windows.append(entries[start:])
    return windows
