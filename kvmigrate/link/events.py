"""What the node hears of its engine through the link, besides the engine's own messages."""

from __future__ import annotations

from dataclasses import dataclass

from . import messages as m


@dataclass(frozen=True, slots=True)
class Gone:
    """A half of the connector went away."""

    role: m.Role
    rank: int
    why: str


LinkEvent = m.FromEngine | Gone


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """Who is connected. `why` is empty when blocks can be stored and loaded, and says what is missing otherwise."""

    scheduler: bool
    workers: tuple[int, ...]
    engine: m.Hello | None  #: the last worker's hello
    why: str
    refused: int  #: messages and connections refused since the start
    stored: int  #: blocks (of one rank) stored by engines
