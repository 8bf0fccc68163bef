"""Round-trip times, smoothed as TCP does it (RFC 6298: gain 1/8 and 1/4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RoundTrip:
    """Smoothed round-trip time and its mean deviation, in seconds."""

    smoothed_s: float
    deviation_s: float

    def add(self, sample_s: float) -> None:
        """Take one more measurement into account."""
        self.deviation_s += (abs(sample_s - self.smoothed_s) - self.deviation_s) / 4
        self.smoothed_s += (sample_s - self.smoothed_s) / 8


class RoundTrips:
    """One estimate per peer, from direct pings only. Bounded by the member table: `drop` follows every death."""

    def __init__(self) -> None:
        self._of: dict[str, RoundTrip] = {}

    def add(self, name: str, sample_s: float) -> None:
        """Record one measured round trip."""
        known = self._of.get(name)
        if known is None:
            self._of[name] = RoundTrip(sample_s, sample_s / 2)
        else:
            known.add(sample_s)

    def get(self, name: str) -> float | None:
        """Give the smoothed time in seconds, or None before the first measurement."""
        known = self._of.get(name)
        return known.smoothed_s if known else None

    def drop(self, name: str) -> None:
        """Forget a peer."""
        self._of.pop(name, None)

    def names(self) -> set[str]:
        """Whom there is an estimate for."""
        return set(self._of)
