"""The bodies of control frames: one msgpack list for each message, its fields in order.

Lists of blocks are one run of bytes each, fixed-width rows: a thousand of them are looked at in a millisecond.
`unpack` raises RemoteError and nothing else, and what it returns keeps the limits of `messages`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, Final

import msgpack

from .digest import DIGEST_BYTES
from .errors import RemoteError
from .layout import FINGERPRINT_BYTES, HASH_BYTES, MAX_BLOCK_BYTES, MAX_RANKS, MAX_SLOTS
from .messages import (
    MAX_CHAINS,
    MAX_CHUNKS,
    MAX_ENTRIES,
    MAX_FETCH,
    MAX_FIELD_TEXT,
    MAX_FIELDS,
    MAX_FILE_NAME,
    MAX_LABEL_TOKENS,
    MAX_NAME,
    MAX_TAG,
    MAX_TEXT,
    NONCE_BYTES,
    PROOF_BYTES,
    Busy,
    Chain,
    Chains,
    Challenge,
    Corrupt,
    Entry,
    Error,
    Fetch,
    Find,
    Hello,
    Hot,
    Key,
    Label,
    Lookup,
    Manifest,
    Message,
    Miss,
    Pin,
    Pinned,
    Place,
    Proof,
    Unlike,
    Unpin,
    Welcome,
)

_MAX_WORD: Final = (1 << 64) - 1
_ENTRY: Final = struct.Struct(f"!{HASH_BYTES}sBI{DIGEST_BYTES}s")
_KEY: Final = struct.Struct(f"!{HASH_BYTES}sB")


def pack(message: Message) -> bytes:
    """Return the body of a message."""
    match message:
        case Manifest():
            fields = [message.file, message.instance, b"".join(starmap(_ENTRY.pack, message.entries))]
        case Fetch() | Pin() | Corrupt():
            fields = [b"".join(starmap(_KEY.pack, message.keys))]
        case _:
            fields = [getattr(message, name) for name in message.__slots__]
    body: bytes = msgpack.packb(fields)
    return body


def unpack(kind: type[Message], body: bytes | bytearray | memoryview) -> Message:
    """Return the message of a kind; RemoteError when the body is not what that demands."""
    try:
        values = msgpack.unpackb(body, max_array_len=MAX_ENTRIES, max_map_len=0)
    except Exception as error:  # msgpack raises many kinds, among them plain ValueError
        raise RemoteError(f"transfer: not msgpack: {type(error).__name__}") from error
    width, build = _BUILDERS[kind]
    if not isinstance(values, list) or len(values) != width:
        raise RemoteError(f"transfer: bad {kind.__name__}")
    return build(values)


def _int(value: object, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise RemoteError("transfer: number out of range")
    return value


def _bytes(value: object, *lengths: int) -> bytes:
    if not isinstance(value, bytes) or len(value) not in lengths:
        raise RemoteError("transfer: bytes of a wrong length")
    return value


def _text(value: object, maximum: int) -> str:
    if not isinstance(value, str) or len(value) > maximum:
        raise RemoteError("transfer: bad text")
    return value


def _list(value: object, maximum: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > maximum:
        raise RemoteError("transfer: bad list")
    return value


def _row(value: object, width: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != width:
        raise RemoteError("transfer: bad row")
    return value


def _rows(value: object, shape: struct.Struct, most: int) -> list[Any]:
    if not isinstance(value, bytes) or len(value) % shape.size or len(value) > most * shape.size:
        raise RemoteError("transfer: bad rows")
    return list(shape.iter_unpack(value))


def _keys(value: object) -> tuple[Key, ...]:
    rows = _rows(value, _KEY, MAX_FETCH)
    if any(rank >= MAX_RANKS for _, rank in rows):
        raise RemoteError("transfer: number out of range")
    return tuple(map(Key._make, rows))


def _hello(v: list[Any]) -> Hello:
    return Hello(_int(v[0], 255), _text(v[1], MAX_NAME), _text(v[2], MAX_NAME), _bytes(v[3], NONCE_BYTES))


def _lookup(v: list[Any]) -> Lookup:
    chunks = tuple(_int(c, _MAX_WORD) for c in _list(v[2], MAX_CHUNKS))
    return Lookup(_bytes(v[0], FINGERPRINT_BYTES), _int(v[1], MAX_RANKS), chunks, _text(v[3], MAX_TAG))


def _manifest(v: list[Any]) -> Manifest:
    rows = _rows(v[2], _ENTRY, MAX_ENTRIES)
    if any(rank >= MAX_RANKS or not 0 < nbytes <= MAX_BLOCK_BYTES for _, rank, nbytes, _ in rows):
        raise RemoteError("transfer: number out of range")
    return Manifest(_text(v[0], MAX_FILE_NAME), _int(v[1], _MAX_WORD), tuple(map(Entry._make, rows)))


def _pinned(v: list[Any]) -> Pinned:
    rows = [_row(row, 2) for row in _list(v[0], MAX_FETCH)]
    return Pinned(tuple(Place(_int(slot, MAX_SLOTS - 1), _int(number, _MAX_WORD)) for slot, number in rows))


def _unlike(v: list[Any]) -> Unlike:
    rows = [_row(row, 2) for row in _list(v[0], MAX_FIELDS)]
    return Unlike(tuple((_text(name, MAX_NAME), _value(value)) for name, value in rows))


def _find(v: list[Any]) -> Find:
    hashes = tuple(_bytes(h, HASH_BYTES) for h in _list(v[2], MAX_ENTRIES))
    return Find(_bytes(v[0], FINGERPRINT_BYTES), _int(v[1], MAX_RANKS), hashes)


def _chains(v: list[Any]) -> Chains:
    chains = tuple(_chain(_row(row, 2)) for row in _list(v[0], MAX_CHAINS))
    if max(sum(len(c.hashes) for c in chains), sum(len(c.labels) for c in chains)) > MAX_ENTRIES:
        raise RemoteError("transfer: too many blocks in chains")
    return Chains(chains)


def _chain(row: Sequence[object]) -> Chain:
    hashes = tuple(_bytes(h, HASH_BYTES) for h in _list(row[0], MAX_ENTRIES))
    return Chain(hashes, tuple(_label(_row(label, 4), len(hashes)) for label in _list(row[1], MAX_ENTRIES)))


def _label(row: Sequence[object], blocks: int) -> Label:
    end = _int(row[1], blocks)
    return Label(_int(row[0], _MAX_WORD), end, _int(row[2], end), _int(row[3], MAX_LABEL_TOKENS))


def _value(value: object) -> str | int:
    return _int(value, _MAX_WORD) if type(value) is int else _text(value, MAX_FIELD_TEXT)


_BUILDERS: Final[dict[type[Message], tuple[int, Callable[[list[Any]], Message]]]] = {
    Hello: (4, _hello),
    Challenge: (2, lambda v: Challenge(_bytes(v[0], NONCE_BYTES), _bytes(v[1], 0, PROOF_BYTES))),
    Proof: (1, lambda v: Proof(_bytes(v[0], 0, PROOF_BYTES))),
    Welcome: (0, lambda _: Welcome()),
    Lookup: (4, _lookup),
    Manifest: (3, _manifest),
    Unlike: (1, _unlike),
    Find: (3, _find),
    Hot: (1, lambda v: Hot(_int(v[0], MAX_ENTRIES))),
    Chains: (1, _chains),
    Fetch: (1, lambda v: Fetch(_keys(v[0]))),
    Miss: (1, lambda v: Miss(_int(v[0], MAX_FETCH - 1))),
    Pin: (1, lambda v: Pin(_keys(v[0]))),
    Pinned: (1, _pinned),
    Unpin: (0, lambda _: Unpin()),
    Corrupt: (1, lambda v: Corrupt(_keys(v[0]))),
    Busy: (0, lambda _: Busy()),
    Error: (2, lambda v: Error(_text(v[0], MAX_NAME), _text(v[1], MAX_TEXT))),
}
