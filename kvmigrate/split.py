"""Which source of a pull fetches which blocks next, when several hold them. Pure: no clock, no I/O, no lock.

Blocks are numbers along the chain. A source holds those up to its reach: what it evicts goes from the end of a chain,
and what lies behind a hole is of no use. Each source takes one run of blocks after the other, as it gets done.

Rules
1. From the front: the blocks that nobody was asked for yet and that come first. So the hole that time or a fault leaves
   is never further from the front than what is under way, and what came before it counts.
2. Unless that would make the end late: where what only some sources reach would keep those busy for longer than all
   together need for the rest, they take from there. In a pull that will not end in time, the front goes first again.
3. A run is at most what its source takes at a time, in bytes and in seconds of its time, and half of its share (by
   rate) of what is left, so that all are done at about the same time; but no less than MIN_RUN_BYTES, or the round
   trips would count.
4. A run that is overdue (twice its expected time, and a grace) is given to whoever comes next, while its source keeps
   at it. So is one that somebody who has nothing else to do would bring in half of the time that it will still take.
   Whatever arrives first counts.
5. When a source leaves, or can give less than it said, its blocks are taken over at the one where it stopped.

Why not a split fixed by the rates at the start: they are averages of the past, and a source that is busy, slow or dead
would hold up all. Runs taken from one queue need no forecast; rates only say how large the runs are. Shrinking runs are
"factoring" (Hummel, Schonberg, Flynn 1992); asking twice for the last ones is what MapReduce calls backup tasks (2004).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .errors import InvariantError
from .spans import Spans

#: No smaller run, unless nothing more is left: large against a round trip, small against a pull.
MIN_RUN_BYTES: Final = 1 << 20
#: A run is overdue after so many times its expected time and so many seconds: less than the work of others is worth.
OVERDUE: Final = 2.0
GRACE_S: Final = 0.05
#: Seconds that asking another source for a run takes: below it nothing is taken over for being slow.
ASK_S: Final = 0.005
#: A run takes no shorter time than this, as far as its rate is concerned.
_MEASURED_S: Final = 1e-4


@dataclass(slots=True)
class _Run:
    first: int
    end: int
    bytes: int
    left: int = 0  #: blocks that have not passed
    began: float = 0.0  #: when its first byte could come
    passed: int = 0  #: bytes
    late: bool = False  #: others may take it

    @property
    def under_way(self) -> range:
        """The blocks that have not passed."""
        return range(self.end - self.left, self.end)


@dataclass(slots=True)
class _Source:
    reach: int
    rate: float
    most_bytes: int
    most_blocks: int
    most_s: float
    runs: deque[_Run] = field(default_factory=deque)


class Split:
    """The blocks of one chain, and who is asked for which. Times are seconds of one monotonic clock.

    `extend` with what is known of the chain, `join` for each source, then `take`, `arrived` and `passed` in turns until
    `complete`.
    """

    def __init__(self) -> None:
        self._ends = [0]  # bytes of all blocks up to and with each
        self._arrived: list[bool] = []
        self._asked: list[int] = []  # the source that was asked last, -1: none
        self._todo = Spans()  # blocks that nobody brings, or that somebody brings too late
        self._missing = 0
        self._sources: dict[int, _Source] = {}
        #: Blocks that a source was asked for after another one had not brought them.
        self.taken_over = 0

    # -- what is known -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._arrived)

    @property
    def complete(self) -> bool:
        """Every block is here."""
        return not self._missing

    def busy(self, number: int) -> bool:
        """Whether blocks are under way from a source."""
        source = self._sources.get(number)
        return source is not None and bool(source.runs)

    @property
    def missing_bytes(self) -> int:
        """Bytes of the blocks that did not arrive."""
        return sum(self._size(place) for place, here in enumerate(self._arrived) if not here)

    @property
    def sources(self) -> int:
        """How many sources take part."""
        return len(self._sources)

    @property
    def rate(self) -> float:
        """Bytes per second of all sources that take part."""
        return sum(source.rate for source in self._sources.values())

    @property
    def hole(self) -> int:
        """The first block that is not here; the length of the chain when all are."""
        return self._arrived.index(False) if self._missing else len(self._arrived)

    @property
    def stuck(self) -> bool:
        """Nobody who takes part can give the first block that is not here: what lies behind it is of no use."""
        hole = self.hole
        return not self.complete and all(source.reach <= hole for source in self._sources.values())

    def overdue(self, now: float) -> bool:
        """Whether a source is late with its run."""
        return any(source.runs and _late(source, now) for source in self._sources.values())

    # -- what happens ------------------------------------------------------------------------------------------------

    def extend(self, sizes: Sequence[int], here: Iterable[int] = ()) -> None:
        """The chain goes on with blocks of these bytes, of which those with the numbers `here` have arrived."""
        first = len(self)
        for size in sizes:
            self._ends.append(self._ends[-1] + size)
        self._arrived += [False] * len(sizes)
        self._asked += [-1] * len(sizes)
        self._missing += len(sizes)
        self._todo.add(first, len(self))
        for place in here:
            self._arrive(place)

    def join(
        self, number: int, reach: int, rate: float, *, most_bytes: int, most_blocks: int, most_s: float = math.inf
    ) -> None:
        """A source takes part: it has the first `reach` blocks and gives so many bytes per second.

        It takes at most so many bytes (or one block), blocks, and seconds of its time in one run.
        """
        reach, rate, most_blocks = min(reach, len(self)), max(rate, 1.0), max(1, most_blocks)
        self._sources[number] = _Source(reach, rate, most_bytes, most_blocks, most_s)

    def leave(self, number: int) -> None:
        """A source gives nothing more. Harmless when it takes no part."""
        source = self._sources.pop(number, None)
        for run in source.runs if source is not None else ():
            self._release(run.under_way)

    def take(self, number: int, now: float, left_s: float) -> range | None:
        """Return the next run for a source; None: there is none for it now. The pull has `left_s` seconds left."""
        me = self._sources.get(number)
        if me is None or self.complete:
            return None
        for source in self._sources.values():
            if source.runs and source is not me and _late(source, now):
                self._overdue(source, now, source.runs)
        low = self._tightest(me, left_s)
        span = self._free(me, low) or self._free(me, 0)
        if span is None and not me.runs:
            span = self._relief(me, now)
        if span is None:
            return None
        first, end = span[0], self._fit(me, *span)
        self._todo.discard(first, end)
        self.taken_over += sum(asked not in (-1, number) for asked in self._asked[first:end])
        self._asked[first:end] = [number] * (end - first)
        me.runs.append(_Run(first, end, self._bytes(first, end), left=end - first, began=now))
        return range(first, end)

    def refuse(self, number: int, run: range) -> None:
        """A source cannot take these blocks, the last of what it took last: there is no place for them."""
        source = self._sources.get(number)
        if source is None or not run:
            return
        taken = source.runs[-1]
        assert taken.end == run.stop and taken.left >= len(run)
        taken.end = run.start
        taken.left -= len(run)
        taken.bytes = self._bytes(taken.first, taken.end)
        if not taken.left:
            source.runs.pop()
        self._release(run)
        self._asked[run.start : run.stop] = [-1] * len(run)

    def wanted(self, place: int) -> bool:
        """Whether a block is still to come."""
        return not self._arrived[place]

    def arrived(self, number: int, place: int, now: float) -> None:
        """A source brought a block, and it is in the pool."""
        self._arrive(place)
        self.passed(number, place, now)

    def passed(self, number: int, place: int, now: float) -> None:
        """A block of a source's run came, whether or not it was needed; a source's blocks come in their order."""
        source = self._sources.get(number)
        if source is None or not source.runs:
            return
        run = source.runs[0]
        run.left -= 1
        run.passed += self._size(place)
        if not run.left:
            source.runs.popleft()
            source.rate = (source.rate + run.bytes / max(now - run.began, _MEASURED_S)) / 2
            if source.runs:
                source.runs[0].began = now

    def validate(self) -> None:
        """Check every invariant; InvariantError names the one that is broken."""
        self._todo.validate()
        todo = {place for first, end in self._todo for place in range(first, end)}
        if any(self._arrived[place] for place in todo):
            raise InvariantError("a block that is here is to be fetched")
        if self._missing != self._arrived.count(False):
            raise InvariantError("the count of missing blocks is wrong")
        runs = [run for source in self._sources.values() for run in source.runs]
        under_way = {place for run in runs for place in run.under_way}
        lost = [place for place, here in enumerate(self._arrived) if not here and place not in todo | under_way]
        if lost:
            raise InvariantError(f"nobody brings block {lost[0]}")
        if any(run.left <= 0 or run.end - run.first < run.left for run in runs):
            raise InvariantError("a run is over and still there")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _size(self, place: int) -> int:
        return self._ends[place + 1] - self._ends[place]

    def _bytes(self, first: int, end: int) -> int:
        return self._ends[end] - self._ends[first]

    def _arrive(self, place: int) -> None:
        if not self._arrived[place]:
            self._arrived[place] = True
            self._missing -= 1
            self._todo.discard(place, place + 1)

    def _release(self, places: range) -> None:
        """Let others bring these blocks, as far as nobody else is bringing them in time."""
        awaited = [run.under_way for source in self._sources.values() for run in source.runs if not run.late]
        for place in places:
            if not self._arrived[place] and not any(place in others for others in awaited):
                self._todo.add(place, place + 1)

    def _overdue(self, source: _Source, now: float, runs: Iterable[_Run]) -> None:
        source.rate = _rate(source, self._size(source.runs[0].first), now)
        for run in runs:
            if not run.late:
                run.late = True
                self._release(run.under_way)

    def _free(self, me: _Source, low: int) -> tuple[int, int] | None:
        """Return the first blocks from `low` on that a source reaches and is not asked for already."""
        while (span := self._todo.first(low, me.reach)) is not None:
            first, end = span
            own = next((run for run in me.runs if run.first <= first < run.end), None)
            if own is None:
                return first, min([end, *(run.first for run in me.runs if first < run.first)])
            low = own.end
        return None

    def _tightest(self, me: _Source, left_s: float) -> int:
        """Return from which block on the time is shortest for those who reach it; 0 = from the front (rule 2)."""
        if len(self._sources) == 1:
            return 0
        tight, longest_s = 0, 0.0
        for low in sorted({0, *(source.reach for source in self._sources.values())}):
            if low >= me.reach:
                break
            rate = sum(source.rate for source in self._sources.values() if source.reach > low)
            spans = ((max(first, low), end) for first, end in self._todo if end > low)
            takes_s = sum(self._bytes(first, end) for first, end in spans) / rate
            if takes_s > longest_s:
                tight, longest_s = low, takes_s
        return tight if longest_s <= left_s else 0

    def _fit(self, me: _Source, first: int, end: int) -> int:
        """Return where a run that begins with `first` ends (rule 3)."""
        most: float = min(me.most_bytes, max(MIN_RUN_BYTES, me.rate * me.most_s))
        if len(self._sources) > 1:
            left = sum(self._bytes(*span) for span in self._todo)
            most = min(most, max(MIN_RUN_BYTES, left * me.rate / self.rate / 2))
        fits = bisect_right(self._ends, self._ends[first] + most) - 1
        return max(first + 1, min(end, fits, first + me.most_blocks))

    def _relief(self, me: _Source, now: float) -> tuple[int, int] | None:
        """Somebody has nothing to do: take over from who would be done last, if that is worth it (rule 4)."""
        slowest, longest_s = None, 0.0
        for source in self._sources.values():
            if source is me or not any(_relieves(me, run) for run in source.runs):
                continue
            left = sum(run.bytes - run.passed for run in source.runs)
            takes_s = left / _rate(source, self._size(source.runs[0].first), now)
            if takes_s > longest_s and 2 * (left / me.rate + ASK_S) < takes_s:
                slowest, longest_s = source, takes_s
        if slowest is None:
            return None
        self._overdue(slowest, now, [run for run in slowest.runs if _relieves(me, run)])
        return self._free(me, 0)


def _relieves(me: _Source, run: _Run) -> bool:
    """Whether a source could bring something of a run that nobody else may take yet."""
    return not run.late and run.under_way.start < me.reach


def _late(source: _Source, now: float) -> bool:
    """Whether the first run that nobody else may take yet should be over."""
    before = 0
    for run in source.runs:
        before += run.bytes
        if not run.late:
            return now > source.runs[0].began + OVERDUE * before / source.rate + GRACE_S
    return False


def _rate(source: _Source, block: int, now: float) -> float:
    """What a source gives as its run shows it: one that is silent gets slower and slower."""
    run = source.runs[0]
    elapsed_s = now - run.began
    return source.rate if elapsed_s * source.rate <= run.bytes else (run.passed + block) / elapsed_s
