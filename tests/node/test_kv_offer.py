"""Offers of KV blocks between nodes: what is sent is read, and nothing else is."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.layout import HASH_BYTES
from kvmigrate.messages import MAX_CHAINS, MAX_ENTRIES, Chain, Label
from kvmigrate.pool_types import Room
from kvmigrate.pull_types import Reason
from node.errors import RemoteError
from node.http.intake import SMALL_BODY_MIB
from node.kv_offer import MAX_OFFER, MAX_TAKEN, STEP_S, Offer, Taken, decode_offer, decode_taken

HASHES = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=4).map(tuple)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    hashes = draw(HASHES)
    ends = draw(st.lists(st.integers(0, len(hashes)), max_size=3))
    return Chain(hashes, tuple(Label(draw(st.integers(0, 2**64 - 1)), end, end, 9) for end in ends))


OFFERS = st.builds(
    lambda given, seconds: Offer(tuple(given), len(given) // 2, seconds),
    st.lists(chains(), max_size=3),
    st.floats(0, STEP_S, width=32),
)
TAKEN = st.builds(
    Taken,
    st.sampled_from(Reason),
    st.text(alphabet="abc é", max_size=20),
    st.integers(0, 9),
    st.integers(0, 1 << 40),
    st.lists(st.integers(0, MAX_ENTRIES), max_size=5),
    st.builds(Room, st.integers(0, 99), st.integers(0, 99)),
)


@given(OFFERS, TAKEN)
def test_what_is_sent_is_read(offer: Offer, taken: Taken) -> None:
    assert decode_offer(offer.encode()) == offer
    read = decode_taken(taken.encode())
    assert read.detail.replace("?", "é") == taken.detail or not taken.detail.isascii()
    assert (read.reason, read.blocks, read.nbytes, list(read.held)) == (
        taken.reason, taken.blocks, taken.nbytes, list(taken.held)
    )  # fmt: skip
    assert read.room == taken.room


@given(st.one_of(st.binary(max_size=200), st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**63) | st.floats() | st.text(max_size=4) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("csdwtnbhfk"), inner, max_size=6),
).map(msgpack.packb)))  # fmt: skip
def test_anything_else_raises_one_kind_of_error(data: bytes) -> None:
    for decode in (decode_offer, decode_taken):
        with contextlib.suppress(RemoteError):
            decode(data)


@given(OFFERS, st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_too(offer: Offer, place: int, byte: int) -> None:
    data = bytearray(offer.encode())
    data[place % len(data)] = byte
    with contextlib.suppress(RemoteError):
        decode_offer(bytes(data))


def test_the_largest_messages_fit() -> None:
    hashes = tuple(bytes([number % 256]) * HASH_BYTES for number in range(MAX_ENTRIES // MAX_CHAINS))
    labels = tuple(Label(2**64 - 1, len(hashes), len(hashes), 1 << 16) for _ in hashes)
    offer = Offer((Chain(hashes, labels),) * MAX_CHAINS, MAX_CHAINS)
    assert len(offer.encode()) <= MAX_OFFER <= SMALL_BODY_MIB << 20 and decode_offer(offer.encode()) == offer
    taken = Taken(Reason.FULL, "x" * 5000, 1, 1, [MAX_ENTRIES] * MAX_CHAINS, Room(1, 1))
    assert len(taken.encode()) <= MAX_TAKEN and len(decode_taken(taken.encode()).held) == MAX_CHAINS


@pytest.mark.parametrize("seconds", [-1.0, STEP_S + 1, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(RemoteError):
        decode_offer(Offer(seconds=seconds).encode())
