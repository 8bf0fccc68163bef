"""Fixed stories of random faults; `scripts/sweep_gossip.py` runs as many others as there is time for."""

from __future__ import annotations

import pytest

from gossip.simulator.chaos import Chaos


@pytest.mark.parametrize("seed", range(1, 13))
def test_a_small_cluster_lives_through_everything_and_agrees_again(seed: int) -> None:
    outcome = Chaos(seed, size=3 + seed % 6, seconds=60.0).run()
    assert outcome.counts["restarts"] + outcome.counts.get("pauses", 0) > 3


@pytest.mark.parametrize("seed", [101, 102])
def test_a_larger_cluster_lives_through_everything_and_agrees_again(seed: int) -> None:
    outcome = Chaos(seed, size=30, seconds=30.0).run()
    assert outcome.counts["lost"] > 1000


def test_the_same_seed_is_the_same_story() -> None:
    assert Chaos(7, 5, 20.0).run() == Chaos(7, 5, 20.0).run()
