"""Gap-free under any order of partial, late and repeated deltas, whoever gives them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip import LocalError, RemoteError
from gossip.messages import SlowDelta
from gossip.slow_map import SlowMap

keys = st.sampled_from([bytes([65 + i]) for i in range(8)])
steps = st.one_of(
    st.tuples(st.just("put"), keys, st.binary(max_size=3)),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("collect"), st.integers(0, 3)),
    st.tuples(st.just("pull"), st.integers(0, 2), st.integers(0, 3), st.integers(20, 80)),
    st.tuples(st.just("replay"), st.integers(0, 2), st.integers(0, 30)),
)


class History:
    """Last change of every key at the owner, tombstones for ever: the truth that copies are held against."""

    def __init__(self) -> None:
        self.changes: dict[bytes, tuple[int, bytes | None]] = {}

    def check(self, copy: SlowMap) -> None:
        for key, (version, value) in self.changes.items():
            if version <= copy.version:
                assert copy.live.get(key) == value, f"{key!r} changed at {version}, copy is at {copy.version}"


@settings(max_examples=250, deadline=None)
@given(st.lists(steps, max_size=60))
def test_a_copy_agrees_with_the_owner_up_to_its_version(story: list[tuple[object, ...]]) -> None:
    owner, copies = SlowMap("o", 1), [SlowMap("o", 1) for _ in range(3)]
    history, givers = History(), [owner, *copies]
    log: list[SlowDelta] = []
    for step in story:
        match step:
            case ("put", bytes(key), bytes(value)):
                before = owner.version
                owner.put(key, value, 100)
                if owner.version > before:
                    history.changes[key] = (owner.version, value)
            case ("delete", bytes(key)):
                before = owner.version
                owner.delete(key, 0.0)
                if owner.version > before:
                    history.changes[key] = (owner.version, None)
            case ("collect", int(most)):
                owner.collect(0.0, 1e9, most)
            case ("pull", int(to), int(giver), int(size)):
                delta = givers[giver].delta(copies[to].version, copies[to].floor, size)
                log.append(delta)
                copies[to].apply(delta, 100, 100)
            case ("replay", int(to), int(index)) if log:
                copies[to].apply(log[index % len(log)], 100, 100)
        for one in givers:
            one.validate()
            history.check(one)
    for copy in copies:
        while copy.version < owner.version:
            assert copy.apply(owner.delta(copy.version, copy.floor, 60), 100, 100) is not None
        assert copy.live == owner.live


def test_the_changes_that_are_reported_rebuild_the_map() -> None:
    owner, copy, mirror = SlowMap("o", 1), SlowMap("o", 1), {}
    for i in range(200):
        owner.put(bytes([i % 50]), bytes([i]), 100)
        if i % 3 == 0:
            owner.delete(bytes([i % 50]), float(i))
        if i % 17 == 0:
            owner.collect(float(i), 10.0, 100)
        if i % 5 == 0:
            applied = copy.apply(owner.delta(copy.version, copy.floor, 100), 100, 100)
            if applied is not None:
                mirror = {} if applied.reset else mirror
                for key, value in applied.changes:
                    mirror.pop(key, None)
                    if value is not None:
                        mirror[key] = value
            assert mirror == copy.live


def test_a_delta_with_a_gap_is_not_applied() -> None:
    owner, copy = SlowMap("o", 1), SlowMap("o", 1)
    for i in range(4):
        owner.put(bytes([i]), b"", 100)
    assert copy.apply(owner.delta(2, 0, 1000), 100, 100) is None
    assert copy.version == 0


def test_a_copy_behind_collected_tombstones_begins_again_and_loses_the_deleted_key() -> None:
    owner, copy = SlowMap("o", 1), SlowMap("o", 1)
    owner.put(b"gone", b"", 100)
    copy.apply(owner.delta(0, 0, 1000), 100, 100)
    owner.delete(b"gone", 0.0)
    owner.put(b"kept", b"", 100)
    owner.collect(100.0, 60.0, 100)
    applied = copy.apply(owner.delta(copy.version, copy.floor, 1000), 100, 100)
    assert applied is not None
    assert applied.reset
    assert dict(copy.live) == {b"kept": b""}


def test_a_new_copy_of_a_map_with_collected_tombstones_is_read_in_chunks_without_starting_over() -> None:
    owner, copy = SlowMap("o", 1), SlowMap("o", 1)
    for i in range(300):
        owner.put(i.to_bytes(2, "big"), b"", 1000)
    for i in range(0, 300, 2):
        owner.delete(i.to_bytes(2, "big"), 0.0)
    owner.collect(100.0, 60.0, 1000)
    chunks = 0
    while copy.version < owner.version:
        applied = copy.apply(owner.delta(copy.version, copy.floor, 400), 1000, 1000)
        assert applied is not None
        assert not applied.reset
        chunks += 1
    assert chunks > 5
    assert copy.live == owner.live


def test_copies_drop_the_tombstones_that_the_owner_has_collected() -> None:
    owner, copy = SlowMap("o", 1), SlowMap("o", 1)
    for i in range(50):
        owner.put(bytes([i]), b"", 100)
        owner.delete(bytes([i]), float(i))
    copy.apply(owner.delta(0, 0, 10_000), 100, 100)
    assert copy.tombstones == 50
    owner.collect(30.0, 1.0, 100)
    owner.put(b"x", b"", 100)
    copy.apply(owner.delta(copy.version, copy.floor, 10_000), 100, 100)
    assert copy.tombstones == owner.tombstones == 20


def test_what_is_too_large_is_refused_loudly_and_changes_nothing() -> None:
    owner = SlowMap("o", 1)
    for key, value in ((b"", b""), (b"k" * 65, b""), (b"k", b"v" * 1025)):
        with pytest.raises(LocalError):
            owner.put(key, value, 100)
    owner.put(b"a", b"", 1)
    with pytest.raises(LocalError, match="1 keys already"):
        owner.put(b"b", b"", 1)
    owner.put(b"a", b"changed", 1)
    assert owner.version == 2


def test_an_owner_that_outgrows_the_caps_is_not_copied_further() -> None:
    owner, copy = SlowMap("o", 1), SlowMap("o", 1)
    for i in range(30):
        owner.put(bytes([i]), b"", 100)
    with pytest.raises(RemoteError):
        copy.apply(owner.delta(0, 0, 10_000), 10, 5)
    assert (copy.version, len(copy.live)) == (0, 0)


def test_the_same_value_again_is_no_change() -> None:
    owner = SlowMap("o", 1)
    owner.put(b"k", b"v", 10)
    owner.put(b"k", b"v", 10)
    owner.delete(b"unknown", 0.0)
    assert owner.version == 1
