"""What a bench gives: figures, and which of them miss their targets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benches import machine

#: A target: "<=", ">=" or "=", and the value.
Target = tuple[str, float]


@dataclass(slots=True)
class Result:
    """The outcome of one bench. What could not be measured is absent from the figures and explained in the notes."""

    bench: str
    targets: Mapping[str, Target]
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine.describe)

    def add(self, name: str, value: float) -> None:
        """Record a figure, and show it on standard error."""
        self.figures[name] = float(f"{value:.4g}")
        target = self.targets.get(name)
        verdict = (
            "" if target is None else f"   {'ok' if meets(value, target) else 'SHORT'} ({target[0]} {target[1]:g})"
        )
        say(f"  {name:48} {self.figures[name]:>12g}{verdict}")

    def note(self, text: str) -> None:
        """Add an explanation."""
        self.notes.append(text)
        say(f"  note: {text}")

    def short(self) -> list[str]:
        """Names of the figures that miss their targets."""
        return [name for name, target in self.targets.items() if not meets(self.figures.get(name), target)]

    def as_json(self) -> dict[str, Any]:
        """Give the form that `shared` figures are read in: see docs/benchmarks.md."""
        measured = {name: target for name, target in self.targets.items() if name in self.figures}
        return {
            "bench": self.bench,
            "machine": self.machine,
            "figures": self.figures,
            "targets": {name: list(target) for name, target in measured.items()},
            "short": self.short(),
            "notes": self.notes,
        }


def meets(value: float | None, target: Target) -> bool:
    """Whether a figure meets its target; one that was not measured does not miss it."""
    if value is None:
        return True
    op, wanted = target
    return {"<=": value <= wanted, ">=": value >= wanted, "=": value == wanted}[op]


def say(text: str) -> None:
    """Progress goes to standard error: standard output is for the JSON."""
    print(text, file=sys.stderr, flush=True)
