"""What the engines' journals tell: which requests were carried to another engine, and which were computed twice.

A duplicate decode is two engines that compute tokens for one request at the same time although the first could know
better. Rules
1. An engine that nobody can reach cannot be told: while it, its node, the request's entry or the link between them is
   stopped or cut off, and for `GRACE_S` after that, its work is no duplicate. It is counted apart (`unreachable`).
   After a cut it is reached when TCP tries again, at doubled intervals: at the latest after as long as the cut lasted.
2. Work that goes on for at most `GRACE_S` after another engine began is none either: an abort takes a moment, and ends
   a step, never the middle of one.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_run.node import Trouble

GRACE_S = 1.0


@dataclass(slots=True)
class Work:
    """What one engine process did for one request: when it began and ended, and when it computed tokens."""

    node: str
    pid: int
    begun: float
    tokens: list[float] = field(default_factory=list)
    ended: float | None = None
    #: How many they were, as far as that was noted.
    count: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all journals of a run tell together."""

    #: Requests for which a second engine computed tokens after the first one had, and what had happened to that.
    carried: Mapping[str, str]
    #: When that second engine computed its first token, monotonic seconds.
    resumed: Mapping[str, float]
    #: Tokens that all engines together computed for each request that was carried.
    computed: Mapping[str, int]
    duplicates: tuple[str, ...]
    unreachable: tuple[str, ...]
    #: Work that never ended although its engine lives.
    unfinished: tuple[str, ...]


def read(files: Iterable[tuple[str, Path]]) -> dict[str, list[Work]]:
    """The work on each request, oldest first. A line that a kill cut short is left out."""
    works: dict[str, list[Work]] = defaultdict(list)
    for node, path in files:
        open_works: dict[tuple[int, str], Work] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                note = json.loads(line)
            except ValueError:
                continue
            key = (note["pid"], note["id"])
            if note["what"] == "begin" or key not in open_works:
                open_works[key] = Work(node, note["pid"], note["at"])
                works[note["id"]].append(open_works[key])
            open_works[key].count = max(open_works[key].count, note["tokens"])
            if note["what"] == "token":
                open_works[key].tokens.append(note["at"])
            elif note["what"] == "end":
                open_works[key].ended = note["at"]
    for found in works.values():
        found.sort(key=lambda work: work.begun)
    return works


def judge(
    works: dict[str, list[Work]], troubles: Sequence[Trouble], entries: dict[str, str], living: frozenset[int]
) -> Verdict:
    """Judge a run. `entries`: the entry of each request; `living`: pids of the engines that run at the end."""
    carried: dict[str, str] = {}
    resumed: dict[str, float] = {}
    computed: dict[str, int] = {}
    duplicates: list[str] = []
    unreachable: list[str] = []
    unfinished: list[str] = []
    for rid, found in works.items():
        computing = [work for work in found if work.tokens]
        if len(computing) > 1:
            resumed[rid] = computing[1].tokens[0]
            computed[rid] = sum(work.count for work in computing)
            carried[rid] = _cause(computing[0], computing[1].begun, troubles, entries.get(rid, ""))
        for first, second in itertools.pairwise(computing):
            overlap = first.tokens[-1] - second.tokens[0]
            if overlap <= GRACE_S:
                continue
            told = _could_know(first, second.tokens[0], troubles, entries.get(rid, ""))
            late = first.tokens[-1] - told
            text = f"{rid}: {first.node} went on {overlap:.1f} s after {second.node} began"
            (duplicates if late > GRACE_S else unreachable).append(text)
        unfinished += [f"{rid} on {work.node}" for work in found if work.ended is None and work.pid in living]
    return Verdict(carried, resumed, computed, tuple(duplicates), tuple(unreachable), tuple(unfinished))


def _cause(first: Work, at: float, troubles: Sequence[Trouble], entry: str) -> str:
    """What had happened last before another engine went on; empty when nothing had.

    An entry that is stopped holds up its clients itself, whatever else has happened: `entry stopped`.
    """
    before = [trouble for trouble in troubles if trouble.begun <= at]
    if any(t.node == entry and t.what == "stopped" and t.ended >= first.tokens[-1] for t in before):
        return "entry stopped"
    own = [trouble for trouble in before if trouble.node == first.node]
    return max(own, key=lambda trouble: trouble.begun).what if own else ""


def _could_know(first: Work, since: float, troubles: Sequence[Trouble], entry: str) -> float:
    """When the first engine could have been told, at the earliest."""
    told = since
    for trouble in sorted(troubles, key=lambda trouble: trouble.begun):
        if (
            trouble.excuses
            and trouble.node in (first.node, entry)
            and trouble.begun <= told + GRACE_S
            and trouble.ended > told
        ):
            told = trouble.ended + (trouble.ended - trouble.begun if trouble.what == "cut" else 0.0)
    return told
