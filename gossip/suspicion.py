"""The timer of one suspicion, shortened by independent confirmations (Lifeguard).

`min = mult * max(1, log100 n) * probe_interval`, `max = max_mult * min`, k confirmations wanted, none if the cluster
has fewer than that many other nodes. After c confirmations the suspicion lasts `max - ln(c+1)/ln(k+1) * (max-min)`,
never less than min. memberlist takes log10, and `mult - 2` confirmations; here a suspect is also defended by its load
row (rule 9 of `membership`), so that above ten nodes the shorter time is no more dangerous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

#: Signs of life put off the end of a suspicion for up to this many times its longest duration.
HELD_MULT: Final = 3


def suspicion_min_s(mult: float, members: int, probe_interval_s: float) -> float:
    """Shortest suspicion, in seconds, for a cluster of `members` nodes, this one included."""
    return mult * max(1.0, math.log(max(1, members), 100)) * probe_interval_s


def confirmations_wanted(wanted: int, members: int) -> int:
    """How many further accusers bring a suspicion down to its minimum."""
    return 0 if members - 2 < wanted else wanted


@dataclass(slots=True)
class Suspicion:
    """One running suspicion. Times are monotonic seconds."""

    started: float
    min_s: float
    max_s: float
    #: Confirmations beyond the first accuser that bring the timer to its minimum.
    wanted: int
    first_accuser: str
    _others: list[str] = field(default_factory=list)
    #: Until when signs of life may put the end off.
    ends_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends_at = self.started + HELD_MULT * self.max_s

    @property
    def accusers(self) -> tuple[str, ...]:
        """All distinct accusers, the first one first."""
        return (self.first_accuser, *self._others)

    def confirm(self, accuser: str) -> bool:
        """Count one more accuser; False when it is known already or no more are wanted."""
        if len(self._others) >= self.wanted or accuser in self.accusers:
            return False
        self._others.append(accuser)
        return True

    def shift(self, seconds: float) -> None:
        """Let it have begun that much later."""
        self.started += seconds
        self.ends_at += seconds

    def deadline(self) -> float:
        """When the suspect is to be declared dead."""
        if self.wanted < 1:
            return self.started + self.min_s
        share = math.log(len(self._others) + 1) / math.log(self.wanted + 1)
        return self.started + max(self.min_s, self.max_s - share * (self.max_s - self.min_s))
