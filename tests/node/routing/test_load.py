from __future__ import annotations

import base64
import math
from contextlib import suppress
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import LocalError, RemoteError
from node.load import FULLY, GOAL_BYTES, LoadVector, decode
from node.plan import Plan, decode_plan
from node.prefill import PrefillTime

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
#: A peer's name and number at most, packed, and a little for the headers of the two maps.
LONGEST_ENTRY = 64 + 2 + 9 + 4
REAL = st.floats(0, 1e6, width=32)
VECTORS = st.builds(
    LoadVector,
    ready=st.booleans(),
    draining=st.booleans(),
    running=st.integers(0, 10_000),
    waiting=st.integers(0, 10_000),
    slots=st.integers(0, 10_000),
    queued_tokens=st.integers(0, 10_000_000),
    kv_use=st.floats(0, 1, width=32),
    queued_ms=REAL,
    samples=st.floats(0, 100, width=32),
    prefill=st.builds(PrefillTime, REAL, REAL, REAL),
    decode_tps=REAL,
    ttft_p50_ms=REAL,
    ttft_p95_ms=REAL,
    itl_p50_ms=REAL,
    itl_p95_ms=REAL,
    e2e_p50_ms=REAL,
    e2e_p95_ms=REAL,
    rtts=st.dictionaries(NAMES, REAL, max_size=4),
    rates=st.dictionaries(NAMES, REAL, max_size=4),
    copy_rate=REAL,
)


@given(VECTORS)
def test_a_vector_comes_back_as_it_was_but_for_peers_that_do_not_fit(vector: LoadVector) -> None:
    packed = vector.encode()
    back = decode(packed)
    assert replace(back, rtts=vector.rtts, rates=vector.rates) == vector
    for kept, told in ((back.rtts, vector.rtts), (back.rates, vector.rates)):
        assert list(kept.items()) == list(told.items())[: len(kept)]
    if len(packed) < GOAL_BYTES - LONGEST_ENTRY:
        assert back == vector


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 60))
def test_it_never_outgrows_its_limit_and_keeps_the_first_peers(rtts: int, rates: int, pad: int) -> None:
    names = [f"{i:03d}{'x' * pad}"[:64] for i in range(300)]
    vector = LoadVector(
        ready=True, rtts=dict.fromkeys(names[:rtts], 1.0), rates=dict.fromkeys(names[:rates], 2.0), queued_tokens=10**9
    )
    packed = vector.encode()
    assert len(packed) <= GOAL_BYTES
    back = decode(packed)
    assert list(back.rtts) == names[: len(back.rtts)] and list(back.rates) == names[: len(back.rates)]
    for kept, given_ in ((back.rtts, rtts), (back.rates, rates)):
        assert len(kept) == given_ or len(packed) > GOAL_BYTES - 2 * (pad + 12)


def test_a_vector_of_a_small_cluster_is_small() -> None:
    assert len(LoadVector(rtts={"n2": 1.0, "n3": 2.0}, rates={"n2": 1e9}).encode()) < 160


def test_a_bad_name_is_our_own_fault() -> None:
    with pytest.raises(LocalError):
        LoadVector(rtts={"a b": 1.0}).encode()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_vector_or_a_remote_error(data: bytes) -> None:
    with suppress(RemoteError):
        decode(data)


@given(VECTORS, st.data())
def test_a_damaged_vector_is_within_its_ranges_or_a_remote_error(vector: LoadVector, data: st.DataObject) -> None:
    packed = bytearray(vector.encode())
    for _ in range(3):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = decode(bytes(packed))
    except RemoteError:
        return
    assert 0 <= back.kv_use <= 1 and back.running >= 0 and math.isfinite(back.prefill_tps)
    assert all(math.isfinite(value) and value >= 0 for value in (*back.rtts.values(), *back.rates.values()))


@pytest.mark.parametrize(
    "change",
    [
        {"kv": 1.5}, {"kv": float("nan")}, {"pf": float("inf")}, {"pf": -1.0}, {"ru": -1}, {"ru": True}, {"ru": 1.5},
        {"pt": []}, {"pt": [1.0, 2.0]}, {"pt": [1.0, -2.0, 0.0]}, {"pt": [1.0, "x", 0.0]}, {"pt": {"a": 1.0}},
        {"pt": [1.0, float("nan"), 0.0]}, {"sa": -1.0}, {"qm": float("inf")},
        {"ru": 1 << 62}, {"ok": 1}, {"ok": None}, {"r": [1]}, {"r": {"a b": 1.0}}, {"r": {"a": "x"}}, {"r": {1: 1.0}},
        {"v": 0},
    ],
)  # fmt: skip
def test_nonsense_in_a_field_is_a_remote_error(change: dict[str, object]) -> None:
    fields = msgpack.unpackb(LoadVector(ready=True).encode())
    with pytest.raises(RemoteError):
        decode(msgpack.packb({**fields, **change}))


def test_a_newer_version_with_more_fields_is_read() -> None:
    fields = msgpack.unpackb(LoadVector(ready=True, running=3).encode())
    assert decode(msgpack.packb({**fields, "v": 2, "new": [1]})).running == 3


def test_a_row_of_an_older_version_is_read() -> None:
    """It has one rate for all lengths, no queue in milliseconds, and says nothing of samples."""
    fields = msgpack.unpackb(LoadVector(ready=True, queued_tokens=1500).encode())
    for key in ("qm", "sa", "pt"):
        fields.pop(key, None)
    old = decode(msgpack.packb({**fields, "pf": 500.0}))
    assert old.prefill == PrefillTime(0.0, 2.0, 0.0) and old.queued_ms == 3000.0 and old.samples == FULLY
    assert not decode(msgpack.packb({**fields, "pf": 0.0})).prefill.measured
    tiny = decode(msgpack.packb({**fields, "pf": 5e-324}))
    assert math.isfinite(tiny.queued_ms) and decode(tiny.encode()).queued_tokens == 1500


PLANS = st.builds(
    Plan,
    rid=st.text(alphabet="abc-123", max_size=36),
    model=st.text(alphabet="abc/ -é", min_size=1, max_size=60),
    entry=NAMES,
    target=NAMES,
    source=st.none() | NAMES,
    chunks=st.integers(0, 10_000),
    matched_tokens=st.integers(0, 1_000_000),
    prompt_tokens=st.integers(0, 1_000_000),
    reason=st.text(alphabet="abc 12", max_size=60),
    policy=st.sampled_from(["cost", "round_robin"]),
    hops=st.integers(0, 4),
    visited=st.lists(NAMES, max_size=8).map(tuple),
    deadline_s=st.floats(0, 1000, width=32),
    patience_ms=st.floats(0, 1000, width=32),
)


@given(PLANS)
def test_a_plan_comes_back_as_it_was_and_fits_a_header(plan: Plan) -> None:
    header = plan.header()
    assert decode_plan(header) == plan
    assert len(header) <= 4096 and header.isascii() and "\n" not in header


@given(st.text(max_size=100) | st.binary(max_size=60).map(lambda data: base64.b64encode(data).decode()))
def test_any_header_is_a_plan_or_a_remote_error(header: str) -> None:
    with suppress(RemoteError):
        decode_plan(header)


@pytest.mark.parametrize(
    "change", [{"t": ""}, {"t": "a b"}, {"e": None}, {"s": "../x"}, {"x": ["a"] * 9}, {"x": "abc"}, {"h": 5}, {"h": -1},
               {"d": float("inf")}, {"c": -1}, {"i": "x" * 200}, {"i": "a\r\nb"}, {"w": "a\nb"}, {"m": "x" * 300}]
)  # fmt: skip
def test_nonsense_in_a_plan_is_a_remote_error(change: dict[str, object]) -> None:
    plan = Plan(rid="r", model="m", entry="a", target="b")
    fields = msgpack.unpackb(base64.b64decode(plan.header()))
    with pytest.raises(RemoteError):
        decode_plan(base64.b64encode(msgpack.packb({**fields, **change})).decode())
    with pytest.raises(RemoteError):
        decode_plan("A" * 5000)
