"""What a check found."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Grade(enum.Enum):
    """How bad it is."""

    #: Looked at, and as it should be.
    FINE = "fine"
    #: Worth knowing; nothing has to be done.
    NOTE = "note"
    #: It works, and worse than it could.
    WARNING = "warning"
    #: Something does not work.
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``mend`` says what to do; empty where there is nothing to do."""

    topic: str
    grade: Grade
    text: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        """JSON-able."""
        return {**asdict(self), "grade": self.grade.value}


def fine(topic: str, text: str) -> Finding:
    """It is as it should be."""
    return Finding(topic, Grade.FINE, text)


def note(topic: str, text: str, mend: str = "") -> Finding:
    """Worth knowing."""
    return Finding(topic, Grade.NOTE, text, mend)


def warning(topic: str, text: str, mend: str) -> Finding:
    """Works, and worse than it could."""
    return Finding(topic, Grade.WARNING, text, mend)


def problem(topic: str, text: str, mend: str) -> Finding:
    """Does not work."""
    return Finding(topic, Grade.PROBLEM, text, mend)
