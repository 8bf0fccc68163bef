"""Reading the events of a node's page (`node.http.events`), with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from node.cli.ask import Refused, Unreachable, trust

PATH = "/page/events"
#: Seconds of silence after which a node is taken for gone; it ticks at least every few seconds.
SILENT_S = 15.0
#: Longest line read, bytes: an event is one line.
MAX_LINE = 16 * 1024 * 1024

Message = dict[str, Any]


class Stream:
    """One connection. Use it with `with`; iterate over (kind, message)."""

    def __init__(self, url: str) -> None:
        """Connect. Raises `Unreachable`, or `Refused` when what answers has no such events."""
        self._url = url
        try:
            self._connection = _connection(url)
            self._connection.request("GET", urlsplit(url).path + PATH, headers={"accept": "text/event-stream"})
            self._answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unreachable(url, error) from error
        if self._answer.status != 200:
            told = self._answer.read(300).decode("utf-8", "replace")
            self.close()
            raise Refused(f"{url} answers {PATH} with status {self._answer.status}: {told}")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[str, Message]]:
        """Every event as it comes, until the node ends the stream. Raises `Unreachable` when it breaks."""
        try:
            yield from events(iter(lambda: self._answer.readline(MAX_LINE), b""))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unreachable(self._url, error) from error

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=SILENT_S, context=trust(url))
    return http.client.HTTPConnection(host, parts.port, timeout=SILENT_S)


def events(lines: Iterable[bytes]) -> Iterator[tuple[str, Message]]:
    """The events in lines of a stream. Raises `ValueError` for one that is no JSON object."""
    kind, data = "", b""
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        if name == b"event":
            kind = value.strip().decode("ascii", "replace")
        elif name == b"data":
            data = value.strip()
        elif not line.strip() and data:
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError("an event is no object")
            yield kind, message
            kind, data = "", b""


def _unreachable(url: str, error: Exception) -> Unreachable:
    return Unreachable(f"{url} cannot be reached ({error}): is the node running? `--node URL` asks another one")
