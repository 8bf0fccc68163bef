"""Local health (Lifeguard): how far this node should doubt itself before it doubts others."""

from __future__ import annotations


class LocalHealth:
    """A score from 0 (well) to `most - 1`. Probe times are multiplied by score + 1."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.score = 0

    def add(self, delta: int) -> None:
        """Raise the score for a sign that we are slow, lower it for one that we are well."""
        self.score = min(self._most - 1, max(0, self.score + delta))

    def scale(self, seconds: float) -> float:
        """Stretch a probe time by the present score."""
        return seconds * (self.score + 1)
