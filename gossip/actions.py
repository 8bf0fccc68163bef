"""What goes into the endpoint and what it wants done. Both are immutable facts."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.events import GossipEvent
from gossip.identity import Address

# --- in -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The sockets are bound and `Endpoint.identity` is reachable: begin."""


@dataclass(frozen=True, slots=True)
class DatagramReceived:
    """One UDP datagram."""

    source: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamRequested:
    """A peer opened a stream and sent one whole frame. Answered by `ReplyStream` or `CloseStream` at once."""

    stream: int
    source: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamReplied:
    """The reply frame to an `OpenStream`."""

    session: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """An `OpenStream` came to nothing: refused, cut, or past its deadline."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SeedsAdded:
    """Addresses to dial, now and again for as long as nobody there is a member. Hosts may be names."""

    seeds: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class SeedsRemoved:
    """Addresses that a name no longer stands for: not dialled for their own sake any more."""

    seeds: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class RowSet:
    """The node measured itself: its new load row."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class KeyPut:
    """The node's own slow state: set a key."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyDeleted:
    """The node's own slow state: remove a key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Say goodbye. From here on the endpoint answers, but refutes nothing and dials nobody."""


Input = (
    Started
    | DatagramReceived
    | StreamRequested
    | StreamReplied
    | StreamFailed
    | SeedsAdded
    | SeedsRemoved
    | RowSet
    | KeyPut
    | KeyDeleted
    | LeaveRequested
)

# --- out ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendDatagram:
    """Send one UDP datagram; losing it is fine."""

    to: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Connect, send one frame, read one frame, close. Exactly one `StreamReplied` or `StreamFailed` must follow
    within `timeout_s` seconds.
    """

    session: int
    to: Address
    data: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ReplyStream:
    """Send this frame on a stream that a peer opened, then close it."""

    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream that a peer opened, without an answer."""

    stream: int


@dataclass(frozen=True, slots=True)
class Notify:
    """Hand this to the listener."""

    event: GossipEvent


@dataclass(frozen=True, slots=True)
class RowsReceived:
    """Load rows of peers have come. `Endpoint.take_rows` gives them; until it is called, this does not come again.

    So the rows of several datagrams are read at once, by whoever wants them: rows are most of what arrives.
    """


Action = SendDatagram | OpenStream | ReplyStream | CloseStream | Notify | RowsReceived
