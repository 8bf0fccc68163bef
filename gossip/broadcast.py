"""Rumours waiting to be piggy-backed: one per member, each sent a limited number of times, the least sent first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossip.codec import PacketBuilder, encode_part
from gossip.messages import Rumour

#: A node that has just started knows few members, but its rumours have to reach all: it counts at least this many.
LEAST_MEMBERS = 10


def retransmits(mult: int, members: int) -> int:
    """How often each node passes a rumour on: `mult * ceil(log10(n + 1))`."""
    return mult * math.ceil(math.log10(max(members, LEAST_MEMBERS) + 1))


@dataclass(slots=True)
class _Queued:
    rumour: Rumour
    encoded: bytes
    sent: int = 0


class BroadcastQueue:
    """Keyed by the member that a rumour is about: a newer one replaces the older. So it never outgrows the table."""

    def __init__(self) -> None:
        self._queue: dict[str, _Queued] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, name: str) -> bool:
        return name in self._queue

    def put(self, rumour: Rumour) -> None:
        """Spread this, in place of whatever was being said about that member."""
        self._queue[rumour.name] = _Queued(rumour, encode_part(rumour))

    def drop(self, name: str) -> None:
        """Stop talking about that member."""
        self._queue.pop(name, None)

    def fill(self, builder: PacketBuilder, limit: int) -> None:
        """Put as many rumours as fit into the packet and retire those that were sent `limit` times."""
        for queued in sorted(self._queue.values(), key=lambda q: q.sent):
            if builder.add(queued.encoded):
                queued.sent += 1
                if queued.sent >= limit:
                    del self._queue[queued.rumour.name]
            elif builder.room < 24:  # shorter than any rumour
                break
