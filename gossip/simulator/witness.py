"""Judges each death that a listener is told of: was its subject well?"""

from __future__ import annotations

from collections.abc import Callable

from gossip.member import MemberState, MemberView
from gossip.simulator.report import Report

#: One death of one incarnation, whoever believes in it: name, incarnation, refutations.
Incident = tuple[str, int, int]


class Witness:
    """Counts into a report. `well(subject, observer)`: whether the one runs and can be reached from the other."""

    def __init__(self, report: Report, well: Callable[[str, str], bool]) -> None:
        self._report = report
        self._well = well
        #: Every death once, and every false one.
        self.deaths: set[Incident] = set()
        self.false: set[Incident] = set()

    def saw(self, observer: str, view: MemberView) -> None:
        """A listener was told of a member's state."""
        if view.state is MemberState.SUSPECT:
            self._report["suspicions_seen"] += 1
        elif view.state is MemberState.DEAD:
            self._death(observer, (view.name, view.incarnation, view.refutations))

    def _death(self, observer: str, incident: Incident) -> None:
        self.deaths.add(incident)
        if not self._well(incident[0], observer):
            self._report["true_deaths"] += 1
            return
        self._report["false_deaths"] += 1
        if incident not in self.false:
            self.false.add(incident)
            self._report["false_incidents"] += 1
