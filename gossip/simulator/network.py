"""What happens to a datagram on its way: delay, loss, duplication, reordering, cuts. Streams feel delay, loss and cuts.

Rules
1. A cut or a loss rate concerns one direction: (sender, receiver). Nodes are known by name, so that a fault stays with
   a node that moves.
2. Datagrams that one node sends to another at one moment come one after the other, as they would on one path; each
   throws its own dice for loss, duplication and reordering, and one that is late or doubled travels by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

#: A reordered datagram is late by up to this many seconds.
REORDER_S = 0.5
#: What a TCP waits, at least, before it sends a lost packet again.
RETRANSMIT_S = 0.2


class Network:
    """The faults in force. `latency`: least and most one-way delay in seconds; the rest are probabilities."""

    def __init__(
        self, rng: random.Random, latency: tuple[float, float], loss: float, duplication: float, reordering: float
    ) -> None:
        self.latency = latency
        self.loss = loss
        self.duplication = duplication
        self.reordering = reordering
        self._random = rng.random
        self._cut: set[tuple[str, str]] = set()
        self._lossy: dict[tuple[str, str], float] = {}

    def cut(self, sender: str, receiver: str) -> None:
        """Lose everything in this direction."""
        self._cut.add((sender, receiver))

    def set_loss(self, sender: str, receiver: str, probability: float) -> None:
        """Lose more, or less, in this direction than elsewhere."""
        self._lossy[sender, receiver] = probability

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """Cut every path between two groups, in both directions."""
        sides = [set(group) for group in groups]
        for a in sides:
            for b in sides:
                if a is not b:
                    self._cut.update((x, y) for x in a for y in b)

    def heal(self) -> None:
        """End all cuts and all losses of single directions."""
        self._cut.clear()
        self._lossy.clear()

    def passes(self, sender: str, receiver: str) -> bool:
        """Whether there is a path in this direction."""
        return not self._cut or (sender, receiver) not in self._cut

    def delay(self) -> float:
        """Draw a one-way delay in seconds."""
        least, most = self.latency
        return least + (most - least) * self._random()

    def reorders(self) -> bool:
        """Whether one datagram comes later than those that were sent after it."""
        return self.reordering > 0 and self._random() < self.reordering

    def lateness(self) -> float:
        """By how many seconds."""
        return REORDER_S * self._random()

    def stream_delay(self, packets: int) -> float:
        """Draw the delay of that many packets of a stream, one after the other: a lost one comes 0.2 s later."""
        again = sum(RETRANSMIT_S for _ in range(packets) if self.loss and self._random() < self.loss)
        return sum(self.delay() for _ in range(packets)) + again

    def loses(self, sender: str, receiver: str) -> bool:
        """Throw the dice for one datagram on a path that is there."""
        loss = self._lossy.get((sender, receiver), self.loss) if self._lossy else self.loss
        return loss > 0 and self._random() < loss

    def duplicates(self) -> bool:
        """Whether one datagram arrives twice, if it does."""
        return self.duplication > 0 and self._random() < self.duplication
