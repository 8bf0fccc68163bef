"""Messages of the main process and its workers as bytes: msgpack, one message a frame.

`decode` raises `RemoteError` and nothing else: the types of all fields are checked by their annotations, numbers and
texts are bounded by the frame.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from node.errors import RemoteError
from node.workers.down import TO_WORKER
from node.workers.up import FROM_WORKER

#: Longest message in bytes: the chunk hashes of the longest prompt, and some room.
MAX_MESSAGE = 8 * 1024 * 1024
#: Nested arrays and maps are shorter than this.
_MAX_ITEMS = 1 << 20
_NUMBERS = {kind: number for number, kind in enumerate((*FROM_WORKER, *TO_WORKER))}

_Check = Callable[[Any], Any]


def encode(message: Any) -> bytes:
    """Pack a message.

    :raises RemoteError: it is too long, or holds a number that cannot be told.
    """
    try:
        data = msgpack.packb((_NUMBERS[type(message)], *message), unicode_errors="surrogateescape")
    except (OverflowError, ValueError) as error:
        raise RemoteError(f"worker: cannot be told ({error})") from error
    if len(data) > MAX_MESSAGE:
        raise RemoteError(f"worker: a message of {len(data)} bytes")
    return bytes(data)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Unpack a message. :raises RemoteError: it is none."""
    try:
        unpacked = msgpack.unpackb(
            data,
            use_list=False,
            unicode_errors="surrogateescape",
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
        build = _BUILDS[unpacked[0]]
    except Exception as error:  # msgpack raises half a dozen unrelated kinds
        raise RemoteError(f"worker: malformed ({type(error).__name__})") from error
    return build(unpacked[1:])


def _wrong(what: str) -> RemoteError:
    return RemoteError(f"worker: {what} is not what it should be")


class _Kind:
    """How one class of messages is made of what was unpacked.

    The types of all fields together are looked up: those that came before and were right are right again, and mostly
    all that there is to see. Only fields that hold something are looked into each time.
    """

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        self._kind = kind
        self._allowed = [_types_of(hints[name]) for name in kind._fields]
        built = ((place, _check_of(hints[name])) for place, name in enumerate(kind._fields))
        self._inside = [(place, check) for place, check in built if check is not None]
        self._right: set[tuple[type[Any], ...]] = set()

    def build(self, fields: Any) -> Any:
        if type(fields) is not tuple:
            raise _wrong("a group of fields")
        shape = tuple(map(type, fields))
        if shape not in self._right:
            self._look(shape)
        if self._inside:
            values = list(fields)
            for place, check in self._inside:
                if (value := values[place]) is not None and value != ():
                    values[place] = check(value)
            fields = values
        return tuple.__new__(self._kind, fields)

    def _look(self, shape: tuple[type[Any], ...]) -> None:
        if len(shape) != len(self._allowed):
            raise _wrong("the number of fields")
        for allowed, found in zip(self._allowed, shape, strict=True):
            if found not in allowed:
                raise _wrong(f"a field of {self._kind.__name__}")
        if len(self._right) < _MAX_SHAPES:
            self._right.add(shape)


#: Combinations of types that one class is remembered to have had.
_MAX_SHAPES = 256
_NONE = type(None)


def _types_of(hint: Any) -> frozenset[type[Any]]:
    """The types that a field may have when it was unpacked."""
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset().union(*(_types_of(item) for item in get_args(hint)))
    if hint is _NONE:
        return frozenset((_NONE,))
    if get_origin(hint) is tuple or issubclass(hint, tuple):
        return frozenset((tuple,))
    return frozenset((float, int) if hint is float else (hint,))


def _check_of(hint: Any) -> _Check | None:
    """What a field has to be looked into for; None where its type says all. It has that type, and is not empty."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (one,) = [item for item in inner if item is not _NONE]
        return _check_of(one)
    if origin is not tuple:
        return _Kind(hint).build if issubclass(hint, tuple) else None
    if inner[-1] is Ellipsis:
        return _many(inner[0])
    return _fixed(inner)


def _many(hint: Any) -> _Check:
    allowed, check = _types_of(hint), _check_of(hint)

    def build(value: Any) -> Any:
        if not allowed.issuperset(map(type, value)):
            raise _wrong("an item of a list")
        return value if check is None else tuple([check(item) for item in value])

    return build


def _fixed(hints: tuple[Any, ...]) -> _Check:
    allowed = [_types_of(hint) for hint in hints]

    def build(value: Any) -> Any:
        if len(value) != len(allowed) or not all(type(item) in one for item, one in zip(value, allowed, strict=True)):
            raise _wrong("an item of a group")
        return value

    return build


_BUILDS = {number: _Kind(kind).build for kind, number in _NUMBERS.items()}
