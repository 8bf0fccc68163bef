"""Small msgpack values that nodes exchange: bounded packing, and unpacking that fails in one way only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import msgpack

from node.errors import RemoteError

#: What a node may be called (also the limit for every name read from the wire).
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

#: Longest model identifier that we carry, in UTF-8 bytes.
MAX_MODEL_ID = 256

#: Deepest or longest container inside one value; ours are far below it.
_MAX_ITEMS = 512


def pack(value: object) -> bytes:
    """Pack with single precision floats: milliseconds and rates need no more, and it halves the vectors."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, use_single_float=True)
    return packed


def unpack_map(data: bytes, limit: int, what: str) -> dict[str, object]:
    """The map in `data`, string keys only. Raises `RemoteError` for anything else, or more than `limit` bytes."""
    if len(data) > limit:
        raise RemoteError(f"{what}: {len(data)} bytes are more than the {limit} allowed")
    try:
        value: object = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises half a dozen unrelated kinds
        raise RemoteError(f"{what}: not msgpack ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise RemoteError(f"{what}: not a map")
    for key in value:
        if type(key) is not str:
            raise RemoteError(f"{what}: a key is no string")
    return value


def number(fields: Mapping[str, object], key: str, low: float, high: float, default: float | None = None) -> float:
    """A number within [low, high], so a finite one; `default` when the key is absent and a default is given."""
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RemoteError(f"{key}: no number")
    if not low <= value <= high:  # false for NaN
        raise RemoteError(f"{key}: {value!r} is outside [{low}, {high}]")
    return float(value)


def integer(fields: Mapping[str, object], key: str, low: int, high: int, default: int | None = None) -> int:
    """An integer within [low, high]; `default` when the key is absent and a default is given."""
    value = fields.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise RemoteError(f"{key}: no integer within [{low}, {high}]")
    return value


def flag(fields: Mapping[str, object], key: str, default: bool | None = None) -> bool:
    """A boolean; `default` when the key is absent and a default is given."""
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise RemoteError(f"{key}: no boolean")
    return value


def text(fields: Mapping[str, object], key: str, limit: int, default: str | None = None) -> str:
    """A string of at most `limit` UTF-8 bytes without control characters."""
    value = fields.get(key, default)
    if (
        type(value) is not str
        or len(value) > limit
        or not (value.isascii() or len(value.encode("utf-8", "surrogatepass")) <= limit)
    ):
        raise RemoteError(f"{key}: no string of at most {limit} bytes")
    if value and not value.isprintable():
        raise RemoteError(f"{key}: holds characters that cannot be printed")
    return value


def name(value: object, what: str) -> str:
    """A node name, or `RemoteError`."""
    if type(value) is not str or not _is_name(value):
        raise RemoteError(f"{what}: no node name")
    return value


@lru_cache(4096)
def _is_name(value: str) -> bool:
    """The same few names come with every message."""
    return NAME.fullmatch(value) is not None
