"""What really happened in a run, so that no run passes because its faults were not there."""

from __future__ import annotations

from collections import Counter


class VacuousRunError(AssertionError):
    """A run was to prove something under faults that never happened."""


class Report(Counter[str]):
    """Counts by name: `lost`, `delivered`, `duplicated`, `cut`, `crashes`, `restarts`, `pauses`, `clock_steps`,
    `inbox_lost`, `partitions`, `streams`, `joins_seen`, `suspicions_seen`, `true_deaths`, `false_deaths`,
    `false_incidents`, `conflicts`, `resets`.

    Deaths are counted once per observer. One is false when its subject was running, not paused for a second, and not
    cut off from the observer. However many observers believe it, a false death of one incarnation is one incident.
    """

    def require(self, **least: int) -> None:
        """Insist on what must have happened. :raises VacuousRunError: it happened less often."""
        short = {name: self[name] for name, count in least.items() if self[name] < count}
        if short:
            raise VacuousRunError(f"the run proves nothing: wanted {least}, there were {short}")
