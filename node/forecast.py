"""How fast a line moves, and how long it may be. Pure; ``now`` is monotonic seconds, never going back.

The rate is counted on a clock that runs only while somebody waits, so that quiet times do not slow it down.

A burst may wait: as long as the line empties now and then, a request is taken in whose turn comes within `MAX_WAIT_S`.
A line that has not been empty for a while, and from which nobody had a place quickly, is a standing one: the cluster is
asked for more than it can do, and every second that a request waits is added to the latency of all that follow. Then
only those are taken in whose turn comes within a share of what a request usually takes, until the line has been empty
for a while (CoDel's distinction between good and bad queues, Nichols and Jacobson 2012, with admission in place of
drops; the two lengths of patience as in Maurer, "Fail at scale", 2015).
"""

from __future__ import annotations

from collections import deque

#: Seconds that a request without a deadline of its own waits at most.
MAX_WAIT_S = 60.0
#: How long a turn may be off while the line is a standing one: share of the usual time of a request, at least so long.
SHARE = 0.25
LEAST_WAIT_S = 0.1
#: So many may always wait: without them a place that becomes free would stay empty until the next request comes.
FEW = 2
#: A line is a standing one after so many usual times of a request, within these bounds in seconds...
STANDING_TIMES = 2.0
STANDING_LEAST_S = 2.0
STANDING_MOST_S = 10.0
#: ... and ends to be one when it was empty for this share of that.
CALM_SHARE = 0.5
#: Places that the rate is taken over, and the fewest that say something.
PLACES = 32
FEWEST_PLACES = 4
#: Slowest rate that is believed, places per second: it keeps every quotient finite.
SLOWEST = 1e-3


class Forecast:
    """What was seen of one line."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._open_since: float | None = None
        self._empty_since = float("-inf")
        self._good_at = float("-inf")
        self._standing = False
        #: Readings of the clock of rule 1 at the last places given.
        self._places: deque[float] = deque(maxlen=PLACES)

    def opened(self, now: float, usual_s: float) -> None:
        """The first request stands in line."""
        self._open_since = now
        if now - self._empty_since >= CALM_SHARE * _standing_after(usual_s):
            self._standing = False
            self._good_at = now

    def emptied(self, now: float) -> None:
        """Nobody waits any more."""
        self._waited_s = self._clock(now)
        self._open_since = None
        self._empty_since = self._good_at = now

    def served(self, now: float, waited_s: float, usual_s: float) -> None:
        """Somebody had a place after ``waited_s``."""
        self._places.append(self._clock(now))
        if waited_s <= short_wait(usual_s):
            self._good_at = now

    def standing(self, now: float, usual_s: float) -> bool:
        """Whether the line is a standing one."""
        if self._open_since is not None and now - self._good_at >= _standing_after(usual_s):
            self._standing = True
        return self._standing

    def measured(self) -> bool:
        """Whether enough places were given to know the rate."""
        return len(self._places) >= FEWEST_PLACES

    def rate(self, now: float, guess: float) -> float:
        """Places per second; ``guess`` until it is measured."""
        if not self.measured():
            return max(guess, SLOWEST)
        # What has passed since the last place counts too: a line that stands still gets slower.
        span = self._clock(now) - self._places[0]
        return max((len(self._places) - 1) / span if span > 0 else guess, SLOWEST)

    def longest_s(self, now: float, usual_s: float) -> float:
        """How far off the turn of a request may be that is taken in now."""
        return short_wait(usual_s) if self.standing(now, usual_s) else MAX_WAIT_S

    def _clock(self, now: float) -> float:
        return self._waited_s + (now - self._open_since if self._open_since is not None else 0.0)


def short_wait(usual_s: float) -> float:
    """Seconds that count as a short wait where a request usually takes ``usual_s``."""
    return min(max(LEAST_WAIT_S, SHARE * usual_s), MAX_WAIT_S)


def _standing_after(usual_s: float) -> float:
    return min(max(STANDING_LEAST_S, STANDING_TIMES * usual_s), STANDING_MOST_S)
