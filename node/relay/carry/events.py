"""Server-sent events in an answer's bytes: cut into whole events, and read.

The bytes come in pieces that split anywhere. An event ends with an empty line; JSON in one line holds no line break, so
no escaping has to be known here. `read` raises `RemoteError` and nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from node.errors import RemoteError

#: Longest event, bytes: the ids of a prompt of a million tokens fit.
MAX_EVENT = 16 * 1024 * 1024

DONE = b"data: [DONE]\n\n"

_DATA = b"data:"
#: An empty line, however lines end.
_END = re.compile(rb"\n\r?\n")
_COMMENT = b":"
#: How events end nearly always, and what makes that end ambiguous.
_PLAIN_END, _ODD_END = b"\n\n", b"\n\n\n"
_TOO_LONG = f"an event of more than {MAX_EVENT} bytes"


class EventSplitter:
    """Pieces in, whole events out, each with the empty line that ends it."""

    __slots__ = ("_held", "_seen")

    def __init__(self) -> None:
        self._held = bytearray()
        self._seen = 0  # bytes of it that are known to hold no end

    @property
    def partial(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._held)

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes.

        :raises RemoteError: one is longer than `MAX_EVENT`.
        """
        if (run := self.run(piece)) is not None:
            return cut(run)
        data = piece if not self._held else self._joined(piece)
        events = cut(data)
        size = sum(map(len, events))
        if size or not self._held:
            self._hold(data[size:])
        self._seen = len(self._held)
        if self._seen > MAX_EVENT:
            raise RemoteError(_TOO_LONG)
        return events

    def run(self, piece: bytes) -> bytes | None:
        """All the events that this piece completes, for `cut`; None, and nothing is taken, where lines end oddly.

        :raises RemoteError: an event is longer than `MAX_EVENT`.
        """
        if not self._held:
            end = piece.rfind(_PLAIN_END) + 2
            if end == len(piece) and end > 1:
                return None if piece.endswith(_ODD_END) or b"\r" in piece else piece
            data = piece
        else:
            data = bytes(self._held) + piece if len(self._held) < len(piece) else b""
            end = data.rfind(_PLAIN_END) + 2
        if end < 2 or data.endswith(_ODD_END, 0, end) or b"\r" in data:
            return None
        self._hold(data[end:])
        return data[:end]

    def _hold(self, rest: bytes) -> None:
        self._held = bytearray(rest)
        self._seen = len(rest)
        if self._seen > MAX_EVENT:
            raise RemoteError(_TOO_LONG)

    def _joined(self, piece: bytes) -> bytes:
        """What is held with this piece; nothing while that holds no end: a long event is not copied each time."""
        looked = max(0, self._seen - 2)
        self._held += piece
        return bytes(self._held) if _END.search(self._held, looked) else b""


def cut(data: bytes) -> list[bytes]:
    """The whole events at the beginning of these bytes."""
    if data.endswith(_PLAIN_END) and data.count(b"\n") == 2:
        return [data]
    events: list[bytes] = []
    start = 0
    for match in _END.finditer(data):  # one pass: what searches anew behind each event is quadratic
        events.append(data[start : match.end()])
        start = match.end()
    return events


def read(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None for a comment, for `[DONE]` and for what carries no data.

    :raises RemoteError: its data is no JSON object.
    """
    if not event.startswith(_DATA):
        return None
    data = event[5:].strip()
    try:
        value = orjson.loads(data)
    except ValueError:
        if data in (b"[DONE]", b""):
            return None
        value = _lenient(data)
    if not isinstance(value, dict):
        raise RemoteError("an event that is no JSON object")
    return value


def _lenient(data: bytes) -> object:
    """What orjson refuses and some engines write: NaN, lone surrogates."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RemoteError("an event that is no JSON") from error
    return value


def is_done(event: bytes) -> bool:
    """Whether this event says that the stream is whole."""
    return event.startswith(_DATA) and event[5:].strip() == b"[DONE]"


def is_comment(event: bytes) -> bool:
    """Whether this event is only a comment."""
    return event.startswith(_COMMENT)


def write(value: dict[str, Any]) -> bytes:
    """The event with this JSON object. Lone surrogates are written as escapes."""
    try:
        return b"data: " + orjson.dumps(value) + b"\n\n"
    except TypeError:
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
