from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate import messages, wire
from kvmigrate.errors import RemoteError

HASH = st.binary(min_size=32, max_size=32)
DIGEST = st.binary(min_size=16, max_size=16)
RANK = st.integers(0, 63)
NONCE = st.binary(min_size=16, max_size=16)
PROOF = st.one_of(st.just(b""), st.binary(min_size=32, max_size=32))
TEXT = st.text(max_size=64)
KEYS = st.lists(st.builds(messages.Key, HASH, RANK), max_size=20).map(tuple)
LABELS = st.lists(
    st.builds(messages.Label, st.integers(0, 2**64 - 1), st.just(3), st.integers(0, 3), st.integers(0, 1 << 16)),
    max_size=9,
)
CHAINS = st.builds(messages.Chain, st.lists(HASH, min_size=3, max_size=20).map(tuple), LABELS.map(tuple))
MESSAGES = st.one_of(
    st.builds(messages.Hello, st.integers(0, 255), TEXT, TEXT, NONCE),
    st.builds(messages.Challenge, NONCE, PROOF),
    st.builds(messages.Proof, PROOF),
    st.just(messages.Welcome()),
    st.builds(
        messages.Lookup,
        DIGEST,
        st.integers(0, 64),
        st.lists(st.integers(0, 2**64 - 1), max_size=30).map(tuple),
        st.text(max_size=128),
    ),
    st.builds(
        messages.Manifest,
        TEXT,
        st.integers(0, 2**64 - 1),
        st.lists(st.builds(messages.Entry, HASH, RANK, st.integers(1, 1 << 28), DIGEST), max_size=20).map(tuple),
    ),
    st.builds(messages.Fetch, KEYS),
    st.builds(messages.Pin, KEYS),
    st.builds(
        messages.Pinned,
        st.lists(st.builds(messages.Place, st.integers(0, (1 << 20) - 1), st.integers(0, 2**64 - 1)), max_size=20).map(
            tuple
        ),
    ),
    st.just(messages.Unpin()),
    st.builds(messages.Find, DIGEST, st.integers(0, 64), st.lists(HASH, max_size=20).map(tuple)),
    st.builds(messages.Hot, st.integers(0, messages.MAX_ENTRIES)),
    st.builds(messages.Chains, st.lists(CHAINS, max_size=4).map(tuple)),
    st.builds(
        messages.Unlike,
        st.lists(st.tuples(TEXT, st.integers(0, 2**64 - 1) | st.text(max_size=256)), max_size=20).map(tuple),
    ),
    st.builds(messages.BlockHeader, st.integers(0, 1023), st.integers(1, 1 << 28), DIGEST),
    st.builds(messages.Miss, st.integers(0, 1023)),
    st.builds(messages.Corrupt, KEYS),
    st.just(messages.Busy()),
    st.builds(messages.Error, TEXT, TEXT),
)


def decode(frame: bytes) -> messages.Message:
    prefix = wire.read_prefix(frame[: wire.PREFIX_BYTES])
    body = frame[wire.PREFIX_BYTES :]
    assert len(body) == prefix.body
    return wire.decode(prefix, body)


def frame(kind: int, body: object) -> bytes:
    raw = msgpack.packb(body)
    return wire._prefix(wire.Kind(kind), 0, len(raw), bytes(16)) + raw


def entry(rank: int, nbytes: int) -> bytes:
    """A row of a manifest."""
    return bytes(32) + bytes([rank]) + nbytes.to_bytes(4, "big") + bytes(16)


@given(MESSAGES)
def test_every_message_comes_back_as_it_was_sent(message: messages.Message) -> None:
    assert decode(wire.encode(message)) == message


def test_the_largest_manifest_and_lookup_fit_a_frame() -> None:
    entry = messages.Entry(bytes(32), 63, 1 << 28, bytes(16))
    for message in (
        messages.Manifest("x" * 255, 2**64 - 1, (entry,) * messages.MAX_ENTRIES),
        messages.Lookup(bytes(16), 64, (2**64 - 1,) * messages.MAX_CHUNKS),
        messages.Fetch((messages.Key(bytes(32), 63),) * messages.MAX_FETCH),
        messages.Chains(
            (messages.Chain((bytes(32),) * 8192, (messages.Label(2**64 - 1, 8192, 8192, 1 << 16),) * 8192),)
        ),
    ):
        assert decode(wire.encode(message)) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_the_remote_kind_only(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        wire.read_prefix(data)
    for kind in wire.Kind:
        try:
            wire.decode(wire.Prefix(kind, 0, len(data), bytes(16)), data)
        except RemoteError:
            continue


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)


@given(st.sampled_from(wire.Kind), JUNK)
def test_well_formed_lies_raise_the_remote_kind_or_keep_the_limits(kind: wire.Kind, body: object) -> None:
    try:
        message = decode(frame(kind, body)) if kind is not wire.Kind.BLOCK else messages.Busy()
    except RemoteError:
        return
    assert decode(wire.encode(message)) == message


@given(MESSAGES, st.data())
def test_a_damaged_frame_raises_the_remote_kind_or_is_a_message(message: messages.Message, data: st.DataObject) -> None:
    raw = bytearray(wire.encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        prefix = wire.read_prefix(bytes(raw[: wire.PREFIX_BYTES]))
        wire.decode(prefix, bytes(raw[wire.PREFIX_BYTES :]))
    except RemoteError:
        return


@pytest.mark.parametrize(
    "raw",
    [
        frame(5, [bytes(16), 1, list(range(messages.MAX_CHUNKS + 1))]),
        frame(7, [bytes(33) * (messages.MAX_FETCH + 1)]),
        frame(7, [bytes(32)]),
        frame(7, [bytes(32) + b"\x40"]),
        frame(6, ["", 0, entry(0, (256 << 20) + 1)]),
        frame(6, ["", 0, entry(0, 0)]),
        frame(6, ["", 0, entry(64, 1)]),
        frame(6, ["", 0, entry(0, 1)[:-1]]),
        frame(6, ["x" * 256, 0, b""]),
        frame(6, ["", 2**64 - 1, entry(0, 1) * (messages.MAX_ENTRIES + 1)]),
        frame(17, [bytes(16), 1, [bytes(32)] * (messages.MAX_ENTRIES + 1)]),
        frame(18, [messages.MAX_ENTRIES + 1]),
        frame(19, [[[[], []]] * (messages.MAX_CHAINS + 1)]),
        frame(19, [[[[bytes(32)] * 5000, []]] * 2]),
        frame(19, [[[[bytes(32)], [[1, 2, 1, 1]]]]]),
        frame(19, [[[[bytes(32)], [[1, 1, 2, 1]]]]]),
        frame(14, [[[1 << 20, 2]]]),
        frame(14, [[[1, 2]] * (messages.MAX_FETCH + 1)]),
        frame(16, [[["name", "x" * 257]]]),
        frame(16, [[["name", 1]] * (messages.MAX_FIELDS + 1)]),
        frame(12, ["x" * 65, ""]),
        wire._prefix(wire.Kind.BLOCK, 0, 0, bytes(16)),
        wire._prefix(wire.Kind.BLOCK, messages.MAX_FETCH, 1, bytes(16)),
    ],
)
def test_what_is_over_a_limit_is_refused(raw: bytes) -> None:
    with pytest.raises(RemoteError):
        decode(raw)


@pytest.mark.parametrize(("kind", "length"), [(wire.Kind.BLOCK, (256 << 20) + 1), (wire.Kind.LOOKUP, (1 << 20) + 1)])
def test_a_giant_length_is_refused_before_anything_is_read(kind: wire.Kind, length: int) -> None:
    with pytest.raises(RemoteError, match="too large"):
        wire.read_prefix(wire._prefix(kind, 0, length, bytes(16)))


def test_other_protocols_and_versions_are_named() -> None:
    with pytest.raises(RemoteError, match="does not speak"):
        wire.read_prefix(b"GET / HTTP/1.1\r\nHost: grapevine!!"[:3] + b"\x01\x01" + bytes(27))
    with pytest.raises(RemoteError, match="version 9"):
        wire.read_prefix(b"GVK\x09\x01" + bytes(27))
