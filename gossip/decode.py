"""Bytes to messages.

Promise: whatever the bytes, `decode_packet` either returns a packet whose every field is within the protocol's limits,
or raises `RemoteError` (`WrongClusterError` for another cluster's label) and nothing else. A fuzz test holds it to it.

A packet is the version byte followed by the msgpack array `[label, sender, incarnation, [part, ...]]`; a part is the
bytes of the msgpack array `[kind, field, ...]`. Kinds that we do not know and fields beyond those that we know are
skipped, so that a later version may add some. Maps and extension types are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgpack

from gossip import limits
from gossip.errors import RemoteError, WrongClusterError
from gossip.identity import is_ip_literal
from gossip.member import MemberState
from gossip.messages import (
    Ack,
    Alive,
    Dead,
    Left,
    MemberRecord,
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
    SlowMark,
    SlowPull,
    Suspect,
    row_stamp,
)

#: What msgpack raises for bytes that are not what was asked for.
_NOT_MSGPACK: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
#: A member's state on the wire is its number in this list.
STATES: Final = (MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT)
_U32: Final = 1 << 32


def _int(value: Any, below: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value < below:
        raise RemoteError("a number is out of range")
    return value


def _name(value: Any) -> str:
    if type(value) is not str:
        raise RemoteError("not a node name")
    return _known_name(value)


@lru_cache(maxsize=8192)
def _known_name(value: str) -> str:
    # The same few thousand names come again and again: each is checked once, and is one object wherever it is kept.
    if not limits.NAME_PATTERN.match(value):
        raise RemoteError("not a node name")
    return value


def _host(value: Any) -> str:
    if type(value) is not str or len(value) > limits.MAX_NAME_BYTES or not is_ip_literal(value):
        raise RemoteError("not an IP address")
    return value


def _bytes(value: Any, most: int) -> bytes:
    if type(value) is not bytes or len(value) > most:
        raise RemoteError("not bytes, or too many")
    return value


def _list(value: Any, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise RemoteError("not a list, or too long")
    return value


def _boot(value: Any) -> int:
    return _int(value, limits.MAX_BOOT, 1)


def _incarnation(value: Any) -> int:
    return _int(value, limits.MAX_INCARNATION, 1)


def _counter(value: Any) -> int:
    return _int(value, limits.MAX_COUNTER)


def _port(value: Any) -> int:
    return _int(value, 65536, 1)


def _record(f: Any) -> MemberRecord:
    f = _list(f, 16)
    return MemberRecord(
        _name(f[0]),
        _incarnation(f[1]),
        _host(f[2]),
        _port(f[3]),
        _bytes(f[4], limits.MAX_META_BYTES),
        STATES[_int(f[5], len(STATES))],
        _counter(f[6]),
    )


def _digest(f: Sequence[Any]) -> SlowDigest:
    flat = _list(f[1], 3 * limits.MAX_MARKS)
    if len(flat) % 3:
        raise RemoteError("a digest comes in threes")
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return SlowDigest(tuple(SlowMark(_name(n), _boot(b), _counter(v)) for n, b, v in triples))


def _delta(f: Sequence[Any]) -> SlowDelta:
    name, boot = _name(f[1]), _boot(f[2])
    base, upto, latest, floor = (_counter(f[i]) for i in (3, 4, 5, 6))
    flat = _list(f[7], 3 * limits.MAX_DELTA_ENTRIES)
    if len(flat) % 3 or not base <= upto <= latest:
        raise RemoteError("a delta that does not add up")
    entries: list[tuple[bytes, bytes | None, int]] = []
    last = base
    for key, value, step in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        version = base + _counter(step)
        if not last < version <= upto:
            raise RemoteError("versions of a delta must rise")
        last = version
        checked = None if value is None else _bytes(value, limits.MAX_VALUE_BYTES)
        entries.append((_bytes(key, limits.MAX_KEY_BYTES), checked, version))
    return SlowDelta(name, boot, base, upto, latest, floor, tuple(entries))


def _rows(f: Sequence[Any]) -> Rows:
    # Rows are most of what arrives: the checks run in C over the whole list, and a row seen before is not read again.
    flat = _list(f[1], 2 * limits.MAX_ROWS)
    ages, encoded = flat[::2], flat[1::2]
    if not flat:
        return Rows((), ())
    if len(ages) != len(encoded) or set(map(type, ages)) != {int} or set(map(type, encoded)) != {bytes}:
        raise RemoteError("rows come in pairs of age and bytes")
    if min(ages) < 0 or max(ages) >= limits.MAX_AGE:
        raise RemoteError("an age is out of range")
    return Rows(tuple(ages), tuple(map(decode_row, encoded)))


@lru_cache(maxsize=16_384)
def decode_row(encoded: bytes) -> Row:
    """Decode one row. The last ones are remembered, at most 20 MB of them: each comes in from several peers.

    :raises RemoteError: it is malformed or out of bounds.
    """
    if len(encoded) > limits.MAX_ENCODED_ROW_BYTES:
        raise RemoteError("row too long")
    reader = msgpack.Unpacker(
        max_buffer_size=2 * limits.MAX_ENCODED_ROW_BYTES,
        raw=False,
        max_map_len=0,
        max_ext_len=0,
        ext_hook=_refuse_extension,
    )
    try:
        reader.feed(encoded)
        name, boot, seq = reader.unpack(), reader.unpack(), reader.unpack()
    except _NOT_MSGPACK as error:
        raise RemoteError("not a row") from error
    payload = encoded[reader.tell() :]
    boot, seq = _boot(boot), _counter(seq)
    return Row(_name(name), boot, seq, _bytes(payload, limits.MAX_ROW_BYTES), encoded, row_stamp(boot, seq))


_DECODERS: Final[dict[int, Callable[[Sequence[Any]], Part]]] = {
    1: lambda f: Ping(_int(f[1], _U32), _name(f[2])),
    2: lambda f: Ack(_int(f[1], _U32), _name(f[2])),
    3: lambda f: PingRequest(_int(f[1], _U32), _name(f[2]), _host(f[3]), _port(f[4])),
    4: lambda f: Nack(_int(f[1], _U32)),
    5: lambda f: Alive(_name(f[1]), _incarnation(f[2]), _host(f[3]), _port(f[4]), _bytes(f[5], limits.MAX_META_BYTES)),
    6: lambda f: Suspect(_name(f[1]), _incarnation(f[2]), _name(f[3])),
    7: lambda f: Dead(_name(f[1]), _incarnation(f[2]), _name(f[3])),
    8: lambda f: Left(_name(f[1]), _incarnation(f[2])),
    9: _rows,
    10: _digest,
    11: _delta,
    12: lambda f: SlowPull(_name(f[1]), _boot(f[2]), _counter(f[3]), _counter(f[4])),
    14: lambda f: Place(_name(f[1]), _boot(f[2]), _counter(f[3]), _bytes(f[4], limits.MAX_COORDINATE_BYTES)),
    13: lambda f: PushPull(tuple(_record(r) for r in _list(f[1], limits.MAX_RECORDS))),
}


def _refuse_extension(_code: int, _data: bytes) -> Any:
    raise ValueError("extension types are not part of the protocol")


def _load(data: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            max_map_len=0,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except _NOT_MSGPACK as error:
        raise RemoteError("not msgpack") from error


def _parts(raw: Any) -> tuple[Part, ...]:
    parts = []
    for item in _list(raw, limits.MAX_PARTS):
        if type(item) is not bytes:
            raise RemoteError("a part is bytes")
        # The second byte is the kind, after the header of the array, in all that we send ourselves.
        part = _rumour(item) if item[1:2] in _RUMOURS and len(item) <= _MOST_RUMOUR_BYTES else _part(item)
        if part is not None:
            parts.append(part)
    return tuple(parts)


def _part(item: bytes) -> Part | None:
    """Decode one part; None for a kind that we do not know."""
    fields = _list(_load(item), 64)
    decoder = _DECODERS.get(_int(fields[0], 256)) if fields else None
    return decoder(fields) if decoder is not None else None


#: Rumours come in from many peers, each the same bytes: the last ones are remembered, at most 4 MB of them.
_RUMOURS: Final = frozenset(bytes([kind]) for kind in (5, 6, 7, 8))
_MOST_RUMOUR_BYTES: Final = 1024
_rumour: Final = lru_cache(maxsize=4096)(_part)


def decode_packet(data: bytes, cluster: str, most_bytes: int) -> Packet:
    """Decode one datagram or frame.

    :raises WrongClusterError: it carries another label than `cluster`.
    :raises RemoteError: anything else that is wrong with it.
    """
    if not data or len(data) > most_bytes:
        raise RemoteError("empty or too long")
    if data[0] != limits.PROTOCOL_VERSION:
        raise RemoteError(f"protocol version {data[0]}")
    top = _list(_load(memoryview(data)[1:]), 16)
    try:
        if _name(top[0]) != cluster:
            raise WrongClusterError(f"cluster {top[0]}")
        return Packet(_name(top[1]), _incarnation(top[2]), _parts(top[3]))
    except IndexError as error:
        raise RemoteError("a field is missing") from error
