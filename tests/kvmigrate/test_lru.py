from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from benches import traces
from benches.eviction import PlainLru, hit_ratio
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.lru import SegmentedLru


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def request(lru: SegmentedLru, blocks: Sequence[bytes], capacity: int) -> None:
    """What the pool does with a prompt's blocks."""
    for block in blocks:
        if block not in lru:
            while len(lru) >= capacity:
                victim = lru.victim(())
                assert victim is not None
                lru.remove(victim)
                lru.give_up(victim)
            lru.add(block)
    for block in reversed(blocks):
        if block in lru:
            lru.use(block)


@given(st.integers(1, 40), st.integers(2, 60), st.randoms(use_true_random=False))
def test_a_scan_of_one_off_prompts_leaves_what_was_used_twice(hot: int, capacity: int, rng: random.Random) -> None:
    lru = SegmentedLru(capacity)
    kept = keys(*(f"h{n}" for n in range(min(hot, capacity // 2))))
    for _ in range(2):
        request(lru, kept, capacity)
    for n in range(10 * capacity):
        request(lru, [b"%d/%d" % (n, i) for i in range(rng.randrange(1, 4))], capacity)
    assert all(key in lru for key in kept)
    lru.validate(list(lru))


def test_what_comes_back_after_it_was_given_up_is_protected_at_once() -> None:
    lru = SegmentedLru(10)
    request(lru, keys("a"), 10)
    request(lru, [b"%d" % n for n in range(10)], 10)
    assert b"a" not in lru and lru.remembered == 1
    request(lru, keys("a"), 10)
    assert (lru.protected, lru.recalled, lru.remembered) == (1, 1, 1)
    request(lru, [b"x%d" % n for n in range(30)], 10)
    assert b"a" in lru


def test_the_memory_of_victims_is_bounded() -> None:
    lru = SegmentedLru(5)
    for n in range(100):
        request(lru, [b"%d" % n], 5)
        lru.validate(list(lru))
    assert lru.remembered == 5


def test_the_protected_segment_is_bounded_and_gives_back_its_oldest() -> None:
    lru = SegmentedLru(8)
    for n in range(8):
        lru.add(b"%d" % n)
        lru.use(b"%d" % n)
        lru.use(b"%d" % n)
    assert lru.protected == 4
    assert lru.victim(()) == b"0"
    lru.validate([b"%d" % n for n in range(8)])


def test_victims_that_are_kept_are_passed_over() -> None:
    lru = SegmentedLru(5)
    for key in keys("a", "b"):
        lru.add(key)
    assert lru.victim({b"a"}) == b"b"
    assert lru.victim({b"a", b"b"}) is None


def test_refresh_changes_the_order_and_counts_no_use() -> None:
    lru = SegmentedLru(5)
    for key in keys("a", "b"):
        lru.add(key)
    for _ in range(5):
        lru.refresh(b"a")
    assert list(lru) == keys("b", "a")
    assert lru.protected == 0 and lru.uses(b"a") == 0


def test_the_hottest_come_first_and_heads_before_tails() -> None:
    lru = SegmentedLru(10)
    request(lru, keys("a0", "a1"), 10)
    request(lru, keys("b0", "b1"), 10)
    request(lru, keys("a0", "a1"), 10)
    assert list(lru.hottest()) == keys("a0", "a1", "b0", "b1")
    assert [lru.uses(key) for key in keys("a0", "b0", "c")] == [2, 1, 0]


class _Chains:
    """The oracle of `hit_ratio`: plain LRU written once more, and hits counted as prefixes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()

    def play(self, arrivals: Iterable[traces.Arrival]) -> float:
        hits = blocks = 0
        for arrival in arrivals:
            for block in arrival.blocks:
                if block not in self.order:
                    break
                hits += 1
            blocks += len(arrival.blocks)
            for block in reversed(arrival.blocks):
                self.order.pop(block, None)
                self.order[block] = None
            while len(self.order) > self.capacity:
                self.order.popitem(last=False)
        return hits / blocks


def test_the_measure_of_hit_ratios_agrees_with_an_oracle() -> None:
    arrivals = traces.made_up(400, rate=1.0)
    for capacity in (50, 300, 2000):
        assert hit_ratio(arrivals, PlainLru(capacity)) == _Chains(capacity).play(arrivals)


def test_a_prefix_that_was_hot_gives_way_to_those_that_are_used_now() -> None:
    capacity = 40
    lru = SegmentedLru(capacity)
    hot = keys(*(f"h{n}" for n in range(8)))
    for _ in range(50):
        request(lru, hot, capacity)
    for n in range(40):  # conversations: each prompt comes twice
        for _ in range(2):
            request(lru, [b"%d/%d" % (n, i) for i in range(4)], capacity)
            lru.validate(list(lru))
    assert not any(key in lru for key in hot)


def test_what_was_hot_long_ago_ranks_below_what_is_hot_now_while_both_are_here() -> None:
    capacity = 40
    lru = SegmentedLru(capacity)
    before, now = keys("b0", "b1"), keys("n0", "n1")
    for _ in range(100):
        request(lru, before, capacity)
    for n in range(20 * capacity):  # a scan, which leaves both alone
        request(lru, [b"%d" % n], capacity)
        if n % 40 == 0:
            request(lru, now, capacity)
    assert all(key in lru for key in [*before, *now])
    assert lru.uses(b"b0") < lru.uses(b"n0") < 100
    assert lru.uses(b"b0") >= 2 and lru.uses(b"nobody") == 0
