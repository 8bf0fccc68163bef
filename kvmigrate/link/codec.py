"""Frames of the engine link: 4-byte big-endian length, then a msgpack map with the type under `t`.

Promises: `decode` and `FrameSplitter.feed` raise RemoteError and nothing else, whatever the bytes; what they return
has the declared types, lengths and ranges. Limits are the constants below; both sides enforce them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack

from kvmigrate.digest import DIGEST_BYTES
from kvmigrate.errors import RemoteError
from kvmigrate.layout import FINGERPRINT_BYTES, HASH_BYTES, MAX_BLOCK_BYTES, MAX_RANKS, MAX_SLOTS

from . import messages as m

MAX_FRAME_BYTES: Final = 4 << 20
#: Items of one list. 65,536 block hashes are 2.2 MiB, and cover 8 M tokens at 128 tokens a block.
MAX_ITEMS: Final = 1 << 16
MAX_TEXT: Final = 4096
MAX_FIELDS: Final = 64
_LENGTH_BYTES: Final = 4
_MAX_INT: Final = (1 << 63) - 1
_MAX_SECONDS: Final = 1e9

Fields = Mapping[str, Any]


def encode(message: m.Message) -> bytes:
    """Return a whole frame. RemoteError never; ValueError when the message is larger than a frame may be."""
    values: dict[str, object] = {"t": _NAMES[type(message)]}
    for name in message.__slots__:
        values[name] = getattr(message, name)
    payload: bytes = msgpack.packb(values)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"link message of {len(payload)} bytes, limit {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def decode(payload: bytes) -> m.Message:
    """Decode one frame's payload; RemoteError if it is no valid message."""
    if len(payload) > MAX_FRAME_BYTES:
        raise RemoteError("link frame is too large")
    try:
        values = msgpack.unpackb(payload, strict_map_key=True, max_array_len=MAX_ITEMS, max_map_len=MAX_FIELDS)
    except Exception as error:  # msgpack raises many kinds, among them plain ValueError and RecursionError
        raise RemoteError(f"link frame is not msgpack: {type(error).__name__}") from error
    if not isinstance(values, dict):
        raise RemoteError("link frame is not a map")
    kind = values.get("t")
    decoder = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise RemoteError("link frame of unknown type")
    return decoder(values)


class FrameSplitter:
    """Cut a byte stream into messages. Holds at most one incomplete frame. After RemoteError it is unusable."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[m.Message]:
        """Take received bytes, return the messages that are complete now."""
        self._buffer += data
        found: list[m.Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            size = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise RemoteError(f"link frame of {size} bytes, limit {MAX_FRAME_BYTES}")
            end = start + _LENGTH_BYTES + size
            if len(self._buffer) < end:
                break
            found.append(decode(bytes(self._buffer[start + _LENGTH_BYTES : end])))
            start = end
        del self._buffer[:start]
        return found


def _int(values: Fields, name: str, maximum: int = _MAX_INT) -> int:
    return _check_int(values.get(name), name, maximum)


def _check_int(value: object, name: str, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise RemoteError(f"link: bad {name}")
    return value


def _number(values: Fields, name: str) -> float:
    value: object = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_SECONDS:
        raise RemoteError(f"link: bad {name}")
    return float(value)


def _text(values: Fields, name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise RemoteError(f"link: bad {name}")
    return value


def _bool(values: Fields, name: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool):
        raise RemoteError(f"link: bad {name}")
    return value


def _check_bytes(value: object, name: str, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise RemoteError(f"link: bad {name}")
    return value


def _list(values: Fields, name: str) -> list[object]:
    value = values.get(name)
    if not isinstance(value, list):
        raise RemoteError(f"link: bad {name}")
    return value


def _rows(values: Fields, name: str, width: int) -> list[list[Any]]:
    rows = _list(values, name)
    if not all(isinstance(row, list) and len(row) == width for row in rows):
        raise RemoteError(f"link: bad {name}")
    return rows  # type: ignore[return-value]


def _slots(values: Fields) -> tuple[int, ...]:
    return tuple(_slot(s) for s in _list(values, "slots"))


def _hashes(values: Fields) -> tuple[bytes, ...]:
    return tuple(_hash(h) for h in _list(values, "hashes"))


def _slot(value: object) -> int:
    return _check_int(value, "slot", MAX_SLOTS - 1)


def _generation(value: object) -> int:
    return _check_int(value, "generation", _MAX_INT)


def _rank(value: object) -> int:
    return _check_int(value, "rank", MAX_RANKS - 1)


def _hash(value: object) -> bytes:
    return _check_bytes(value, "block hash", HASH_BYTES)


def _readable(values: Fields) -> dict[str, str | int]:
    raw = values.get("fields")
    if not isinstance(raw, dict):
        raise RemoteError("link: bad fields")
    result: dict[str, str | int] = {}
    for key, value in raw.items():
        if not isinstance(key, str) or type(value) not in (str, int):
            raise RemoteError("link: bad fields")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise RemoteError("link: bad fields")
        result[key] = value
    return result


def _hello(v: Fields) -> m.Hello:
    try:
        role = m.Role(_text(v, "role"))
    except ValueError as error:
        raise RemoteError("link: bad role") from error
    rank, ranks = _int(v, "rank", MAX_RANKS - 1), _int(v, "ranks", MAX_RANKS)
    if rank >= max(ranks, 1):
        raise RemoteError("link: rank out of range")
    return m.Hello(
        role=role,
        rank=rank,
        ranks=ranks,
        pid=_int(v, "pid"),
        fingerprint=_check_bytes(v.get("fingerprint"), "fingerprint", FINGERPRINT_BYTES),
        block_bytes=_int(v, "block_bytes", MAX_BLOCK_BYTES),
        block_size=_int(v, "block_size"),
        supported=_bool(v, "supported"),
        why=_text(v, "why"),
        fields=_readable(v),
        holds=_bool(v, "holds"),
    )


def _started(v: Fields) -> m.Started:
    return m.Started(_text(v, "rid"), _int(v, "prompt_tokens"), _int(v, "local_tokens"), _int(v, "external_tokens"))


def _stored(v: Fields) -> m.Stored:
    return m.Stored(
        tuple(
            m.StoredItem(
                _slot(slot),
                _generation(generation),
                _hash(block_hash),
                _rank(rank),
                _check_int(nbytes, "nbytes", MAX_BLOCK_BYTES),
                _check_bytes(digest, "digest", DIGEST_BYTES),
            )
            for slot, generation, block_hash, rank, nbytes, digest in _rows(v, "items", 6)
        )
    )


def _add(v: Fields) -> m.Add:
    return m.Add(
        tuple(
            m.AddItem(_hash(block_hash), _rank(rank), _slot(slot), _generation(generation))
            for block_hash, rank, slot, generation in _rows(v, "items", 4)
        )
    )


def _grant(v: Fields) -> m.Grant:
    return m.Grant(tuple(m.SlotGrant(_slot(s), _generation(g)) for s, g in _rows(v, "slots", 2)))


def _pool(v: Fields) -> m.Pool:
    return m.Pool(
        path=_text(v, "path"),
        instance=_int(v, "instance"),
        epoch=_int(v, "epoch"),
        block_bytes=_int(v, "block_bytes", MAX_BLOCK_BYTES),
        slots=_int(v, "slots", MAX_SLOTS),
        ranks=_int(v, "ranks", MAX_RANKS),
        why=_text(v, "why"),
    )


_DECODERS: Final[dict[str, Callable[[Fields], m.Message]]] = {
    "hello": _hello,
    "started": _started,
    "prefilled": lambda v: m.Prefilled(_text(v, "rid"), _number(v, "seconds")),
    "filled": lambda v: m.Filled(_text(v, "rid"), _hashes(v), _int(v, "tokens")),
    "finished": lambda v: m.Finished(_text(v, "rid")),
    "load": lambda v: m.Load(_int(v, "running"), _int(v, "waiting"), _number(v, "kv_use")),
    "reset": lambda _: m.Reset(),
    "stored": _stored,
    "want": lambda v: m.Want(_int(v, "n", MAX_SLOTS)),
    "failed": lambda v: m.Failed(_slots(v)),
    "loaded": lambda v: m.Loaded(_text(v, "rid"), _int(v, "blocks"), _int(v, "bytes"), _number(v, "seconds")),
    "corrupt": lambda v: m.Corrupt(_slots(v)),
    "pool": _pool,
    "grant": _grant,
    "clear": lambda v: m.Clear(_int(v, "epoch")),
    "add": _add,
    "drop": lambda v: m.Drop(_hashes(v)),
    "pulled": lambda v: m.Pulled(_text(v, "rid")),
}

_NAMES: Final[dict[type, str]] = {
    kind: kind.__name__.lower()
    for kind in (
        m.Hello, m.Started, m.Prefilled, m.Filled, m.Finished, m.Load, m.Reset, m.Stored, m.Want, m.Failed, m.Loaded,
        m.Corrupt, m.Pool, m.Grant, m.Clear, m.Add, m.Drop, m.Pulled,
    )
}  # fmt: skip
