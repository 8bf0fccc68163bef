from __future__ import annotations

import contextlib
import typing

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.errors import RemoteError
from kvmigrate.layout import MAX_RANKS
from kvmigrate.link import MAX_FRAME_BYTES, FrameSplitter, Message, codec, decode, encode
from kvmigrate.link import messages as m

HASH = st.binary(min_size=32, max_size=32)
DIGEST = st.binary(min_size=16, max_size=16)
COUNT = st.integers(0, 2**63 - 1)
SLOT = st.integers(0, (1 << 20) - 1)
RANK = st.integers(0, MAX_RANKS - 1)
SIZE = st.integers(0, 256 << 20)
TEXT = st.text(max_size=50)
SECONDS = st.floats(0, 1e9)
SLOTS = st.lists(SLOT, max_size=20).map(tuple)
HASHES = st.lists(HASH, max_size=20).map(tuple)


def items(kind: type, *parts: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(st.builds(kind, *parts), max_size=10).map(tuple)


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        m.Hello,
        role=st.sampled_from(m.Role),
        rank=st.just(0),
        ranks=st.integers(1, MAX_RANKS),
        pid=COUNT,
        fingerprint=DIGEST,
        block_bytes=SIZE,
        block_size=COUNT,
        supported=st.booleans(),
        why=TEXT,
        fields=st.dictionaries(TEXT, TEXT | st.integers(-(2**63), 2**63 - 1), max_size=5),
    ),
    st.builds(m.Started, TEXT, COUNT, COUNT, COUNT),
    st.builds(m.Prefilled, TEXT, SECONDS),
    st.builds(m.Filled, TEXT, HASHES, COUNT),
    st.builds(m.Finished, TEXT),
    st.builds(m.Load, COUNT, COUNT, st.floats(0, 1)),
    st.just(m.Reset()),
    st.builds(m.Stored, items(m.StoredItem, SLOT, COUNT, HASH, RANK, SIZE, DIGEST)),
    st.builds(m.Want, SLOT),
    st.builds(m.Failed, SLOTS),
    st.builds(m.Loaded, TEXT, COUNT, COUNT, SECONDS),
    st.builds(m.Corrupt, SLOTS),
    st.builds(m.Pool, TEXT, COUNT, COUNT, SIZE, SLOT, RANK, TEXT),
    st.builds(m.Grant, items(m.SlotGrant, SLOT, COUNT)),
    st.builds(m.Clear, COUNT),
    st.builds(m.Add, items(m.AddItem, HASH, RANK, SLOT, COUNT)),
    st.builds(m.Drop, HASHES),
)


def framed(values: object) -> bytes:
    return msgpack.packb(values)


def test_every_message_type_has_a_name_and_a_decoder() -> None:
    kinds = set(typing.get_args(m.Message))
    assert set(codec._NAMES) == kinds
    assert set(codec._DECODERS) == set(codec._NAMES.values())


@given(st.lists(MESSAGES, max_size=5), st.data())
def test_messages_come_back_whatever_the_pieces_they_arrive_in(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    splitter, got, start = FrameSplitter(), [], 0
    while start < len(stream):
        end = data.draw(st.integers(start + 1, len(stream)))
        got += splitter.feed(stream[start:end])
        start = end
    assert got == sent


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_the_remote_kind_only(data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        FrameSplitter().feed(data)
    with contextlib.suppress(RemoteError):
        decode(data)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=40) | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(MESSAGES, st.data())
def test_a_field_replaced_by_anything_raises_the_remote_kind_or_gives_a_valid_message(
    message: Message, data: st.DataObject
) -> None:
    values = msgpack.unpackb(encode(message)[4:])
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(JUNK)
    try:
        decoded = decode(framed(values))
    except RemoteError:
        return
    assert decode(encode(decoded)[4:]) == decoded


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"t": "nonsense"},
        {"t": ["filled"]},
        ["t"],
        {"t": "filled", "rid": "r", "hashes": [bytes(31)], "tokens": 0},
        {"t": "filled", "rid": "r", "hashes": bytes(32), "tokens": 0},
        {"t": "filled", "rid": "r" * 5000, "hashes": [], "tokens": 0},
        {"t": "want", "n": True},
        {"t": "want", "n": -1},
        {"t": "prefilled", "rid": "r", "seconds": float("nan")},
        {"t": "stored", "items": [[0, 1, bytes(32), 0, 1]]},
        {"t": "grant", "slots": [[1 << 20, 1]]},
        {"t": "corrupt", "slots": [0] * (codec.MAX_ITEMS + 1)},
    ],
)
def test_what_breaks_a_rule_is_refused(values: object) -> None:
    with pytest.raises(RemoteError):
        decode(framed(values))


def test_a_giant_length_is_refused_before_anything_is_collected() -> None:
    with pytest.raises(RemoteError, match="limit"):
        FrameSplitter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(RemoteError, match="too large"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_the_longest_list_of_hashes_fits_a_frame_and_a_longer_message_is_our_error() -> None:
    longest = m.Filled("r", (bytes(32),) * codec.MAX_ITEMS, 1)
    assert decode(encode(longest)[4:]) == longest
    with pytest.raises(ValueError, match="limit"):
        encode(m.Filled("r", (bytes(32),) * (3 * codec.MAX_ITEMS), 1))


def test_a_rank_beyond_the_ranks_is_refused() -> None:
    hello = m.Hello(m.Role.WORKER, 2, 2, 1, bytes(16), 1, 1)
    with pytest.raises(RemoteError, match="rank"):
        decode(encode(hello)[4:])
