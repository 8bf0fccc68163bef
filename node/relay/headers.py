"""Which headers go on, in both directions.

Rules:
1. Hop-by-hop headers (RFC 9110 section 7.6.1) and every header that ``Connection`` names stop here.
   Framing is made again by each hop: Content-Length goes on unchanged, Transfer-Encoding is made from it.
2. Every other header goes on in its order, duplicates kept.
3. Names that begin with ``x-grapevine-`` belong to us: a client's never reach an engine or a peer, an
   engine's never reach a client.
4. ``X-Request-Id`` is ours to set on a request (the client's own value when it is valid) and on the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HeaderList = list[tuple[str, str]]

#: Names of headers whose lower-case form is remembered; what is longer is nobody's usual name.
_MAX_NAMES = 2048
_MAX_NAME = 64


class _Lower(dict[str, str]):
    """Lower-case names by name: the same few come with every message."""

    def __missing__(self, name: str) -> str:
        lower = name.lower()
        if len(name) <= _MAX_NAME:
            if len(self) >= _MAX_NAMES:
                self.clear()
            self[name] = lower
        return lower


class _Names(dict[bytes, str]):
    """Names as text by their bytes."""

    def __missing__(self, raw: bytes) -> str:
        name = raw.decode("utf-8", "surrogateescape")
        if len(raw) <= _MAX_NAME:
            if len(self) >= _MAX_NAMES:
                self.clear()
            self[raw] = name
        return name


LOWER = _Lower()
NAMES = _Names()

INTERNAL_PREFIX = "x-grapevine-"
_PREFIX = len(INTERNAL_PREFIX)
REQUEST_ID = "X-Request-Id"

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

# The body is read whole before it goes on, so its length is known anew; Host names the hop; Expect was
# answered here.
_NOT_IN_REQUEST = HOP_BY_HOP | {"host", "content-length", "expect", "x-request-id"}
_NOT_IN_ANSWER = HOP_BY_HOP | {"x-request-id"}
#: What ``Connection`` says of itself: no header is meant.
_ALONE = frozenset({"", "close"})

#: A client's request id is kept when it cannot hurt a log line, a header or the engine's own ids.
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:~+/=-]{1,128}")


def listed_in_connection(value: str) -> frozenset[str]:
    """Return the lower-case names that a ``Connection`` header declares hop-by-hop."""
    return frozenset(token.strip().lower() for token in value.split(","))


def _kept(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> HeaderList:
    """One pass, and a second one only where a ``Connection`` header names others."""
    kept: HeaderList = []
    listed: frozenset[str] = frozenset()
    for item in headers:
        lower = LOWER[item[0]]
        if lower in dropped:
            if lower == "connection":
                listed |= listed_in_connection(item[1])
        elif lower[:_PREFIX] != INTERNAL_PREFIX:
            kept += (item,)
    if listed and listed - HOP_BY_HOP - _ALONE:
        return [item for item in kept if LOWER[item[0]] not in listed]
    return kept


def for_upstream(headers: Iterable[tuple[str, str]]) -> HeaderList:
    """Return the request headers that go on to an engine or a peer."""
    return _kept(headers, _NOT_IN_REQUEST)


def for_downstream(headers: Iterable[tuple[str, str]]) -> HeaderList:
    """Return the answer's headers that go back to the client."""
    return _kept(headers, _NOT_IN_ANSWER)


def internal(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return our own headers of a message by lower-case name; of duplicates the last."""
    return {lower: value for name, value in headers if (lower := LOWER[name])[:_PREFIX] == INTERNAL_PREFIX}


def replaced(headers: HeaderList, name: str, value: str | None) -> HeaderList:
    """Return ``headers`` without ``name``, and with the one ``value`` when it is not None."""
    lower = LOWER[name]
    kept = [item for item in headers if LOWER[item[0]] != lower]
    return kept if value is None else [*kept, (name, value)]


def valid_request_id(value: str | None) -> bool:
    """Say whether a client's request id may be kept."""
    return value is not None and _VALID_REQUEST_ID.fullmatch(value) is not None


def joined(lines: list[str]) -> bytes:
    """A head of these lines.

    :raises ValueError: a line holds a line break.
    """
    head = "\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count("\n") != breaks or head.count("\r") != breaks or "\0" in head:
        raise ValueError("a header holds a line break")
    return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n"
