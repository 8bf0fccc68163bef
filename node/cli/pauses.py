"""How long moved streams were held up, from the metrics that their entries count."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: The histogram, and the label of streams that were moved by a drain.
METRIC = "grapevine_carry_pause_seconds"
_LINE = re.compile(rf"^{METRIC}_(bucket|sum|count)\{{([^}}]*)\}} ([0-9.eE+-]+)$", re.MULTILINE)
_MOVED = 'cause="moved"'
_UPPER = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of moved streams: how many, their sum in seconds, and how many were at most as long as each bound."""

    count: float = 0.0
    sum_s: float = 0.0
    within: dict[float, float] = field(default_factory=dict)

    def __add__(self, other: Pauses) -> Pauses:
        bounds = self.within.keys() | other.within.keys()
        within = {bound: self.within.get(bound, 0.0) + other.within.get(bound, 0.0) for bound in bounds}
        return Pauses(self.count + other.count, self.sum_s + other.sum_s, within)

    def __sub__(self, other: Pauses) -> Pauses:
        within = {bound: value - other.within.get(bound, 0.0) for bound, value in self.within.items()}
        return Pauses(max(0.0, self.count - other.count), max(0.0, self.sum_s - other.sum_s), within)

    @property
    def mean_ms(self) -> float | None:
        """None when no stream was moved."""
        return self.sum_s / self.count * 1000.0 if self.count else None

    @property
    def most_ms(self) -> float | None:
        """A bound that no pause was above; None when no stream was moved."""
        bounds = [bound for bound, value in sorted(self.within.items()) if value >= self.count]
        return bounds[0] * 1000.0 if self.count and bounds else None

    def as_dict(self) -> dict[str, float | None]:
        """For `--json`; times in milliseconds."""
        mean = None if self.mean_ms is None else round(self.mean_ms, 1)
        most = self.most_ms if self.most_ms != float("inf") else None
        return {"moved_streams": int(self.count), "pause_mean_ms": mean, "pause_at_most_ms": most}

    def __str__(self) -> str:
        if self.mean_ms is None:
            return "no stream had to move"
        most = f", none above {self.most_ms:g} ms" if self.most_ms is not None else ""
        return f"{self.count:.0f} streams moved, held up {self.mean_ms:.0f} ms in the mean{most}"


def measured(metrics: str) -> Pauses:
    """The pauses in one node's metrics page."""
    total = Pauses()
    for kind, labels, text in _LINE.findall(metrics):
        if _MOVED not in labels:
            continue
        value = float(text)
        if kind == "count":
            total += Pauses(count=value)
        elif kind == "sum":
            total += Pauses(sum_s=value)
        elif (upper := _UPPER.search(labels)) is not None:
            total += Pauses(within={float(upper[1]): value})
    return total
