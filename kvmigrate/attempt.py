"""One attempt of a pull at one of its sources."""

from __future__ import annotations

from .fetch import Fetching
from .pull_types import Part, Reason, Source
from .transport import Transport


class Attempt:
    """An attempt's progress, kept apart so that it can be told after a failure too."""

    def __init__(self, number: int, source: Source, started: float, *, pin: bool = True) -> None:
        self.number = number
        self.pin = pin  #: blocks may be read where they lie, if that is on this host
        self.source = source
        self.started = started
        self.looked_up: float | None = None
        self.joined = False
        self.idle_s = 0.0
        self.fetching: Fetching | None = None
        self.transport: Transport | None = None  #: while blocks may come over it
        self.ended = False  #: we closed the connection
        self.way = ""
        self.detail = ""

    def cut(self) -> None:
        """Close the connection, which wakes the thread that waits for it."""
        if self.transport is not None:
            self.ended = True
            self.transport.close()

    def part(self, reason: Reason, now: float, *, cut: bool) -> Part:
        """What it came to."""
        fetching = self.fetching
        return Part(
            address=self.source.address,
            reason=reason,
            blocks=fetching.blocks if fetching else 0,
            bytes=fetching.bytes if fetching else 0,
            seconds=now - self.started - self.idle_s,
            lookup_s=(self.looked_up or now) - self.started,
            corrupt=len(fetching.corrupt) if fetching else 0,
            way=self.way,
            detail=self.detail,
            cut=cut,
        )
