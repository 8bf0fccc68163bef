"""What gossip tells its user: immutable facts, in the order in which they became true."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.member import MemberState, MemberView


@dataclass(frozen=True, slots=True)
class RowView:
    """The latest load row of one node. `age_s`: seconds since its owner set it, without any wall clock."""

    name: str
    incarnation: int
    seq: int
    payload: bytes
    age_s: float


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member appeared (`previous` None), changed state, restarted (same state, higher incarnation), has new meta, or
    was heard by ourselves for the first time (`view.verified`).
    """

    view: MemberView
    previous: MemberState | None


@dataclass(frozen=True, slots=True)
class RowReceived:
    """A newer load row of a peer."""

    row: RowView


@dataclass(frozen=True, slots=True)
class SlowChanged:
    """Keys of a peer's slow state that changed, oldest change first; None means deleted."""

    name: str
    changes: tuple[tuple[bytes, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class SlowReset:
    """Every key of that owner is gone: it died, left, restarted, or has to be read anew."""

    name: str


@dataclass(frozen=True, slots=True)
class NameConflict:
    """Two running nodes claim one name. `host`, `port`: the one that is not accepted here, or, if the name is ours,
    the other one. Repeated at most every few seconds while it lasts.
    """

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class IncarnationRaised:
    """Our boot counter was behind what peers remember of us (its file was lost): it is now `incarnation`.

    Persist it with `gossip.boot.raise_to`.
    """

    incarnation: int


GossipEvent = MemberChanged | RowReceived | SlowChanged | SlowReset | NameConflict | IncarnationRaised
