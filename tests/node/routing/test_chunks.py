from __future__ import annotations

import random
import time

import orjson
from hypothesis import given
from hypothesis import strategies as st

from node.chunks import CHUNK_BYTES, MAX_CHUNKS, chunk_hashes, chunk_seed
from node.prompt import parse_request

TEXT = st.binary(max_size=5 * CHUNK_BYTES)


@given(TEXT, TEXT)
def test_a_longer_text_begins_with_the_hashes_of_the_shorter(start: bytes, rest: bytes) -> None:
    whole = chunk_hashes(b"s", start + rest)
    part = chunk_hashes(b"s", start)
    assert whole[: len(part)] == part
    assert len(whole) == len(start + rest) // CHUNK_BYTES


@given(st.integers(0, 4 * CHUNK_BYTES - 1), st.integers(1, 255))
def test_one_changed_byte_changes_its_chunk_and_all_behind_it_and_none_before(place: int, change: int) -> None:
    text = bytes(range(256)) * (4 * CHUNK_BYTES // 256)
    other = bytearray(text)
    other[place] ^= change
    left, right = chunk_hashes(b"s", text), chunk_hashes(b"s", bytes(other))
    assert [a == b for a, b in zip(left, right, strict=True)] == [i < place // CHUNK_BYTES for i in range(4)]


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
def test_different_parts_never_give_the_same_seed(left: list[str], right: list[str]) -> None:
    assert (chunk_seed(*left) == chunk_seed(*right)) == (left == right)


def test_another_seed_shares_no_chunk() -> None:
    text = b"x" * 4096
    assert not set(chunk_hashes(b"a", text)) & set(chunk_hashes(b"b", text))


def test_equal_chunks_at_different_places_have_different_hashes() -> None:
    assert len(set(chunk_hashes(b"a", b"x" * 4096))) == 8


def test_the_number_of_chunks_is_bounded() -> None:
    assert len(chunk_hashes(b"", bytes((MAX_CHUNKS + 5) * CHUNK_BYTES))) == MAX_CHUNKS


def test_hashes_stay_what_they_are() -> None:
    """Nodes of different versions must agree: a change here is a change of the wire format."""
    text = bytes(range(256)) * 4
    assert chunk_hashes(chunk_seed("text", "m", ""), text) == [14335832173505955960, 5595469641984781655]


def test_a_prompt_of_220_kb_is_parsed_and_hashed_well_within_a_millisecond_or_two() -> None:
    words = random.Random(1).choices(["alpha ", "beta ", "gamma, ", "delta\n"], k=40_000)
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "".join(words)[:220_000]}]})
    times = []
    for _ in range(20):
        start = time.perf_counter()
        parse_request("/v1/chat/completions", body)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.002  # 0.3 ms on an idle core; the machine that runs this is shared
