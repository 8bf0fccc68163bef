"""Network coordinates: where a node lies in a space in which distance is round-trip time.

Vivaldi (Dabek et al., SIGCOMM 2004) with height, and with the adjustment, gravity and latency filter of Ledlie et al.
(NSDI 2007), in the form and with the constants that Serf and Consul use: eight dimensions, all times in seconds.

- The vector says where a node is in the core of the network, the height how far it is from that core; packets between
  two nodes travel the distance of the vectors and both heights.
- Each measured round trip pushes or pulls the node along the line to its peer, the more the surer the peer is of its
  own place (`error`, from 0 for sure to `ERROR_MAX`) and the less sure the node is of its own.
- What the space cannot express is averaged over the last measurements and added (`adjustment`).
- A weak pull towards the origin keeps the whole cluster from drifting.
"""

from __future__ import annotations

import math
import random
import struct
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from gossip.errors import RemoteError

DIMENSIONS: Final = 8
ERROR_MAX: Final = 1.5
#: Gain of the error and of the movement.
ERROR_GAIN: Final = 0.25
MOVE_GAIN: Final = 0.25
ADJUSTMENT_WINDOW: Final = 20
HEIGHT_MIN_S: Final = 10e-6
GRAVITY_RHO: Final = 150.0
#: The median of so many measurements of a peer counts: one that met a busy host is no distance.
FILTER_SIZE: Final = 3
#: Longest round trip and farthest coordinate believed, in seconds.
MAX_RTT_S: Final = 10.0
MAX_COMPONENT_S: Final = 60.0
_ZERO: Final = 1e-6
_FORM: Final = struct.Struct(f">{DIMENSIONS + 3}f")
ENCODED_BYTES: Final = _FORM.size

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One node's place. `error` is relative, everything else in seconds."""

    vector: Vector = (0.0,) * DIMENSIONS
    height: float = HEIGHT_MIN_S
    error: float = ERROR_MAX
    adjustment: float = 0.0

    def rtt_s(self, other: Coordinate) -> float:
        """Estimate the round-trip time to another node, in seconds."""
        raw = self.raw_rtt_s(other)
        adjusted = raw + self.adjustment + other.adjustment
        return adjusted if adjusted > 0 else raw

    def raw_rtt_s(self, other: Coordinate) -> float:
        """The same without the adjustments."""
        return math.dist(self.vector, other.vector) + self.height + other.height

    def encode(self) -> bytes:
        """Give `ENCODED_BYTES` bytes."""
        return _FORM.pack(*self.vector, self.height, self.error, self.adjustment)

    @classmethod
    def decode(cls, data: bytes) -> Coordinate:
        """Read what `encode` gave. :raises RemoteError: it is no place in our space."""
        if len(data) != ENCODED_BYTES:
            raise RemoteError("a coordinate has another size")
        *vector, height, error, adjustment = _FORM.unpack(data)
        found = cls(tuple(vector), height, error, adjustment)
        if not found.is_sane:
            raise RemoteError("a coordinate is out of bounds")
        return found

    @property
    def is_sane(self) -> bool:
        """Whether every number is finite and within its bounds."""
        values = (*self.vector, self.height, self.adjustment)
        # Not-a-number fails every comparison.
        return all(abs(v) <= MAX_COMPONENT_S for v in values) and self.height > 0 and 0 <= self.error <= ERROR_MAX

    def pushed(self, force: float, other: Coordinate, rng: random.Random) -> Coordinate:
        """Give the place after a push of that many seconds away from another; negative pulls."""
        unit, magnitude = _direction(self.vector, other.vector, rng)
        height = self.height
        if magnitude > _ZERO:
            height = max(HEIGHT_MIN_S, height + (height + other.height) * force / magnitude)
        return replace(self, vector=tuple(v + u * force for v, u in zip(self.vector, unit, strict=True)), height=height)


ORIGIN: Final = Coordinate(error=0.0)


def _direction(a: Vector, b: Vector, rng: random.Random) -> tuple[Vector, float]:
    """The unit vector from b to a and their distance; any direction where they coincide."""
    apart = tuple(x - y for x, y in zip(a, b, strict=True))
    magnitude = math.hypot(*apart)
    if magnitude > _ZERO:
        return tuple(x / magnitude for x in apart), magnitude
    anywhere = tuple(rng.uniform(-1, 1) for _ in a)
    length = math.hypot(*anywhere) or 1.0
    return tuple(x / length for x in anywhere), 0.0


class Locator:
    """Finds our own place from measured round trips."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._misses: deque[float] = deque(maxlen=ADJUSTMENT_WINDOW)
        self._samples: dict[str, deque[float]] = {}
        self.place = Coordinate()
        #: How often impossible results made us begin again.
        self.resets = 0

    def measured(self, name: str, peer: Coordinate, rtt_s: float) -> None:
        """Take one round trip to a peer at that place into account; an impossible one is ignored."""
        if not 0 < rtt_s <= MAX_RTT_S:
            return
        samples = self._samples.setdefault(name, deque(maxlen=FILTER_SIZE))
        samples.append(rtt_s)
        usual = max(_ZERO, sorted(samples)[len(samples) // 2])
        self._move(peer, usual)
        self._adjust(peer, usual)
        distance = ORIGIN.rtt_s(self.place)
        self.place = self.place.pushed(-((distance / GRAVITY_RHO) ** 2), ORIGIN, self._rng)
        if not self.place.is_sane:
            self.place = Coordinate()
            self._misses.clear()
            self.resets += 1

    def forget(self, name: str) -> None:
        """Drop what was measured to a peer."""
        self._samples.pop(name, None)

    def _move(self, peer: Coordinate, rtt_s: float) -> None:
        distance = self.place.rtt_s(peer)
        wrong = abs(distance - rtt_s) / rtt_s
        weight = self.place.error / max(_ZERO, self.place.error + peer.error)
        error = min(ERROR_MAX, wrong * ERROR_GAIN * weight + self.place.error * (1 - ERROR_GAIN * weight))
        force = MOVE_GAIN * weight * (rtt_s - distance)
        self.place = replace(self.place, error=error).pushed(force, peer, self._rng)

    def _adjust(self, peer: Coordinate, rtt_s: float) -> None:
        self._misses.append(rtt_s - self.place.raw_rtt_s(peer))
        self.place = replace(self.place, adjustment=sum(self._misses) / (2 * ADJUSTMENT_WINDOW))
