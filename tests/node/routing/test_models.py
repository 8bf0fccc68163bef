from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import LocalError, RemoteError
from node.models import MAX_KEY_BYTES, MAX_VALUE_BYTES, ModelInfo, catalogue, decode, union

TEXT = st.text(alphabet="abcé/-.", max_size=60)
INFOS = st.builds(
    ModelInfo,
    id=TEXT.filter(bool),
    kind=st.sampled_from(["base", "adapter"]),
    max_model_len=st.integers(0, 1 << 20),
    root=TEXT,
    parent=TEXT,
    revision=TEXT,
    block_size=st.integers(0, 1024),
    kv_token_bytes=st.integers(0, 1 << 30),
    fingerprint=st.binary(max_size=16),
    kv_tokens=st.integers(0, 1 << 30),
    created=st.integers(0, 1 << 31),
)


@given(INFOS)
def test_a_record_comes_back_as_it_was_and_fits_slow_state(info: ModelInfo) -> None:
    packed = info.encode()
    assert decode(packed) == info
    assert len(packed) <= MAX_VALUE_BYTES and len(info.key) <= MAX_KEY_BYTES
    assert catalogue({info.key: packed}) == {info.id: info}


@given(st.binary(max_size=100))
def test_any_bytes_are_a_record_or_a_remote_error(data: bytes) -> None:
    with suppress(RemoteError):
        decode(data)


def test_long_names_keep_distinct_keys() -> None:
    one, two = (ModelInfo("x" * 100 + end) for end in "ab")
    assert one.key != two.key and len(one.key) <= MAX_KEY_BYTES


def test_names_that_cannot_be_published_are_our_own_fault() -> None:
    for name in ("", "x" * 300):
        with pytest.raises(LocalError):
            ModelInfo(name).encode()
    assert len(ModelInfo("m", root="/very/long" * 100).encode()) <= MAX_VALUE_BYTES


def test_a_catalogue_leaves_out_what_it_cannot_read_or_what_lies_under_the_wrong_key() -> None:
    good = ModelInfo("good")
    slow = {good.key: good.encode(), b"model/bad": b"\xc1", b"model/other": good.encode(), b"prefix/1": b""}
    assert catalogue(slow) == {"good": good}


def test_the_union_shows_every_model_once_with_its_longest_context() -> None:
    shown = union(
        [
            {"m": ModelInfo("m", max_model_len=4096)},
            {"m": ModelInfo("m", max_model_len=8192), "a": ModelInfo("a", kind="adapter", parent="m", root="/lora")},
        ]
    )
    data = shown["data"]
    assert isinstance(data, list)
    assert [(card["id"], card["max_model_len"], card["parent"]) for card in data] == [
        ("a", None, "m"),
        ("m", 8192, None),
    ]
    assert shown["object"] == "list" and all(card["object"] == "model" for card in data)
