"""The vocabulary of the wire. What each field may hold is checked by `decode.py` and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.limits import MAX_COUNTER
from gossip.member import MemberState

# --- failure detection ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there, and are you `target`? Answered by `Ack` with the same `seq`."""

    seq: int
    target: str


@dataclass(frozen=True, slots=True)
class Ack:
    """`name` is there. If that is not whom the ping was for, the address has a new tenant."""

    seq: int
    name: str


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Please ping `target` for me; answered by its `Ack`, or by `Nack` when it stays silent."""

    seq: int
    target: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Nack:
    """I am well and asked, but the target is silent."""

    seq: int


# --- membership -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alive:
    """`name` runs at this address, with this meta. Only ever originated by the node itself."""

    name: str
    incarnation: int
    host: str
    port: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Suspect:
    """`accuser` got no sign of life from `name` at this incarnation."""

    name: str
    incarnation: int
    accuser: str


@dataclass(frozen=True, slots=True)
class Dead:
    """The suspicion against `name` at this incarnation ran out unrefuted at `accuser`."""

    name: str
    incarnation: int
    accuser: str


@dataclass(frozen=True, slots=True)
class Left:
    """`name` said goodbye."""

    name: str
    incarnation: int


Rumour = Alive | Suspect | Dead | Left


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One line of the member table in a `PushPull`, with how far the sender is in that member's slow state."""

    name: str
    incarnation: int
    host: str
    port: int
    meta: bytes
    state: MemberState
    slow_version: int


@dataclass(frozen=True, slots=True)
class PushPull:
    """The sender's whole member table, itself first. Streams only; request and reply look alike."""

    members: tuple[MemberRecord, ...]


# --- load rows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """The latest load row of `name`, as its owner wrote it. Made by `encode.make_row` and `decode.decode_row` only."""

    name: str
    boot: int
    seq: int
    payload: bytes
    #: The same as bytes: whoever passes the row on sends these as they are.
    encoded: bytes
    #: Boot and sequence number as one number, for the order of an owner's rows.
    stamp: int


def row_stamp(boot: int, seq: int) -> int:
    """Give `Row.stamp`."""
    return boot * MAX_COUNTER + seq


@dataclass(frozen=True, slots=True)
class Rows:
    """Load rows, and how old each was when this message was sent, in units of `limits.AGE_UNIT_S`."""

    ages: tuple[int, ...]
    rows: tuple[Row, ...]


# --- network coordinates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where `name` lies among the others, as of its `seq`-th change; the bytes of a `gossip.coordinate.Coordinate`."""

    name: str
    boot: int
    seq: int
    coordinate: bytes


# --- slow state -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowMark:
    """The sender holds `name`'s slow state, of this boot, complete up to `version`."""

    name: str
    boot: int
    version: int


@dataclass(frozen=True, slots=True)
class SlowDigest:
    """Some of the sender's marks: its own, those that moved last, and a rotating share of the rest."""

    marks: tuple[SlowMark, ...]


@dataclass(frozen=True, slots=True)
class SlowPull:
    """Send me what follows `base` of `name`'s slow state; `floor` as in `SlowDelta`."""

    name: str
    boot: int
    base: int
    floor: int


@dataclass(frozen=True, slots=True)
class SlowDelta:
    """Every entry with base < version <= upto, by version: (key, value or None for deleted, version).

    `latest`: how far the sender is. `floor`: tombstones up to this version are collected, so a copy that has neither
    reached it nor started after it must begin again from base 0.
    """

    name: str
    boot: int
    base: int
    upto: int
    latest: int
    floor: int
    entries: tuple[tuple[bytes, bytes | None, int], ...]


Part = (
    Ping
    | Ack
    | PingRequest
    | Nack
    | Alive
    | Suspect
    | Dead
    | Left
    | PushPull
    | Rows
    | Place
    | SlowDigest
    | SlowPull
    | SlowDelta
)


@dataclass(frozen=True, slots=True)
class Packet:
    """One datagram or stream frame: who sends it, in which incarnation, and its parts in order."""

    sender: str
    incarnation: int
    parts: tuple[Part, ...]
