"""Messages to bytes, in the form that `decode` describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack

from gossip import limits
from gossip.decode import STATES
from gossip.errors import RemoteError
from gossip.messages import (
    Ack,
    Alive,
    Dead,
    Left,
    Nack,
    Packet,
    Part,
    Ping,
    PingRequest,
    Place,
    PushPull,
    Row,
    Rows,
    SlowDelta,
    SlowDigest,
    SlowPull,
    Suspect,
    row_stamp,
)

_VERSION: Final = bytes([limits.PROTOCOL_VERSION])
_STATE_NUMBER: Final = {state: number for number, state in enumerate(STATES)}

_pack: Final[Callable[[Any], bytes]] = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def _delta_fields(part: SlowDelta) -> list[Any]:
    # One flat list, versions relative to the base: about half the bytes of a list of triples.
    flat: list[Any] = []
    for key, value, version in part.entries:
        flat += (key, value, version - part.base)
    return [11, part.name, part.boot, part.base, part.upto, part.latest, part.floor, flat]


_ENCODERS: Final[dict[type, Callable[[Any], list[Any]]]] = {
    Ping: lambda p: [1, p.seq, p.target],
    Ack: lambda p: [2, p.seq, p.name],
    PingRequest: lambda p: [3, p.seq, p.target, p.host, p.port],
    Nack: lambda p: [4, p.seq],
    Alive: lambda p: [5, p.name, p.incarnation, p.host, p.port, p.meta],
    Suspect: lambda p: [6, p.name, p.incarnation, p.accuser],
    Dead: lambda p: [7, p.name, p.incarnation, p.accuser],
    Left: lambda p: [8, p.name, p.incarnation],
    Rows: lambda p: [9, [x for pair in zip(p.ages, (r.encoded for r in p.rows), strict=True) for x in pair]],
    SlowDigest: lambda p: [10, [x for m in p.marks for x in (m.name, m.boot, m.version)]],
    SlowDelta: _delta_fields,
    Place: lambda p: [14, p.name, p.boot, p.seq, p.coordinate],
    SlowPull: lambda p: [12, p.name, p.boot, p.base, p.floor],
    PushPull: lambda p: [
        13,
        [[m.name, m.incarnation, m.host, m.port, m.meta, _STATE_NUMBER[m.state], m.slow_version] for m in p.members],
    ],
}


def encode_part(part: Part) -> bytes:
    """Encode one part; it can be put into any number of packets."""
    return _pack(_pack(_ENCODERS[type(part)](part)))


def make_row(name: str, boot: int, seq: int, payload: bytes) -> Row:
    """Make the row of its owner, with its bytes: three msgpack values, and then the payload as it is."""
    return Row(name, boot, seq, payload, _pack(name) + _pack(boot) + _pack(seq) + payload, row_stamp(boot, seq))


def encode_rows(flat: list[Any]) -> bytes:
    """Encode a `Rows` part from the flat list `age, encoded row, age, ...`: what `encode_part` would give."""
    return _pack(_pack([9, flat]))


class PacketBuilder:
    """Fills one packet up to a budget, part by part."""

    #: Room for the header of the array of parts.
    _ARRAY_HEADER: Final = 3

    def __init__(self, cluster: str, sender: str, incarnation: int, budget: int) -> None:
        self._head = _VERSION + b"\x94" + _pack(cluster) + _pack(sender) + _pack(incarnation)
        self._parts: list[bytes] = []
        self._room = budget - len(self._head) - self._ARRAY_HEADER

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def room(self) -> int:
        """Bytes left for parts."""
        return self._room

    def add(self, encoded: bytes) -> bool:
        """Append an encoded part if it fits; says whether it did."""
        if len(encoded) > self._room or len(self._parts) >= limits.MAX_PARTS:
            return False
        self._parts.append(encoded)
        self._room -= len(encoded)
        return True

    def build(self) -> bytes:
        """Give the packet's bytes."""
        count = len(self._parts)
        header = bytes([0x90 | count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
        return self._head + header + b"".join(self._parts)


def encode_packet(cluster: str, packet: Packet) -> bytes:
    """Encode a whole packet without a budget: for streams and tests."""
    builder = PacketBuilder(cluster, packet.sender, packet.incarnation, limits.MAX_FRAME_BYTES)
    for part in packet.parts:
        if not builder.add(encode_part(part)):
            raise RemoteError("packet too large")
    return builder.build()
