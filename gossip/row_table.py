"""The latest load row of each other node, held in columns.

Thousands of rows arrive each second in a large cluster, and most of what a row costs is finding what is held of its
owner. So each owner has a slot, and what is compared or moved for every row lies side by side in flat columns. Slots
are dense: the last one moves into the place of one that is given up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any

from gossip.limits import AGE_UNIT_S
from gossip.messages import Row, Rows

#: What a row gains in rank, in seconds of age, per second by which it is younger than the one before it, and for how
#: many seconds at most (rule 6 of `rows`).
GAP_GAIN, MOST_GAP_S = 1.0, 3.0
#: How much further down than last time, in seconds of rank, the freshest are looked for before all rows are sorted.
RANK_MARGIN_S = 0.3
#: What it loses each time that it is passed on.
PASSED_ON_LOSS_S = 1.0


class RowTable:
    """One row per owner. All times are seconds on our own clock; every column is indexed by slot."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self.rows: list[Row] = []
        #: The order of each row, for comparison with one that comes in.
        self._stamps: list[int] = []
        #: Who gave it to us.
        self.sources: list[str] = []
        #: When the owner set it.
        self.set_at = array("d")
        #: Its place among the freshest when rows are passed on.
        self.ranks = array("d")
        #: Sequence number and time of the first row of that boot that came here.
        self._first_seqs: list[int] = []
        self._first_at = array("d")
        #: Whether the owner has been probed because this row is old.
        self.doubted = bytearray()
        #: The rank, relative to the time, that was enough to be among the freshest last time.
        self._enough = float("-inf")

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> set[str]:
        """Whose rows are held."""
        return set(self._slots)

    def get(self, name: str) -> tuple[Row, float] | None:
        """Give a node's row and when it was set."""
        slot = self._slots.get(name)
        return (self.rows[slot], self.set_at[slot]) if slot is not None else None

    # --- writing ------------------------------------------------------------------------------------------------------

    def merge(self, rows: Rows, sender: str, now: float, admits: Callable[[Row], bool], news: dict[str, None]) -> None:
        """Keep those rows that are newer than the ones held, and enter their owners into `news`. `now`: when they came.
        `admits` is asked for the first row of each boot.
        """
        find, stamps, set_ats = self._slots.get, self._stamps, self.set_at
        for row, age in zip(rows.rows, rows.ages, strict=True):
            slot = find(row.name)
            if slot is not None:
                if row.stamp <= stamps[slot]:
                    continue
                if row.boot == self.rows[slot].boot:
                    set_at = now - age * AGE_UNIT_S
                    gap = set_at - set_ats[slot]
                    stamps[slot] = row.stamp
                    set_ats[slot] = set_at
                    self.ranks[slot] = set_at + GAP_GAIN * (gap if gap < MOST_GAP_S else MOST_GAP_S)
                    self.rows[slot] = row
                    self.sources[slot] = sender
                    self.doubted[slot] = False
                    news[row.name] = None
                    continue
            if admits(row):
                self.remove(row.name)
                self._enter(row, sender, now - age * AGE_UNIT_S)
                news[row.name] = None

    def _enter(self, row: Row, sender: str, set_at: float) -> None:
        self._slots[row.name] = len(self.rows)
        self.rows.append(row)
        self._stamps.append(row.stamp)
        self.sources.append(sender)
        self.set_at.append(set_at)
        self.ranks.append(set_at + GAP_GAIN * MOST_GAP_S)
        self._first_seqs.append(row.seq)
        self._first_at.append(set_at)
        self.doubted.append(False)

    def remove(self, name: str) -> None:
        """Give up a row; unknown is fine."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        last = len(self.rows) - 1
        if slot != last:
            self._slots[self.rows[last].name] = slot
        for column in self._columns():
            column[slot] = column[last]
            del column[last]

    def _columns(self) -> tuple[MutableSequence[Any], ...]:
        return (
            self.rows,
            self._stamps,
            self.sources,
            self.set_at,
            self.ranks,
            self._first_seqs,
            self._first_at,
            self.doubted,
        )

    def passed_on(self, slots: Iterable[int]) -> None:
        """Lower the rank of rows that were sent on."""
        ranks = self.ranks
        for slot in slots:
            ranks[slot] -= PASSED_ON_LOSS_S

    # --- reading ------------------------------------------------------------------------------------------------------

    def renewals(self, slot: int) -> int:
        """How often the owner has renewed its row since we first heard of one."""
        return self.rows[slot].seq - self._first_seqs[slot]

    def period_s(self, slot: int) -> float:
        """Seconds between two renewals on average; only where there were some."""
        return (self.set_at[slot] - self._first_at[slot]) / self.renewals(slot)

    def freshest(self, count: int, now: float) -> list[int]:
        """Give the slots of the `count` rows of the highest rank, the highest first."""
        ranks = self.ranks
        likely: Iterable[int] = range(len(ranks))
        if count < len(ranks):
            above = now + self._enough - RANK_MARGIN_S
            found = [slot for slot, rank in enumerate(ranks) if rank > above]
            likely = found if len(found) >= count else likely
        best = sorted(likely, key=ranks.__getitem__, reverse=True)[:count]
        if best:
            self._enough = ranks[best[-1]] - now
        return best
