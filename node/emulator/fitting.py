"""Finds an engine's times from what its clients saw. Pure.

A timing is judged by playing the very requests, each at the moment it was sent, through an emulated engine that has
it, and comparing times to the first token and to the last one with those that were measured. So batching, waiting and
cached prefixes are part of the fit, and what is made small is what is reported: `loss` is the mean of |log(emulated /
measured)| over both times, in which one stray request counts little.

The search is the simplex method of Nelder and Mead (1965) over the logarithms of the constants: it needs no
derivatives, which a scheduler has none of, and constants stay above 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from node.emulator.config import EngineConfig, Timing
from node.emulator.engine import EmulatedEngine
from node.emulator.job import Done, Job, Tokens

#: Constants that are searched for. The others are kept: clients cannot tell them apart from these.
FITTED = ("step_s", "prefill_s", "attention_s", "decode_s", "context_s", "accept_s")
#: Constants are not searched for below this: its logarithm must exist.
LEAST_S = 1e-10
#: Evaluations of one search, and first steps of the searches, in logarithms: each begins where the last one ended.
EVALUATIONS = 400
SPREADS = (0.7, 0.3, 0.1)
#: A constant that a search lost, so that it is less than the first share of where all began, begins the next at the
#: second: down there nothing hangs on its logarithm any more, and it would not be found again.
LOST, AGAIN = 0.1, 0.3

Point = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, when it was sent, and the seconds from then to its first and to its last token."""

    job: Job
    at: float
    first_s: float
    whole_s: float


class Times(NamedTuple):
    """Seconds to the first and to the last token."""

    first_s: float
    whole_s: float


def played(config: EngineConfig, seen: Sequence[Seen]) -> list[Times]:
    """What an emulated engine with an empty cache makes of the same requests, in their order."""
    engine = EmulatedEngine(config)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for request in sorted(seen, key=lambda request: request.at):
        engine.submit(request.job, request.at)
    for action in engine.advance(math.inf):
        if isinstance(action, Tokens) and action.first:
            first[action.rid] = action.at
        elif isinstance(action, Done):
            last[action.rid] = action.at
    return [Times(first[each.job.rid] - each.at, last[each.job.rid] - each.at) for each in seen]


def loss(config: EngineConfig, seen: Sequence[Seen]) -> float:
    """How far off the emulated times are, as a mean ratio's logarithm; 0 = exact."""
    return sum(
        abs(math.log(times.first_s / each.first_s)) + abs(math.log(times.whole_s / each.whole_s))
        for times, each in zip(played(config, seen), seen, strict=True)
    ) / (2 * len(seen))


def fitted(config: EngineConfig, seen: Sequence[Seen], *, evaluations: int = EVALUATIONS) -> Timing:
    """The timing with which an engine like `config` answers as was seen. Its own timing is where the search begins."""
    began = timing = _scaled(config, seen)

    def cost(point: Point) -> float:
        return loss(replace(config, timing=_timing(timing, point)), seen)

    for spread in SPREADS:
        start = tuple(math.log(_found(getattr(timing, name), getattr(began, name))) for name in FITTED)
        timing = _timing(timing, least(cost, start, spread, evaluations))
    return timing


def _found(value: float, began: float) -> float:
    return max(LEAST_S, value if value >= LOST * began else AGAIN * began)


def _scaled(config: EngineConfig, seen: Sequence[Seen]) -> Timing:
    """All times of the engine by one factor: other hardware is faster or slower above all."""
    pairs = zip(played(config, seen), seen, strict=True)
    factor = median(each.whole_s / times.whole_s for times, each in pairs)
    return replace(config.timing, **{name: getattr(config.timing, name) * factor for name in FITTED})


def _timing(timing: Timing, point: Point) -> Timing:
    return replace(timing, **{name: max(LEAST_S, math.exp(value)) for name, value in zip(FITTED, point, strict=True)})


def least(cost: Callable[[Point], float], start: Point, spread: float, evaluations: int) -> Point:
    """The point with the least `cost` that a simplex finds from `start`, its corners `spread` away."""
    corners = [start, *(_moved(start, axis, spread) for axis in range(len(start)))]
    simplex = sorted((cost(corner), corner) for corner in corners)
    used = len(corners)
    while used < evaluations:
        worst_cost, worst = simplex[-1]
        middle = _mean([corner for _, corner in simplex[:-1]])
        tried = _towards(middle, worst, -1.0)
        value = cost(tried)
        used += 1
        if value < simplex[0][0]:
            further = _towards(middle, worst, -2.0)
            best = min((value, tried), (cost(further), further))
            used += 1
        elif value < simplex[-2][0]:
            best = (value, tried)
        else:
            inner = _towards(middle, tried if value < worst_cost else worst, 0.5)
            best = (cost(inner), inner)
            used += 1
            if best[0] >= min(value, worst_cost):
                simplex = _shrunk(simplex, cost)
                used += len(simplex) - 1
                continue
        simplex = sorted([*simplex[:-1], best])
    return simplex[0][1]


def _shrunk(simplex: list[tuple[float, Point]], cost: Callable[[Point], float]) -> list[tuple[float, Point]]:
    """Every corner half-way towards the best one."""
    best = simplex[0]
    nearer = [_towards(best[1], corner, 0.5) for _, corner in simplex[1:]]
    return sorted([best, *((cost(corner), corner) for corner in nearer)])


def _moved(point: Point, axis: int, by: float) -> Point:
    return (*point[:axis], point[axis] + by, *point[axis + 1 :])


def _mean(points: Sequence[Point]) -> Point:
    return tuple(sum(values) / len(points) for values in zip(*points, strict=True))


def _towards(point: Point, other: Point, share: float) -> Point:
    """From `point`, `share` of the way to `other`; a negative share leads away from it."""
    return tuple(here + share * (there - here) for here, there in zip(point, other, strict=True))
