from __future__ import annotations

from kvmigrate.lru import SegmentedLru


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_a_scan_of_one_off_keys_leaves_the_keys_that_were_used_twice() -> None:
    lru = SegmentedLru(10)
    for hot in keys("h1", "h2", "h3"):
        lru.add(hot)
        lru.use(hot)
        lru.use(hot)
    for n in range(100):
        lru.add(b"%d" % n)
        lru.use(b"%d" % n)
        while len(lru) > 10:
            victim = lru.victim(())
            assert victim is not None
            lru.remove(victim)
    assert all(hot in lru for hot in keys("h1", "h2", "h3"))


def test_the_protected_segment_is_bounded_and_gives_back_its_oldest() -> None:
    lru = SegmentedLru(5)
    for n in range(5):
        lru.add(b"%d" % n)
        lru.use(b"%d" % n)
        lru.use(b"%d" % n)
    assert lru.protected == 4
    assert lru.victim(()) == b"0"
    lru.validate([b"%d" % n for n in range(5)])


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
    assert lru.protected == 0
