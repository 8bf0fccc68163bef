"""A node with a few places that is asked for too much, in virtual time."""

from __future__ import annotations

import pytest
from benches.overload_sim import USUAL_S, Request, Service, overloaded, quantile, stepped, within

from node.forecast import SHARE


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("times", [1.5, 3.0])
def test_in_lasting_overload_nobody_that_is_taken_in_waits_long_and_no_place_is_empty(times: float, seed: int) -> None:
    service = overloaded(times, seconds=120.0, seed=seed)
    service.run()
    steady = [request for request in within(service, 20.0, 120.0) if request.waited is not None]
    waits = [request.waited or 0.0 for request in steady]
    assert quantile(waits, 0.5) <= 3 * SHARE * USUAL_S
    assert quantile(waits, 0.99) <= 2 * USUAL_S
    assert len(steady) >= 0.95 * 100.0 * service.capacity


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_is_refused_and_comes_back_as_told_is_served(seed: int) -> None:
    """Overload that `MAX_AFTER_S` can outlast: all of them, while it still goes on."""
    service = overloaded(3.0, seconds=100.0, seed=seed)
    service.run()
    again = [request for request in service.requests if request.again]
    assert len(again) > 1000
    assert sum(request.waited is not None for request in again) >= 0.99 * len(again)


def test_a_modest_client_is_served_at_once_whatever_the_others_ask_for() -> None:
    service = overloaded(3.0, seconds=120.0)
    service.offer("modest", 0.05 * service.capacity, 0.0, 120.0)
    service.run()
    mine = [request for request in within(service, 20.0, 120.0) if request.client == "modest" and not request.again]
    others = [request for request in within(service, 20.0, 120.0) if request.client == "1" and not request.again]
    assert sum(request.refused is not None for request in mine) <= 0.05 * len(mine)
    assert sum(request.refused is not None for request in others) >= 0.6 * len(others)


def test_a_burst_waits_and_is_served_whole() -> None:
    service = Service()
    for number in range(200):
        service.at(0.001 * number, lambda: service.come(Request("burst", service.now, service.rng.getrandbits(64))))
    service.run()
    assert all(request.waited is not None for request in service.requests)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_usual_load_is_hardly_ever_refused(seed: int) -> None:
    service = overloaded(0.7, seconds=300.0, seed=seed)
    service.run()
    refused = sum(request.refused is not None for request in service.requests)
    assert refused <= 0.01 * len(service.requests)


def test_when_those_who_were_refused_have_come_back_everybody_is_taken_in_again() -> None:
    service = overloaded(3.0, seconds=30.0)
    for number in range(8):
        service.offer(str(number), 0.3 * service.capacity / 8, 30.0, 200.0)
    service.run()
    assert not [request for request in within(service, 150.0, 200.0) if request.refused is not None]


def test_lines_of_several_entries_are_as_short_though_each_moved_faster_before_all_stood() -> None:
    """At usual load a line has the places of all nodes: what it learnt then must not book for when all lines stand."""
    usual: list[float] = []
    thrice: list[float] = []
    for seed in (1, 4, 8):
        service = stepped((1.0, 3.0), seconds=40.0, rest_s=5.0, seed=seed, places=4, entries=4)
        service.run()
        for start, took in ((15.0, usual), (60.0, thrice)):
            took += [r.waited + r.took for r in within(service, start, start + 25.0) if r.waited is not None]
    assert quantile(thrice, 0.99) <= 1.5 * quantile(usual, 0.99)


def test_who_comes_while_more_come_than_can_be_served_waits_a_few_usual_times_at_most() -> None:
    service = overloaded(3.0, seconds=20.0)
    service.run()
    assert quantile([request.waited for request in service.requests if request.waited is not None], 0.99) <= 8 * USUAL_S
