"""Network coordinates: the mathematics, what a remote can make of it, and a cluster on a map with known distances."""

from __future__ import annotations

import math
import random
import statistics
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip import RemoteError
from gossip.coordinate import (
    DIMENSIONS,
    ENCODED_BYTES,
    ERROR_MAX,
    HEIGHT_MIN_S,
    MAX_COMPONENT_S,
    MAX_RTT_S,
    Coordinate,
    Locator,
)
from gossip.messages import Ack, Place
from gossip.simulator import Simulator
from tests.gossip.lone import OTHER, Lone

MakeLone, MakeSim = Callable[..., Lone], Callable[..., Simulator]
components = st.floats(-MAX_COMPONENT_S, MAX_COMPONENT_S, width=32)
places = st.builds(
    Coordinate,
    st.tuples(*[components] * DIMENSIONS),
    st.floats(HEIGHT_MIN_S, MAX_COMPONENT_S),
    st.floats(0, ERROR_MAX),
    components,
)


def worst_errors(points: list[tuple[float, float]], rounds: int, access_s: float, seed: int = 1) -> list[float]:
    """Locate points of a plane (in seconds) from their true round trips; gives the relative error of each pair."""
    rng = random.Random(seed)
    locators = [Locator(random.Random(seed + i)) for i in range(len(points))]

    def true(i: int, j: int) -> float:
        return math.dist(points[i], points[j]) + 2 * access_s

    for _ in range(rounds):
        for i, locator in enumerate(locators):
            j = rng.choice([k for k in range(len(points)) if k != i])
            locator.measured(str(j), locators[j].place, true(i, j) * rng.uniform(0.95, 1.3))
    return [
        abs(locators[i].place.rtt_s(locators[j].place) - true(i, j)) / true(i, j)
        for i in range(len(points))
        for j in range(i)
    ]


def test_points_of_a_plane_are_found_from_their_distances() -> None:
    rng = random.Random(3)
    points = [(rng.uniform(0, 0.08), rng.uniform(0, 0.08)) for _ in range(25)]
    assert statistics.median(worst_errors(points, 300, 0.001)) < 0.15


def test_two_sites_behind_slow_lines_are_found_by_their_height() -> None:
    points = [(0.0, 0.0)] * 6 + [(0.05, 0.0)] * 6
    assert statistics.median(worst_errors(points, 300, 0.004)) < 0.25


@given(places)
def test_a_place_survives_its_encoding(place: Coordinate) -> None:
    data = place.encode()
    assert len(data) == ENCODED_BYTES == 44
    again = Coordinate.decode(data)
    assert again.vector == place.vector
    assert again.encode() == data


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_only_the_remote_kind(data: bytes) -> None:
    try:
        place = Coordinate.decode(data)
    except RemoteError:
        return
    assert place.is_sane


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 61.0])
@pytest.mark.parametrize("at", range(DIMENSIONS + 3))
def test_a_number_that_is_no_distance_is_refused_in_every_field(bad: float, at: int) -> None:
    values = [0.0] * DIMENSIONS + [0.001, 0.5, 0.0]
    values[at] = bad
    with pytest.raises(RemoteError):
        Coordinate.decode(struct.pack(">11f", *values))


@given(places, st.lists(st.tuples(places, st.floats(allow_nan=True)), max_size=30))
def test_no_peer_and_no_measurement_makes_our_own_place_unusable(start: Coordinate, story: list[object]) -> None:
    locator = Locator(random.Random(1))
    locator.place = start
    for number, (peer, rtt_s) in enumerate(story):  # type: ignore[misc]
        locator.measured(str(number % 3), peer, rtt_s)
        assert locator.place.is_sane
        Coordinate.decode(locator.place.encode())


def test_one_slow_answer_is_not_taken_for_a_distance() -> None:
    locator, peer = Locator(random.Random(1)), Coordinate(error=0.1)
    for _ in range(200):
        locator.measured("p", peer, 0.01)
    near = locator.place.rtt_s(peer)
    locator.measured("p", peer, MAX_RTT_S)
    assert locator.place.rtt_s(peer) == pytest.approx(near, rel=0.05)


def test_an_ack_brings_the_place_that_its_round_trip_is_measured_against(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    ((to, ping),) = [(to, p) for to, p in one.pings if p.target == "peer"]
    one.now += 0.004
    one.hear("peer", Place("peer", 1, 7, Coordinate(error=0.1).encode()), Ack(ping.seq, "peer"), source=to)
    assert one.endpoint.estimate_rtt_s("me", "peer") is not None
    own = one.endpoint.coordinates.of("me")
    assert own is not None
    assert own != Coordinate()


def test_a_place_is_kept_by_its_order_and_dies_with_its_member(lone: MakeLone) -> None:
    one = lone()
    one.meet()
    far, near = Coordinate((0.1,) + (0.0,) * 7, error=0.0), Coordinate(error=0.0)
    one.hear("peer", Place("peer", 1, 7, far.encode()))
    one.hear("peer", Place("peer", 1, 6, near.encode()))
    one.hear("peer", Place("peer", 2, 9, near.encode()), Place("ghost", 1, 1, near.encode()))
    one.hear("peer", Place("peer", 1, 8, b"short"))
    kept = one.endpoint.coordinates.of("peer")
    assert kept is not None
    assert kept.vector[0] == pytest.approx(0.1)
    assert one.endpoint.counters["refused"] == 1
    assert one.endpoint.estimate_rtt_s("me", "ghost") is None
    assert one.endpoint.estimate_rtt_s("peer", "peer") == 0.0
    member = one.endpoint.membership.get("peer")
    assert member is not None
    one.endpoint.membership.bury(member, one.now)
    assert one.endpoint.coordinates.of("peer") is None
    one.meet("other", OTHER)
    one.wait(2.0)
    assert {p.name for p in one.parts(Place, OTHER) if isinstance(p, Place)} == {"me"}, "nor is it passed on"


def test_a_datagram_carries_one_place_however_many_there_are(lone: MakeLone) -> None:
    one = lone()
    for n in range(2, 60):
        one.meet(f"p{n}", (f"10.0.1.{n}", 7946))
        one.hear(f"p{n}", Place(f"p{n}", 1, 1, Coordinate().encode()), source=(f"10.0.1.{n}", 7946))
    one.sent.clear()
    one.wait(1.0)
    carried = [sum(isinstance(p, Place) for p in packet.parts) for _, packet in one.sent]
    assert max(carried) == 1
    assert len({p.name for p in one.parts(Place) if isinstance(p, Place)}) > 8, "in turn"


def test_in_a_cluster_anybody_knows_how_far_any_two_others_are_apart(simulator: MakeSim) -> None:
    sim = simulator(seed=9, latency=(0.004, 0.006))
    sim.cluster(12)
    sim.run(60)
    estimates = [n.endpoint.estimate_rtt_s(a, b) for n in sim.running() for a in sim.nodes for b in sim.nodes if a < b]
    assert None not in estimates
    assert statistics.median(e for e in estimates if e is not None) == pytest.approx(0.010, rel=0.2)
