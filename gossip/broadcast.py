"""Rumours waiting to be piggy-backed: one per member, each sent a limited number of times, the least sent first."""

from __future__ import annotations

import math
from itertools import chain

from gossip.encode import PacketBuilder, encode_part
from gossip.messages import Rumour

#: A node that has just started knows few members, but its rumours have to reach all: it counts at least this many.
LEAST_MEMBERS = 10


def retransmits(mult: int, members: int) -> int:
    """How often each node passes a rumour on: `mult * ceil(log10(n + 1))`."""
    return mult * math.ceil(math.log10(max(members, LEAST_MEMBERS) + 1))


#: Rumours that did not fit, after which a packet counts as full although a shorter one might still have fitted.
MISFITS = 4


class BroadcastQueue:
    """Keyed by the member that a rumour is about: a newer one replaces the older. So it never outgrows the table."""

    def __init__(self) -> None:
        #: Name to how often its rumour was sent, which is the index of the level where that rumour is.
        self._sent: dict[str, int] = {}
        #: Encoded rumours by name; one level per number of times sent, so that nothing need be sorted.
        self._levels: list[dict[str, bytes]] = [{}]

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, name: str) -> bool:
        return name in self._sent

    def put(self, rumour: Rumour) -> None:
        """Spread this, in place of whatever was being said about that member."""
        self.drop(rumour.name)
        self._sent[rumour.name] = 0
        self._levels[0][rumour.name] = encode_part(rumour)

    def drop(self, name: str) -> None:
        """Stop talking about that member."""
        sent = self._sent.pop(name, None)
        if sent is not None:
            del self._levels[sent][name]

    def fill(self, builder: PacketBuilder, limit: int) -> None:
        """Put as many rumours as fit into the packet and retire those that were sent `limit` times."""
        if not self._sent:
            return
        added: list[tuple[str, bytes]] = []
        misfits = 0
        for name, encoded in chain.from_iterable(level.items() for level in self._levels):
            if builder.add(encoded):
                added.append((name, encoded))
                continue
            misfits += 1
            if builder.room < 24 or misfits >= MISFITS:  # shorter than any rumour
                break
        for name, encoded in added:
            self._count(name, encoded, limit)

    def _count(self, name: str, encoded: bytes, limit: int) -> None:
        sent = self._sent[name]
        self.drop(name)
        if sent + 1 >= limit:
            return
        while len(self._levels) <= sent + 1:
            self._levels.append({})
        self._sent[name] = sent + 1
        self._levels[sent + 1][name] = encoded
