"""How fast a line moves, and how long it may be. Pure; ``now`` is monotonic seconds, never going back.

The rate is counted on a clock that runs only while somebody waits, so that quiet times do not slow it down.

A burst may wait: as long as the line empties now and then, a request is taken in whose turn comes within `MAX_WAIT_S`.
A line that has not been empty for a while, and from which nobody had a place quickly, is a standing one: the cluster is
asked for more than it can do, and every second that a request waits is added to the latency of all that follow. Then
only those are taken in whose turn comes within a share of what a request usually takes, until the line is empty for
part of the time again and those who were sent away have come back. (CoDel's distinction between good and bad queues,
Nichols and Jacobson 2012, with admission in place of drops; the two lengths of patience as in Maurer, "Fail at scale",
2015.)
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

#: Seconds that a request without a deadline of its own waits at most.
MAX_WAIT_S = 60.0
#: How long a turn may be off while the line is a standing one: share of the usual time of a request, at least so long.
SHARE = 0.25
LEAST_WAIT_S = 0.1
#: So many may always wait: without them a place that becomes free would stay empty until the next request comes.
FEW = 2
#: A line is a standing one after so many usual times of a request, within these bounds in seconds...
STANDING_TIMES = 4.0
STANDING_LEAST_S = 2.0
STANDING_MOST_S = 20.0
#: ... or after that share of it, when so many times as many came since it was last empty as had a place.
FLOOD = 2.0
FLOOD_SHARE = 0.5
#: ... and ends to be one when it was empty for this share of about as long, and no more are due to come back than have
#: a place within so many seconds.
CALM_SHARE = 0.3
OWED_S = 1.0
#: Places that the rate is taken over, and the fewest that say something.
PLACES = 32
FEWEST_PLACES = 4
#: Places since a line was last empty that outweigh all earlier ones.
STEADY_PLACES = 6
#: Slowest rate that is believed, places per second: it keeps every quotient finite.
SLOWEST = 1e-3
#: What a client had counts half after so many seconds, and so many clients are remembered.
HALF_LIFE_S = 60.0
MAX_CLIENTS = 1024
#: A client that had less than this share of what others had on the average is a modest one.
MODEST = 0.75
#: Less than so many places, faded, is as good as none.
WORTH_COUNTING = 0.5


class Forecast:
    """What was seen of one line."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._open_since: float | None = None
        self._changed_at = float("-inf")
        #: Share of the time that the line was empty; what is long ago counts little.
        self._empty = 1.0
        self._good_at = float("-inf")
        self._standing = False
        #: Since the line was last empty: who joined it, and places.
        self._came = 0
        self._since_opened = 0
        #: Readings of the clock of rule 1 at the last places given.
        self._places: deque[float] = deque(maxlen=PLACES)
        self._shares = _Shares()

    def opened(self, now: float, usual_s: float, *, owed: int = 0) -> None:
        """The first request stands in line, and ``owed`` others were told to come back."""
        few = owed <= OWED_S * self.rate(now, 0.0)
        self._weigh(now, usual_s, empty=True)
        self._open_since = self._good_at = now
        self._came = self._since_opened = 0
        if self._empty >= CALM_SHARE and few:
            self._standing = False

    def emptied(self, now: float, usual_s: float) -> None:
        """Nobody waits any more."""
        self._weigh(now, usual_s, empty=False)
        self._waited_s = self._clock(now)
        self._open_since = None

    def served(self, client: str, now: float, *, waited_s: float, usual_s: float) -> None:
        """A request of ``client`` had a place after ``waited_s``."""
        self._places.append(self._clock(now))
        self._since_opened += 1
        self._shares.add(client, now)
        if waited_s <= short_wait(usual_s):
            self._good_at = now

    def joined(self) -> None:
        """One more stands in line."""
        self._came += 1

    def standing(self, now: float, usual_s: float) -> bool:
        """Whether the line is a standing one."""
        if self._open_since is not None:
            bad_s, after_s = now - self._good_at, _standing_after(usual_s)
            flooded = self._since_opened >= STEADY_PLACES and self._came >= FLOOD * self._since_opened
            if bad_s >= (after_s * FLOOD_SHARE if flooded else after_s):
                self._standing = True
        return self._standing

    def modest(self, client: str, waiting: int, now: float) -> bool:
        """Whether a client with so many ``waiting`` had so little lately that the line is not its fault."""
        return self._shares.of(client, now) + waiting <= MODEST * self._shares.mean(now)

    def measured(self) -> bool:
        """Whether enough places were given to know the rate."""
        return len(self._places) >= FEWEST_PLACES

    def rate(self, now: float, guess: float) -> float:
        """Places per second; ``guess`` until it is measured.

        What this line had since it stands counts alone, as soon as that is enough: a line that is often empty moves
        faster than one that stands, since the other entries leave it places that they will need themselves.
        """
        if not self.measured():
            return max(guess, SLOWEST)
        clock = self._clock(now)
        # What has passed since the last place counts too: a line that stands still gets slower.
        if self._open_since is not None and STEADY_PLACES <= self._since_opened < PLACES:
            places, span = self._since_opened, now - self._open_since
        else:
            places, span = len(self._places) - 1, clock - self._places[0]
        return max(places / span if span > 0 else guess, SLOWEST)

    def longest_s(self, now: float, usual_s: float) -> float:
        """How far off the turn of a request may be that is taken in now."""
        return short_wait(usual_s) if self.standing(now, usual_s) else MAX_WAIT_S

    def _weigh(self, now: float, usual_s: float, *, empty: bool) -> None:
        kept = math.exp((self._changed_at - now) / _standing_after(usual_s))
        self._empty = self._empty * kept + (1.0 - kept) * empty
        self._changed_at = now

    def _clock(self, now: float) -> float:
        return self._waited_s + (now - self._open_since if self._open_since is not None else 0.0)


class _Shares:
    """Places that each client had lately, fading; the client that had none for longest is forgotten first."""

    def __init__(self) -> None:
        self._had: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def add(self, client: str, now: float) -> None:
        self._had[client] = (self.of(client, now) + 1.0, now)
        self._had.move_to_end(client)
        if len(self._had) > MAX_CLIENTS:
            self._had.popitem(last=False)

    def of(self, client: str, now: float) -> float:
        had, at = self._had.get(client, (0.0, now))
        return float(had * 0.5 ** ((now - at) / HALF_LIFE_S))

    def mean(self, now: float) -> float:
        """Over the clients that had something worth counting."""
        counted = [had for client in self._had if (had := self.of(client, now)) >= WORTH_COUNTING]
        return sum(counted) / len(counted) if counted else 0.0


def short_wait(usual_s: float) -> float:
    """Seconds that count as a short wait where a request usually takes ``usual_s``."""
    return min(max(LEAST_WAIT_S, SHARE * usual_s), MAX_WAIT_S)


def _standing_after(usual_s: float) -> float:
    return min(max(STANDING_LEAST_S, STANDING_TIMES * usual_s), STANDING_MOST_S)
