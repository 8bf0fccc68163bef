"""The paged cache against a model that is too simple to be wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.emulator.cache import BlockCache


def fill(cache: BlockCache, keys: list[int]) -> None:
    assert cache.allocate(len(keys))
    for key in keys:
        assert cache.publish(key)
    cache.release(keys, 0)


def test_the_block_idle_for_longest_goes_first_and_a_prefix_shrinks_from_its_end() -> None:
    cache = BlockCache(4)
    fill(cache, [1, 2, 3])
    assert cache.allocate(2)
    assert cache.take_evicted() == [3]
    assert cache.match([1, 2, 3], 3) == 2
    cache.acquire([1])
    assert not cache.allocate(2)
    assert cache.allocate(1)
    assert cache.take_evicted() == [2]
    assert cache.available == 0 and cache.use == 1.0
    cache.validate()


def test_a_block_in_use_is_never_evicted_and_counts_its_users() -> None:
    cache = BlockCache(2)
    fill(cache, [1])
    cache.acquire([1])
    cache.acquire([1])
    cache.release([1], 0)
    assert not cache.allocate(2) and 1 in cache
    cache.release([1], 0)
    assert cache.allocate(2) and 1 not in cache


def test_what_comes_from_outside_evicts_others_but_not_its_own_beginning() -> None:
    cache = BlockCache(4)
    fill(cache, [1, 2])
    fill(cache, [8, 9])
    cache.insert([1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], 4) == 4
    assert sorted(cache.take_evicted()) == [8, 9]
    cache.insert([1, 2, 3, 4, 5])
    assert 5 not in cache
    cache.validate()


@given(
    st.lists(st.tuples(st.sampled_from(["use", "insert", "clear"]), st.integers(0, 9), st.integers(1, 5)), max_size=60)
)
def test_no_block_is_lost_or_made(events: list[tuple[str, int, int]]) -> None:
    cache = BlockCache(8)
    for kind, first, count in events:
        keys = [first * 10 + index for index in range(count)]
        if kind == "insert":
            cache.insert(keys)
        elif kind == "clear":
            cache.clear()
        else:
            held = cache.match(keys, count)
            cache.acquire(keys[:held])
            assert cache.allocate(count - held)
            fresh = [key for key in keys[held:] if cache.publish(key)]
            cache.validate()
            cache.release(keys[:held] + fresh, count - held - len(fresh))
        cache.validate()
        cache.take_evicted()
