from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.peerprefix import PeerPrefixes

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["learn", "learn", "promise", "forget", "drop", "replace"]),
        st.sampled_from("abcde"),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(STEPS, st.lists(st.integers(0, 9), max_size=10, unique=True))
def test_it_answers_as_a_set_per_node_would(steps: list[tuple[str, str, int]], chunks: list[int]) -> None:
    index = PeerPrefixes()
    naive: dict[str, set[int]] = {}
    promised: set[tuple[str, int]] = set()
    for action, name, chunk in steps:
        promised -= {(name, one) for one in range(10) if action in ("drop", "replace") or one == chunk}
        if action in ("learn", "promise"):
            index.learn(name, chunk, promised=action == "promise")
            naive.setdefault(name, set()).add(chunk)
            if action == "promise":
                promised.add((name, chunk))
        elif action == "forget":
            index.forget(name, chunk)
            naive.get(name, set()).discard(chunk)
        elif action == "drop":
            index.drop(name)
            naive.pop(name, None)
        else:
            index.replace(name, range(chunk))
            naive[name] = set(range(chunk))
        index.validate()
    assert index.longest(chunks) == _prefixes(naive, chunks)
    assert len(index) == sum(map(len, naive.values()))
    assert index.promised == len({chunk for _, chunk in promised})
    computed = {name: {chunk for chunk in own if (name, chunk) not in promised} for name, own in naive.items()}
    given_now = index.given(chunks)
    assert (index.longest(chunks) if given_now is None else given_now) == _prefixes(computed, chunks)


def _prefixes(naive: Mapping[str, set[int]], chunks: Sequence[int]) -> dict[str, int]:
    counts = {
        name: next((i for i, chunk in enumerate(chunks) if chunk not in own), len(chunks))
        for name, own in naive.items()
    }
    return {name: count for name, count in counts.items() if count}


def test_what_is_only_promised_cannot_be_given() -> None:
    index = PeerPrefixes()
    for chunk in range(1, 7):
        index.learn("a", chunk, promised=chunk > 4)
    chunks = range(1, 9)
    assert index.longest(chunks) == {"a": 6} and index.given(chunks) == {"a": 4}
    index.learn("a", 5)
    assert index.given(chunks) == {"a": 5}
    index.learn("a", 6)
    assert index.given(chunks) is None and index.longest(chunks) == {"a": 6}


def test_what_lies_behind_a_promise_cannot_be_given_either() -> None:
    """A chunk in the middle was lost and comes again: what is behind it is held, and of no use yet."""
    index = PeerPrefixes()
    for chunk in range(8):
        index.learn("a", chunk, promised=chunk == 2)
        index.learn("b", chunk)
    assert index.longest(range(8)) == {"a": 8, "b": 8} and index.given(range(8)) == {"a": 2, "b": 8}


def test_a_gap_in_the_middle_ends_the_match() -> None:
    index = PeerPrefixes()
    index.replace("a", [1, 2, 4, 5, 6, 7, 8])
    index.replace("b", [1, 2, 3])
    index.replace("c", [2, 3, 4])
    assert index.longest([1, 2, 3, 4, 5, 6, 7, 8]) == {"a": 2, "b": 3}
    assert index.longest([]) == {} and index.longest([99]) == {}


def test_a_node_keeps_its_newest_chunks() -> None:
    index = PeerPrefixes(max_per_node=3)
    index.replace("a", [1, 2, 3, 4])
    index.validate()
    assert index.count("a") == 3 and index.longest([1]) == {} and index.longest([4]) == {"a": 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400)), max_size=300))
def test_the_whole_is_bounded(pairs: list[tuple[str, int]]) -> None:
    index = PeerPrefixes(max_per_node=50, max_pairs=80)
    for name, chunk in pairs:
        index.learn(name, chunk)
        assert index.longest([chunk]).get(name) == 1
        index.validate()


@pytest.mark.parametrize(("promised", "most"), [(False, 220), (True, 300)])
def test_what_is_forgotten_leaves_no_memory_behind(promised: bool, most: int) -> None:
    """Filled five times over its limit, by two hundred nodes: bytes a pair."""
    pairs, rng = 1 << 14, random.Random(5)
    tracemalloc.start()
    try:
        index = PeerPrefixes(max_pairs=pairs)
        for number in range(5 * pairs):
            index.learn(f"n{number % 200}", rng.getrandbits(64), promised=promised)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pairs - 64 <= len(index) <= pairs
    assert held / len(index) < most


def test_when_full_the_largest_gives_way() -> None:
    index = PeerPrefixes(max_pairs=100)
    index.replace("big", range(99))
    index.learn("small", 1)
    index.learn("small", 2)
    assert index.count("small") == 2 and index.count("big") == 99 - 64


def test_a_lookup_costs_the_same_with_a_thousand_nodes() -> None:
    index = PeerPrefixes()
    chunks = list(range(430))  # 220 KB
    for number in range(1000):
        index.replace(f"n{number}", chunks[: 430 if number % 100 == 0 else number % 7])
    start = time.perf_counter()
    matched = index.longest(chunks)
    assert time.perf_counter() - start < 0.02
    assert sum(1 for count in matched.values() if count == 430) == 10
