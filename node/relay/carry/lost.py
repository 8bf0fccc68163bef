"""How a leg of a stream was lost."""

from __future__ import annotations

from dataclasses import dataclass

#: What loses a leg: words for metrics.
CAUSES = ("broken", "engine", "garbage", "moved", "silent", "stalled")


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a leg is no more. ``told``: its target said so itself, and is in order."""

    target: str
    cause: str
    why: str
    told: bool = False
    #: The error event by which it said so.
    event: bytes = b""

    @property
    def moved(self) -> bool:
        """Nothing was wrong."""
        return self.cause == "moved"
