"""Fetch blocks from one source into granted slots, run after run, as a supply hands them out.

The next run is asked for before the current one has arrived, so the source never waits for us; each is granted its
slots first, so what arrives always has a place. After the first bad or missing block nothing more is asked for or
committed, and what is still under way is received and forgotten, which leaves the connection usable. So is a block that
came from elsewhere in the meantime.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from . import messages
from .pool import BlockPool
from .pool_types import Slot
from .transport import Deadline
from .ways import Arrived, Stopped, Way

#: Windows that are begun at a time: one is taken, and there is work while its last blocks are waited for.
_BEGUN: Final = 2
_NUMBERS: Final = itertools.count(1)


class Supply(Protocol):
    """What one source is to be asked for. Blocks are numbers; `entries` are all ranks of a block, in order."""

    def take(self) -> range | None:
        """Return the next run of blocks; None: there is none now."""
        ...

    def wait(self, deadline: Deadline) -> bool:
        """Wait until there may be something to take; False when nothing will be."""
        ...

    def entries(self, run: range) -> Sequence[messages.Entry]:
        """Return what the source calls them."""
        ...

    def refuse(self, run: range) -> None:
        """There is no place for these, the last ones of the run that was taken last."""
        ...

    def wanted(self, block: int) -> bool:
        """Whether it is still to come."""
        ...

    def arrived(self, block: int) -> None:
        """It is in the pool, on all ranks."""
        ...

    def passed(self, block: int) -> None:
        """It came, and nobody wanted it any more."""
        ...

    def end(self) -> None:
        """The source gives nothing more of what it was asked for."""
        ...


@dataclass(slots=True)
class _Window:
    run: range
    entries: Sequence[messages.Entry]
    slots: deque[Slot]
    begun: bool = False


class Fetching:
    """Progress of one fetch. Not thread-safe. `epoch`: the pool's when its blocks were asked for."""

    def __init__(self, pool: BlockPool, way: Way, supply: Supply, epoch: int) -> None:
        self._pool = pool
        self._epoch = epoch
        self._way = way
        self._supply = supply
        self._writer = f"pull {next(_NUMBERS)}"  # grants are bounded for each fetch
        self._ranks = pool.header.geometry.ranks
        self._under_way: deque[_Window] = deque()
        self._stop: str | None = None
        self._shards = 0  # of the block that is taken now: those that are here
        self._ranks_done = 0
        self.blocks = 0  #: committed on all ranks
        self.bytes = 0
        self.corrupt: list[messages.Key] = []

    def run(self, deadline: Deadline) -> str:
        """Fetch what there is; returns the name of the reason why it ended. Raises what `Transport` raises."""
        while True:
            full = False
            while not full and self._stop is None and len(self._under_way) < self._way.depth:
                run = self._supply.take()
                if run is None:
                    break
                full = not self._ask(run, deadline)
            if self._under_way:
                for window in itertools.islice(self._under_way, _BEGUN):
                    self._begin(window, deadline)
                self._take(self._under_way[0], deadline)
                self._give_back(self._under_way.popleft())
            elif self._stop is not None or full:
                return self._stop or "full"
            elif not self._supply.wait(deadline):
                return "complete"

    def give_back(self) -> None:
        """Return the slots of windows that did not arrive."""
        self._way.stop()
        while self._under_way:
            self._give_back(self._under_way.popleft())

    def _ask(self, run: range, deadline: Deadline) -> bool:
        """Ask for a run, or the part of it that there are slots for. False: there is no slot for the rest now."""
        slots = self._pool.grant(len(run) * self._ranks, self._writer)
        if self._pool.header.epoch != self._epoch:
            # Looked at after the grant: slots of before are void, and these may be for another engine's blocks.
            for slot in slots:
                self._pool.abandon(slot)
            slots = []
        fits = len(slots) // self._ranks
        for slot in slots[fits * self._ranks :]:
            self._pool.abandon(slot)
        if fits < len(run):
            self._supply.refuse(run[fits:])
        if fits:
            entries = self._supply.entries(run[:fits])
            self._under_way.append(_Window(run[:fits], entries, deque(slots[: fits * self._ranks])))
            self._way.ask(entries, deadline)
        return fits == len(run)

    def _begin(self, window: _Window, deadline: Deadline) -> None:
        if not window.begun:
            window.begun = True
            wanted = self._stop is None
            targets = [self._pool.writable(slot) if wanted else None for slot in window.slots]
            self._way.begin(window.entries, targets, deadline)

    def _take(self, window: _Window, deadline: Deadline) -> None:
        for place, entry in enumerate(window.entries):
            if not self._block(window, place, entry, deadline):
                break
            self._pool.abandon(window.slots.popleft())  # nothing happens after a commit
        self._way.finish(deadline)

    def _block(self, window: _Window, place: int, entry: messages.Entry, deadline: Deadline) -> bool:
        """Take one block. False: nothing more of this window comes. The slot stays granted: it may be written still."""
        slot, block, rank = window.slots[0], window.run[place // self._ranks], place % self._ranks
        wanted = self._stop is None and self._supply.wanted(block)
        target = self._pool.writable(slot) if wanted else None
        room = target[: entry.nbytes] if target is not None else None
        match self._way.take(place, entry, room, deadline):
            case Stopped(reason):
                self._end(reason)
                return False
            case None:
                if wanted:
                    self._end("full")  # the pool was cleared
            case Arrived(announced, found):
                self._judge(slot, entry, announced, found)
        if self._stop is None:
            self._shards = self._shards + wanted if rank else int(wanted)
            if rank == self._ranks - 1:
                (self._supply.arrived if self._shards == self._ranks else self._supply.passed)(block)
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
        """Nothing more of what is under way counts: others may bring it."""
        if self._stop is None:
            self._stop = reason
            self._supply.end()

    def _give_back(self, window: _Window) -> None:
        while window.slots:
            self._pool.abandon(window.slots.popleft())
