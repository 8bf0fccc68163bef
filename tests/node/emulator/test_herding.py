"""The queueing model of the bench `herd`: the true order of the policies, and its books."""

from __future__ import annotations

from statistics import mean

from benches.herding import Herd, Placing, Setting, live_best_of_two, ours, stale_least_loaded

SMALL = Setting(requests=3000)


SEEDS = range(1, 5)


def mean_wait(placing: Placing) -> float:
    """Over several runs: in a short one a single burst can be most of all waiting."""
    waits = []
    for seed in SEEDS:
        herd = Herd(SMALL, placing, seed=seed)
        waits.append(herd.run()[0])
        for peer in herd.peers:
            peer.roster.sends.validate()
            peer.meter.validate()
            assert peer.running <= SMALL.slots and peer.meter.active == peer.active
    return mean(waits)


def test_live_probes_beat_stale_vectors_and_ours_stays_near_live_probes() -> None:
    live, stale, mine = (mean_wait(placing) for placing in (live_best_of_two, stale_least_loaded, ours))
    assert stale > 5 * live
    assert mine < 1.5 * live
