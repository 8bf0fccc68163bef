"""Who is asked for which blocks: properties over sources that are fast, slow, late, dead or silent, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmigrate.pull import LOOK_S, RUN_BYTES, RUN_S
from kvmigrate.split import GRACE_S, MIN_RUN_BYTES, Split

MB = 1 << 20
GB_S = 1e9
#: Runs that a source has under way, as over TCP.
DEPTH = 2


@dataclass(slots=True)
class Peer:
    """A source as it really is. `stops_at`: from then on no block comes; `dies_at`: that is known."""

    reach: int
    rate: float
    promised: float = 0.0
    joins_at: float = 0.0
    stops_at: float = math.inf
    dies_at: float = math.inf
    queue: deque[int] = field(default_factory=deque)
    alive: bool = True


class Pulled:
    """A pull of blocks of `size` bytes from these peers, until nothing more happens. Seconds since its start."""

    def __init__(self, size: int, peers: Sequence[Peer], left_s: float = math.inf) -> None:
        self.split = Split()
        self.size = size
        self.peers = peers
        self.left_s = left_s
        self.now = 0.0
        self.ended_at = math.inf
        self.came: list[int] = []  # numbers of blocks in the order in which they came, also twice
        self.beyond = 0  # most blocks that were here behind a hole
        self._events: list[tuple[float, int, int, str]] = []
        self._order = itertools.count()
        self.split.extend([size] * max(peer.reach for peer in peers))
        for number, peer in enumerate(peers):
            self._at(peer.joins_at, number, "join")
            if math.isfinite(peer.dies_at):
                self._at(peer.dies_at, number, "die")

    def run(self, limit_s: float = 1e4) -> Pulled:
        while self._events and not self.split.complete and not (self._begun and self.split.stuck):
            self.now, _, number, what = heapq.heappop(self._events)
            if self.now > min(limit_s, self.left_s):
                return self
            getattr(self, f"_{what}")(number, self.peers[number])
            self.split.validate()
            hole = self.split.hole
            self.beyond = max(self.beyond, sum(not self.split.wanted(n) for n in range(hole, len(self.split))))
        self.ended_at = self.now if self.split.complete else math.inf
        return self

    @property
    def _begun(self) -> bool:
        return not any(what == "join" for _, _, _, what in self._events)

    def _at(self, when: float, number: int, what: str) -> None:
        heapq.heappush(self._events, (when, next(self._order), number, what))

    def _join(self, number: int, peer: Peer) -> None:
        promised = peer.promised or peer.rate
        self.split.join(number, peer.reach, promised, most_bytes=RUN_BYTES, most_blocks=1024, most_s=RUN_S)
        self._look(number, peer)

    def _look(self, number: int, peer: Peer) -> None:
        """As a thread does: fill what it may have under way; without work look again a little later."""
        idle = not peer.queue
        while peer.alive and len(self.split._sources[number].runs) < DEPTH:
            run = self.split.take(number, self.now, self.left_s - self.now)
            if run is None:
                break
            peer.queue.extend(run)
        if peer.queue and idle:
            self._at(self.now + self.size / peer.rate, number, "block")
        elif not peer.queue and peer.alive:
            self._at(self.now + LOOK_S, number, "look")

    def _block(self, number: int, peer: Peer) -> None:
        if not peer.alive or self.now >= peer.stops_at:
            return
        place = peer.queue.popleft()
        self.came.append(place)
        if self.split.wanted(place):
            self.split.arrived(number, place, self.now)
        else:
            self.split.passed(number, place, self.now)
        if peer.queue:
            self._at(self.now + self.size / peer.rate, number, "block")
        self._look(number, peer)

    def _die(self, number: int, peer: Peer) -> None:
        peer.alive = False
        self.split.leave(number)


def best_s(size: int, peers: Sequence[Peer]) -> float:
    """The shortest time in which these could bring all: what only some reach is theirs alone."""
    most = max(peer.reach for peer in peers)
    lows = {0, *(peer.reach for peer in peers)} - {most}
    return max((most - low) * size / sum(peer.rate for peer in peers if peer.reach > low) for low in lows)


RATES = st.floats(0.05 * GB_S, 4 * GB_S)
SIZES = st.sampled_from([64 << 10, MB, 3 * MB, 16 * MB])


def peers_of(**more: st.SearchStrategy[float]) -> st.SearchStrategy[list[Peer]]:
    return st.lists(st.builds(Peer, reach=st.integers(1, 120), rate=RATES, **more), min_size=1, max_size=4)


@settings(max_examples=300)
@given(SIZES, peers_of())
def test_honest_sources_are_done_at_about_the_same_time(size: int, peers: list[Peer]) -> None:
    pulled = Pulled(size, peers).run()
    assert pulled.split.complete
    slowest = min(peer.rate for peer in peers)
    # what a source has under way in the end, and the moment in which one that has nothing to do looks again
    tail = DEPTH * max(MIN_RUN_BYTES, size) / slowest + 2 * LOOK_S
    # the first one takes its first runs before it knows of the others
    assert pulled.ended_at <= 1.15 * best_s(size, peers) + tail + DEPTH * RUN_S


@settings(max_examples=300)
@given(SIZES, peers_of(promised=RATES, stops_at=st.floats(0.0, 0.2) | st.just(math.inf)), st.data())
def test_whatever_they_do_all_that_somebody_gives_arrives(size: int, peers: list[Peer], data: st.DataObject) -> None:
    """Those that stop are known to be gone two seconds later, and one source never stops."""
    for peer in peers:
        peer.dies_at = peer.stops_at + 2.0
    sure = data.draw(st.sampled_from(peers))
    sure.stops_at = sure.dies_at = math.inf
    pulled = Pulled(size, peers).run()
    assert pulled.split.hole >= sure.reach
    assert not pulled.split.complete or sorted(set(pulled.came)) == list(range(len(pulled.split)))


@settings(max_examples=200)
@given(SIZES, st.integers(20, 120), st.lists(RATES, min_size=1, max_size=3), st.floats(0.0, 0.05))
def test_one_that_falls_silent_costs_a_moment_and_not_its_deadline(
    size: int, blocks: int, rates: list[float], stops_at: float
) -> None:
    good = [Peer(blocks, rate) for rate in rates]
    silent = Peer(blocks, max(rates), stops_at=stops_at)
    pulled = Pulled(size, [silent, *good]).run()
    alone = best_s(size, good)
    expected_s = DEPTH * max(RUN_BYTES, size) / silent.rate  # of what it was asked for
    tail = DEPTH * max(MIN_RUN_BYTES, size) / min(rates)
    assert pulled.ended_at <= 1.15 * alone + 2 * expected_s + GRACE_S + tail + 4 * LOOK_S


@settings(max_examples=200)
@given(SIZES, st.integers(20, 120), RATES, st.sampled_from([10.0, 100.0]))
def test_one_at_a_tenth_of_its_promised_rate_does_not_hold_up_the_others(
    size: int, blocks: int, rate: float, slower: float
) -> None:
    pulled = Pulled(size, [Peer(blocks, rate / slower, promised=rate), Peer(blocks, rate)]).run()
    alone = blocks * size / rate
    asked_s = DEPTH * max(RUN_BYTES, size) / rate  # of what the slow one was asked for before it was known
    assert pulled.ended_at <= 1.15 * alone + 3 * asked_s + GRACE_S + 4 * LOOK_S


@given(st.integers(40, 400), st.lists(st.floats(0.5 * GB_S, 2 * GB_S), min_size=2, max_size=4))
def test_what_is_behind_a_hole_is_never_more_than_what_is_under_way(blocks: int, rates: list[float]) -> None:
    pulled = Pulled(MB, [Peer(blocks, rate) for rate in rates]).run()
    # while the slowest brings a run of its own, the fastest goes on
    ahead = (max(rates) / min(rates) + 1) * DEPTH * RUN_BYTES // MB * len(rates)
    assert pulled.beyond <= ahead


@settings(max_examples=20)
@given(st.floats(0.2 * GB_S, GB_S))
def test_the_front_is_not_the_last_to_arrive_where_its_source_is_late(rate: float) -> None:
    blocks = int(0.6 * rate / MB)  # so many that the other one is busy for 0.6 s
    pulled = Pulled(MB, [Peer(blocks, rate, stops_at=0.0), Peer(blocks, rate)]).run()
    late_s = 2 * DEPTH * max(RUN_S, RUN_BYTES / rate) + GRACE_S
    assert pulled.beyond <= late_s * rate / MB + 2 * DEPTH * RUN_BYTES // MB


def test_what_only_one_reaches_is_begun_at_once_when_it_would_take_longest() -> None:
    """From the front on alone it would take 75 units of time."""
    pulled = Pulled(MB, [Peer(50, GB_S), Peer(100, GB_S)]).run()
    assert pulled.ended_at == pytest.approx(50 * MB / GB_S, rel=0.1)
    assert sorted(pulled.came) == list(range(100)), "nothing came twice"


def test_a_pull_that_cannot_end_in_time_goes_from_the_front() -> None:
    pulled = Pulled(MB, [Peer(1000, 0.1 * GB_S), Peer(500, 0.1 * GB_S)], left_s=1.0).run()
    arrived = len(set(pulled.came))
    assert pulled.split.hole >= arrived - 2 * DEPTH * RUN_BYTES // MB


def test_a_source_that_leaves_is_followed_at_the_block_where_it_stopped() -> None:
    split = Split()
    split.extend([MB] * 12)
    for number in (0, 1):
        split.join(number, 12, GB_S, most_bytes=4 * MB, most_blocks=1024)
    assert split.take(0, 0.0, 9.0) == range(3), "half of its half"
    assert split.take(1, 0.0, 9.0) == range(3, 5), "half of half of the rest"
    split.arrived(0, 0, 0.001)
    split.leave(0)
    assert split.take(1, 0.002, 9.0) == range(1, 3)
    assert split.taken_over == 2
    split.validate()


def test_blocks_that_nobody_else_reaches_are_nobodys_when_their_source_leaves() -> None:
    split = Split()
    split.extend([MB] * 10)
    split.join(0, 10, GB_S, most_bytes=4 * MB, most_blocks=1024)
    split.join(1, 3, GB_S, most_bytes=4 * MB, most_blocks=1024)
    split.leave(0)
    for place in split.take(1, 0.0, 9.0) or ():
        split.arrived(1, place, 0.001)
    assert (split.hole, split.stuck, split.complete) == (3, True, False)
    assert split.take(1, 0.002, 9.0) is None


def test_a_run_that_there_is_no_place_for_goes_to_others_and_is_no_takeover() -> None:
    split = Split()
    split.extend([MB] * 16)
    for number in (0, 1):
        split.join(number, 16, GB_S, most_bytes=8 * MB, most_blocks=1024)
    run = split.take(0, 0.0, 9.0)
    assert run == range(4)
    split.refuse(0, run[2:])
    split.validate()
    assert split.take(1, 0.0, 9.0) == range(2, 5)
    assert split.taken_over == 0


def test_what_is_here_already_is_not_asked_for() -> None:
    split = Split()
    split.extend([MB] * 4, [0, 2])
    split.join(0, 4, GB_S, most_bytes=8 * MB, most_blocks=1024)
    assert split.take(0, 0.0, 9.0) == range(1, 2)
    assert split.take(0, 0.0, 9.0) == range(3, 4)
    split.extend([MB] * 2, [5])
    assert split.missing_bytes == 3 * MB


@pytest.mark.parametrize("rate", [60e6, 131_305_725.0, 200e6, 400e6])
def test_who_has_only_the_front_takes_nothing_over_from_those_who_bring_the_rest(rate: float) -> None:
    pulled = Pulled(MB, [Peer(64, 50e6), Peer(64, 50e6), Peer(32, rate)]).run()
    # Two runs each are begun at the front; no block comes twice but the last ones.
    assert len(pulled.came) <= 64 + 2 * DEPTH
    assert pulled.ended_at < max(32 / 100e6, 64 / (100e6 + rate)) * MB + 3 * MB / 50e6


def test_what_nobody_could_relieve_is_overdue_in_its_turn() -> None:
    split = Split()
    split.extend([MB] * 16)
    split.join(0, 16, 100e6, most_bytes=8 * MB, most_blocks=1024)
    assert [split.take(0, 0.0, math.inf) for _ in range(2)] == [range(8), range(8, 16)]
    split.join(1, 8, GB_S, most_bytes=8 * MB, most_blocks=1024)
    while (run := split.take(1, 0.01, math.inf)) is not None:  # the front, from who needs ten times as long for it
        for place in run:
            split.arrived(1, place, 0.01)
    assert split.hole == 8
    assert not split.overdue(0.3) and split.overdue(0.5), "16 MB at 100 MB/s, twice that, and a moment"
    split.join(2, 16, GB_S, most_bytes=8 * MB, most_blocks=1024)
    taken = split.take(2, 0.5, math.inf)
    assert taken is not None and taken.start == 8
    split.validate()
