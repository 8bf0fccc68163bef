"""Everybody's network coordinate: how any node knows about how far any two others are apart.

Rules
1. A node finds its own place from the round trips of its own probes (`coordinate`); each ack brings the peer's place.
2. One place rides on each peer's first datagram of a tick, ours every fourth time, the others' in turn: a constant kB/s
   whatever the cluster's size. A newcomer knows 95 in 100 after `3 n / 15` seconds, at fan-out 3 and 200 ms.
3. A place is ordered by (boot, seq) of its owner and dies with its member. A place that is out of bounds is refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gossip.coordinate import Coordinate, Locator
from gossip.encode import PacketBuilder, encode_part
from gossip.hub import Hub
from gossip.member import Member
from gossip.membership import Membership
from gossip.messages import Place

#: One in so many of the places sent is our own.
OWN_TURN = 4


@dataclass(frozen=True, slots=True)
class _Known:
    place: Place
    coordinate: Coordinate


class Coordinates:
    """Our own place and those of the members."""

    def __init__(self, hub: Hub, membership: Membership) -> None:
        self._hub = hub
        self._membership = membership
        self._locator = Locator(hub.rng)
        self._seq = 0
        self._known: dict[str, _Known] = {}
        self._turns: deque[str] = deque()
        self._sent = 0

    def measured(self, name: str, rtt_s: float) -> None:
        """Take one direct round trip into account."""
        known = self._known.get(name)
        if known is not None:
            self._locator.measured(name, known.coordinate, rtt_s)
            self._seq += 1

    def receive(self, place: Place) -> None:
        """Keep a peer's place if it is newer than the one held. :raises RemoteError: it is none."""
        owner = self._membership.up(place.name)
        if owner is None or owner.boot != place.boot:
            return
        known = self._known.get(place.name)
        if known is not None and (place.boot, place.seq) <= (known.place.boot, known.place.seq):
            return
        coordinate = Coordinate.decode(place.coordinate)
        if known is None:
            self._turns.append(place.name)
        self._known[place.name] = _Known(place, coordinate)

    def own(self) -> Place:
        """Our own place, for an ack."""
        return Place(self._hub.name, self._hub.boot, self._seq, self._locator.place.encode())

    def fill(self, builder: PacketBuilder) -> None:
        """Add one place to a packet, if there is room (rule 2)."""
        self._sent += 1
        place = self.own() if self._sent % OWN_TURN == 0 or not self._turns else self._next()
        builder.add(encode_part(place))

    def _next(self) -> Place:
        self._turns.rotate(-1)
        return self._known[self._turns[-1]].place

    def of(self, name: str) -> Coordinate | None:
        """Where a node is, None while that is unknown."""
        if name == self._hub.name:
            return self._locator.place
        known = self._known.get(name)
        return known.coordinate if known is not None else None

    def estimate_rtt_s(self, a: str, b: str) -> float | None:
        """Estimate the round-trip time between two nodes, in seconds; None while one of the places is unknown."""
        if a == b:
            return 0.0
        one, other = self.of(a), self.of(b)
        return one.rtt_s(other) if one is not None and other is not None else None

    def names(self) -> set[str]:
        """Of whom there is a place."""
        return set(self._known)

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Nothing to do: its first ack brings its place."""

    def member_down(self, member: Member, now: float) -> None:
        """Places die with the member (rule 3)."""
        self._locator.forget(member.name)
        if self._known.pop(member.name, None) is not None:
            self._turns.remove(member.name)

    def member_doubted(self, member: Member, now: float) -> None:
        """Nothing to do."""
