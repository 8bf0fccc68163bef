"""When a refused client should come back, so that it is taken in then. Pure; ``now`` is monotonic seconds.

Rules:
1. Each refusal books a place for its request (client and body) at a time of its own: one after the other, at
   `BOOKED_SHARE` of the rate at which the line moves. `Retry-After` is that time in whole seconds, rounded up.
2. What comes again at that time or up to `LATE_S` (and a tenth of what it waited) later is taken in whatever the
   length of the line. What comes earlier is a newcomer like any other; the booking stays.
3. Nothing is kept free for a booking: while it is due, newcomers see one more ahead of them, and the few that may
   always wait (`node.forecast.FEW`) are let in. Clients that never come back cost nobody a place.
4. Bounded: `MAX_BOOKINGS`, and none further away than `MAX_AFTER_S`. A client that is refused beyond that is told
   `MAX_AFTER_S`, without a promise: the cluster is asked for more than it can do in that time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import dataclass

#: Longest Retry-After, seconds.
MAX_AFTER_S = 300
#: Bookings kept for one line.
MAX_BOOKINGS = 8192
#: Share of the line's rate that is given to those who were refused: the rest is for newcomers, and for errors.
BOOKED_SHARE = 0.7
#: How late one may come, seconds; and share of the time that one was told to wait.
LATE_S = 5.0
LATE_SHARE = 0.1
#: How early a client's clock and ours may let it come, seconds.
EARLY_S = 0.25
#: Bookings that nobody used are swept out this often, seconds.
SWEEP_S = 1.0


@dataclass(frozen=True, slots=True, order=True)
class _Booking:
    due: float
    until: float
    priority: int
    mark: int


class Bookings:
    """The bookings of one line, in the order of their times."""

    def __init__(self) -> None:
        #: Each client's, the next one due first.
        self._clients: dict[str, list[_Booking]] = {}
        self._count = 0
        self._booked_until = self._swept = float("-inf")

    def __len__(self) -> int:
        return self._count

    def book(self, client: str, mark: int, now: float, *, priority: int = 0, rate: float, ahead: int = 0) -> int:
        """Refuse a request; returns after how many seconds it should come back, after those ``ahead``."""
        self._forget(now)
        at = max(self._booked_until, now + ahead / rate) + 1.0 / (BOOKED_SHARE * rate)
        after = max(1, math.ceil(at - now))
        if after > MAX_AFTER_S or self._count >= MAX_BOOKINGS:
            return MAX_AFTER_S
        self._booked_until = at
        due = now + after
        booking = _Booking(due, due + LATE_S + LATE_SHARE * after, priority, mark)
        insort(self._clients.setdefault(client, []), booking)
        self._count += 1
        return after

    def take(self, client: str, mark: int, now: float) -> bool:
        """Whether this request has come again as it was told to; then its booking is used up."""
        mine = self._clients.get(client)
        if not mine:
            return False
        here = [b for b in mine if b.mark == mark and b.due <= now + EARLY_S and b.until >= now]
        if not here:
            return False
        mine.remove(here[0])
        self._count -= 1
        if not mine:
            del self._clients[client]
        return True

    def soon(self, now: float, within_s: float, *, late: bool = True) -> Counter[tuple[int, str]]:
        """How many should come within ``within_s``, by priority and client; with the ``late`` ones that still may."""
        self._forget(now)
        found: Counter[tuple[int, str]] = Counter()
        for client, mine in self._clients.items():
            for booking in mine:
                if booking.due > now + within_s:
                    break
                if late or booking.due >= now:
                    found[booking.priority, client] += 1
        return found

    def validate(self) -> None:
        """Check the invariants; raises AssertionError with the broken one."""
        assert self._count == sum(map(len, self._clients.values())) <= MAX_BOOKINGS, "the count of bookings is wrong"
        assert all(self._clients.values()), "a client without bookings was kept"
        assert all(mine == sorted(mine) for mine in self._clients.values()), "bookings out of order"

    def _forget(self, now: float) -> None:
        """Give up those who did not come."""
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        for client, mine in list(self._clients.items()):
            kept = [booking for booking in mine if booking.until >= now]
            self._count -= len(mine) - len(kept)
            if kept:
                self._clients[client] = kept
            else:
                del self._clients[client]
