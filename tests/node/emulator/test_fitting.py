"""The fit finds an engine's times again from nothing but what its clients saw."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from benches import fit_load

from node.emulator import fitting
from node.emulator.config import SMOLLM2_CPU, EngineConfig, Timing
from node.emulator.fitting import Seen, fitted, least, loss, played
from node.emulator.job import Job
from node.emulator.tokens import block_hashes, pack

#: Twice as fast at some things as what the search begins with, and slower at others.
TRUTH = replace(
    SMOLLM2_CPU,
    timing=Timing(step_s=0.012, prefill_s=8e-4, attention_s=1e-6, decode_s=5e-3, context_s=2e-6, accept_s=0.03),
)
LONGEST = 1500


def requests(seed: int, *, apart: bool) -> list[Seen]:
    """As the bench sends them; times are filled in by `seen_by`."""
    rng = random.Random(seed)
    timed: list[tuple[float, fit_load.Ask]] = []
    if apart:
        for number, group in enumerate(fit_load.apart(rng, LONGEST)):
            timed += [(10.0 * number, ask) for ask in group]
    start = timed[-1][0] + 10 if timed else 0.0
    asks = fit_load.mixed(rng, 40, LONGEST)
    timed += [(start + at, ask) for ask, at in zip(asks, fit_load.moments(rng, 40, 1.0), strict=True)]
    return [
        Seen(
            Job(f"r{n}", len(ask.prompt), ask.answer, block_hashes(pack(ask.prompt), SMOLLM2_CPU.block_size)), at, 1, 1
        )
        for n, (at, ask) in enumerate(timed)
    ]


def seen_by(engine: EngineConfig, asked: list[Seen]) -> list[Seen]:
    return [
        replace(each, first_s=times.first_s, whole_s=times.whole_s)
        for each, times in zip(asked, played(engine, asked), strict=True)
    ]


def test_the_times_of_an_engine_are_found_from_its_answers() -> None:
    seen = seen_by(TRUTH, requests(1, apart=True))
    assert loss(TRUTH, seen) == 0 and loss(SMOLLM2_CPU, seen) > 0.4
    found = replace(TRUTH, timing=fitted(SMOLLM2_CPU, seen, evaluations=150))
    other = seen_by(TRUTH, requests(2, apart=False))
    assert loss(found, other) < 0.15


def test_one_stray_request_does_not_spoil_the_fit() -> None:
    seen = seen_by(TRUTH, requests(1, apart=True))
    strayed = [replace(seen[0], first_s=60.0, whole_s=60.0), *seen[1:]]
    found = replace(TRUTH, timing=fitted(SMOLLM2_CPU, strayed, evaluations=150))
    assert loss(found, seen_by(TRUTH, requests(2, apart=False))) < 0.2


def test_a_constant_that_one_search_lost_is_looked_for_again_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[fitting.Point] = []

    def loses_the_decoding(_cost: object, start: fitting.Point, _spread: float, _evaluations: int) -> fitting.Point:
        starts.append(start)
        return tuple(value - 15 * (name == "decode_s") for name, value in zip(fitting.FITTED, start, strict=True))

    monkeypatch.setattr(fitting, "least", loses_the_decoding)
    fitted(SMOLLM2_CPU, seen_by(TRUTH, requests(2, apart=False)))
    place = fitting.FITTED.index("decode_s")
    first, second, *_ = starts
    assert math.exp(second[place] - first[place]) == pytest.approx(fitting.AGAIN)
    assert second[:place] == pytest.approx(first[:place]) and second[place + 1 :] == pytest.approx(first[place + 1 :])


def test_the_simplex_finds_the_bottom_of_a_bent_valley() -> None:
    x, y = least(lambda p: 100 * (p[1] - p[0] ** 2) ** 2 + (1 - p[0]) ** 2, (-1.2, 1.0), 0.5, 400)
    assert x == pytest.approx(1.0, abs=1e-2) and y == pytest.approx(1.0, abs=1e-2)


def test_prompts_that_share_a_document_are_known_to_be_cached() -> None:
    one, two = fit_load.Ask((1,) * 300, 1), fit_load.Ask((1,) * 300 + (2,) * 100, 1)
    assert fit_load.fresh_tokens([one, two, one], 128) == [(0, 300), (256, 144), (256, 44)]


def test_the_load_is_within_its_limits_and_the_same_for_the_same_seed() -> None:
    asks = fit_load.mixed(random.Random(4), 200, LONGEST)
    assert asks == fit_load.mixed(random.Random(4), 200, LONGEST)
    assert all(fit_load.SHORT <= len(ask.prompt) <= LONGEST for ask in asks)
    cached = sum(cached for cached, _ in fit_load.fresh_tokens(asks, 128))
    assert 0.15 < cached / sum(len(ask.prompt) for ask in asks) < 0.7
