"""Fuzz of the decoder and of the endpoint behind it: a remote can cause the remote kind of error and nothing else."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip import Endpoint, GossipConfig, Identity, MemberState, RemoteError, WrongClusterError
from gossip import actions as io
from gossip import messages as m
from gossip.decode import decode_packet, decode_row
from gossip.encode import PacketBuilder, encode_packet, encode_part, make_row
from gossip.framing import read_frame
from gossip.incarnation import first

names = st.sampled_from(["me", "peer", "other", "third", "a" * 64])
hosts = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "fe80::1"])
ports = st.sampled_from([7946, 7947])
incarnations = st.builds(lambda boot, step: first(boot) + step, st.integers(1, 4), st.integers(0, 2)) | st.integers(
    1, (1 << 60) - 1
)
seqs = st.integers(0, (1 << 32) - 1)
boots = st.integers(1, 4)
counters = st.integers(0, 40) | st.integers(0, (1 << 53) - 1)
blobs = st.binary(max_size=40)
states = st.sampled_from(list(MemberState))
rows = st.builds(make_row, names, boots, counters, blobs)
records = st.builds(m.MemberRecord, names, incarnations, hosts, ports, blobs, states, counters)


@st.composite
def deltas(draw: st.DrawFn) -> m.SlowDelta:
    base = draw(st.integers(0, 20))
    versions = sorted(draw(st.sets(st.integers(base + 1, base + 30), max_size=8)))
    upto = draw(st.integers(max([base, *versions]), base + 40))
    keys = st.binary(min_size=1, max_size=3)
    entries = tuple((draw(keys), draw(st.none() | blobs), version) for version in versions)
    latest, floor = draw(st.integers(upto, upto + 20)), draw(st.integers(0, 60))
    return m.SlowDelta(draw(names), draw(boots), base, upto, latest, floor, entries)


parts = st.one_of(
    st.builds(m.Ping, seqs, names),
    st.builds(m.Ack, seqs, names),
    st.builds(m.PingRequest, seqs, names, hosts, ports),
    st.builds(m.Nack, seqs),
    st.builds(m.Alive, names, incarnations, hosts, ports, blobs),
    st.builds(m.Suspect, names, incarnations, names),
    st.builds(m.Dead, names, incarnations, names),
    st.builds(m.Left, names, incarnations),
    st.lists(st.tuples(st.integers(0, (1 << 32) - 1), rows), max_size=4).map(
        lambda pairs: m.Rows(tuple(age for age, _ in pairs), tuple(row for _, row in pairs))
    ),
    st.builds(m.Place, names, boots, counters, st.binary(max_size=60)),
    st.builds(m.SlowDigest, st.lists(st.builds(m.SlowMark, names, boots, counters), max_size=4).map(tuple)),
    st.builds(m.SlowPull, names, boots, counters, counters),
    deltas(),
    st.builds(m.PushPull, st.lists(records, max_size=4).map(tuple)),
)
packets = st.builds(m.Packet, names, incarnations, st.lists(parts, max_size=5).map(tuple))


def never_but_remote(data: bytes) -> None:
    try:
        decode_packet(data, "test", 9000)
    except RemoteError:
        return


@settings(deadline=None)
@given(packets)
def test_what_is_encoded_is_decoded(packet: m.Packet) -> None:
    assert decode_packet(encode_packet("test", packet), "test", 1 << 20) == packet


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_the_remote_kind(data: bytes) -> None:
    never_but_remote(data)
    never_but_remote(b"\x01" + data)


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
trees = st.recursive(
    scalars, lambda t: st.lists(t, max_size=4) | st.dictionaries(st.text(max_size=3), t, max_size=1), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(trees, st.lists(st.tuples(st.integers(-1, 16), st.lists(trees, max_size=8)), max_size=3))
def test_arbitrary_structures_raise_only_the_remote_kind(tree: Any, items: list[tuple[int, list[Any]]]) -> None:
    never_but_remote(b"\x01" + msgpack.packb(tree))
    bodies: list[Any] = [msgpack.packb([kind, *fields]) for kind, fields in items]
    never_but_remote(b"\x01" + msgpack.packb(["test", "peer", 70000, bodies]))
    never_but_remote(b"\x01" + msgpack.packb(["test", "peer", 70000, [*bodies, tree]]))


@settings(max_examples=200, deadline=None)
@given(packets, st.data())
def test_damaged_packets_raise_only_the_remote_kind(packet: m.Packet, data: st.DataObject) -> None:
    raw = bytearray(encode_packet("test", packet))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    never_but_remote(bytes(raw))
    never_but_remote(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(packets, st.sampled_from([0.0, 0.1, 0.7, 5.0]), st.booleans()), max_size=25))
def test_no_sequence_of_well_formed_packets_breaks_an_invariant(story: list[tuple[m.Packet, float, bool]]) -> None:
    endpoint = Endpoint(Identity("me", "test", 2, "10.0.0.1", 7946), GossipConfig.lan(), random.Random(1))
    now = 10.0
    endpoint.handle(io.Started(), now)
    for number, (packet, pause, as_stream) in enumerate(story):
        frame = encode_packet("test", packet)
        event: io.Input = io.DatagramReceived(("10.0.0.2", 7946), frame)
        if as_stream:
            event = io.StreamRequested(number, ("10.0.0.2", 5000), frame)
        actions = endpoint.handle(event, now)
        for action in actions:
            if isinstance(action, io.OpenStream):
                actions += endpoint.handle(io.StreamReplied(action.session, frame), now)
        endpoint.validate()
        now += pause
        endpoint.handle_timeout(now)
        endpoint.validate()


@pytest.mark.parametrize(
    "part",
    [
        [1, 1 << 32, "peer"],
        [1, True, "peer"],
        [1, 1],
        [2, 1, "no spaces allowed"],
        [3, 1, "peer", "a.host.name", 1],
        [3, 1, "peer", "0.0.0.0", 1],
        [5, "peer", 0, "10.0.0.1", 1, b""],
        [5, "peer", 1 << 60, "10.0.0.1", 1, b""],
        [5, "peer", 1, "10.0.0.1", 70000, b""],
        [5, "peer", 1, "10.0.0.1", 1, b"x" * 513],
        [9, "peer", 1, 1, 0, b"x" * 1025],
        [11, "peer", 1, 5, 4, 9, 0, []],
        [11, "peer", 1, 0, 4, 4, 0, [b"k", b"v", 5]],
        [11, "peer", 1, 0, 4, 4, 0, [b"k", b"v", 2, b"l", b"v", 2]],
        [11, "peer", 1, 0, 4, 4, 0, [b"k" * 65, b"v", 2]],
        [13, [["peer", 1, "10.0.0.1", 1, b"", 4, 0]]],
    ],
)
def test_each_limit_of_a_field_is_enforced(part: list[Any]) -> None:
    with pytest.raises(RemoteError):
        decode_packet(b"\x01" + msgpack.packb(["test", "peer", 70000, [part]]), "test", 9000)


def test_another_label_and_another_version_are_refused_by_name() -> None:
    raw = encode_packet("other", m.Packet("peer", 1, ()))
    with pytest.raises(WrongClusterError):
        decode_packet(raw, "test", 9000)
    with pytest.raises(RemoteError, match="version 2"):
        decode_packet(b"\x02" + raw[1:], "other", 9000)
    with pytest.raises(RemoteError, match="too long"):
        decode_packet(raw, "other", len(raw) - 1)


def test_unknown_kinds_and_further_fields_of_a_later_version_are_skipped() -> None:
    parts = [msgpack.packb([99, "new"]), msgpack.packb([4, 7, "more"])]
    raw = b"\x01" + msgpack.packb(["test", "peer", 70000, parts, "later"])
    assert decode_packet(raw, "test", 9000).parts == (m.Nack(7),)


def test_a_builder_never_exceeds_its_budget() -> None:
    builder = PacketBuilder("c" * 64, "n" * 64, (1 << 60) - 1, 1400)
    row = encode_part(m.Rows(((1 << 32) - 1,), (make_row("n" * 64, (1 << 44) - 1, (1 << 53) - 1, b"x" * 1024),)))
    assert builder.add(row), "the largest row fits one datagram"
    while builder.add(encode_part(m.Nack(1))):
        pass
    assert len(builder.build()) <= 1400
    assert decode_packet(builder.build(), "c" * 64, 9000).sender == "n" * 64


@settings(deadline=None)
@given(st.binary(max_size=60) | rows.map(lambda row: row.encoded))
def test_an_arbitrary_row_raises_only_the_remote_kind(data: bytes) -> None:
    try:
        row = decode_row(data)
    except RemoteError:
        return
    assert row == make_row(row.name, row.boot, row.seq, row.payload) or row.encoded == data


@given(st.binary(max_size=40))
async def test_an_arbitrary_stream_raises_only_the_remote_kind_or_ends_early(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    try:
        assert await read_frame(reader)
    except (RemoteError, asyncio.IncompleteReadError):
        return
