"""An answer in one piece that is asked for as a stream: what `CarriedStream` writes to in place of the client.

Nothing reaches the client before the end, so nothing can be wrong or doubled: whatever is lost may run again from its
beginning, and what fails has the HTTP status that it would have had. The bytes of events are not kept; the record of
the stream (`record.py`, which bounds it) has all that the answer is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson
from aiohttp import web

from node.plan import Refusal
from node.relay.carry.events import read
from node.relay.carry.record import Record
from node.relay.carry.whole import UnlikeError
from node.relay.headers import LOWER, HeaderList

_JSON = ("content-type", "application/json")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer."""

    refusal: Refusal
    #: An engine's own status and words: they go before ours.
    said: tuple[int, bytes] | None = None
    #: The client's time is over.
    late: bool = False


class Gathering:
    """The client's side. ``record``: the record of the stream as it is now."""

    def __init__(self, record: Callable[[], Record]) -> None:
        self._record = record
        self.failure: Failure | None = None

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is sent before the end."""

    async def write(self, data: bytes) -> None:
        """Take a piece. :raises UnlikeError: the answer will not be one that can be put together."""
        if not self._record().plain:
            raise UnlikeError("its events say more than text")

    async def write_eof(self) -> None:
        """The stream is whole."""


def own_words(event: bytes) -> tuple[int, bytes] | None:
    """Status and body of an engine's error event, as it answers where nothing is streamed; None where it names none."""
    fields = read(event) or {}
    error = fields.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return (code, orjson.dumps(fields)) if type(code) is int and 400 <= code <= 599 else None


def json_headers(headers: HeaderList, size: int) -> HeaderList:
    """A stream's headers as those of a JSON body of so many bytes."""
    kept = [item for item in headers if LOWER[item[0]] not in ("content-type", "content-length")]
    return [*kept, ("content-length", str(size)), _JSON]
