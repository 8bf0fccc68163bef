"""A node's own monotonic clock: it shares neither its zero nor its pace with anybody else's."""

from __future__ import annotations


class Clock:
    """Maps virtual seconds of the simulation to the seconds that one node reads, and back."""

    def __init__(self, offset_s: float, rate: float = 1.0) -> None:
        self._offset_s = offset_s
        self._rate = rate

    def read(self, now: float) -> float:
        """What the node's clock shows at that moment of the simulation."""
        return self._offset_s + now * self._rate

    def moment(self, reading: float) -> float:
        """When in the simulation the clock shows, or showed, that."""
        return (reading - self._offset_s) / self._rate

    def step(self, seconds: float) -> None:
        """Jump ahead, as after a suspended machine wakes up. A monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        self._offset_s += seconds

    def set_rate(self, rate: float, now: float) -> None:
        """From now on run at another pace (1.0 is true)."""
        self._offset_s += now * (self._rate - rate)
        self._rate = rate
