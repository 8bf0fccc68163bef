"""What the main process says to a worker.

A message is a tuple with named fields whose types are checked by the annotations here when it comes in; `packing.py`
makes bytes of it. Times are monotonic seconds, which all processes of a host share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from node.relay.attempts import Past
from node.workers.forms import Pairs, Planned


class Hello(NamedTuple):
    """What a worker needs to begin. Settings and deadlines as JSON, so that they are checked by their own classes."""

    number: int
    settings: bytes
    deadlines: bytes
    engine_base: str
    engine_socket: str | None
    engine_key: str
    keys: tuple[bytes, ...]


class TryLocal(NamedTuple):
    """Make the exchange with the own engine. `Tried` is the answer."""

    id: int
    number: int
    plan: Planned
    #: Longest sequence and size of a block of the target's model, where `Ask.fits`.
    context: int
    block: int
    #: `Opened` follows when there is an answer: it has headers that are not known yet.
    wait: bool
    #: What goes into the body (`node.relay.local.Additions`).
    insert: str | None
    hold_s: float
    ask_ids: bool
    gather: bool


class TryPeer(NamedTuple):
    """Make the exchange with a peer, that gossip told so of itself."""

    id: int
    number: int
    plan: Planned
    context: int
    block: int
    wait: bool
    leg: str
    http: str
    tls: bool
    boot: str


class Cancel(NamedTuple):
    """The try ``number`` took too long, or its target is gone."""

    id: int
    number: int


class Opened(NamedTuple):
    """The answer may go to the client, with these headers of ours."""

    id: int
    headers: Pairs


class Refuse(NamedTuple):
    """Nobody runs it."""

    id: int
    status: int
    code: str
    message: str
    type: str
    param: str | None
    retry_after_s: int | None
    past: Past


class Deny(NamedTuple):
    """A client has reached a limit; None = it would never fit."""

    id: int
    message: str
    after_s: int | None


class Served(NamedTuple):
    """The call is genuine; what its body has to be, empty where nothing is signed."""

    id: int
    plan: Planned
    body_key: bytes
    body_tag: bytes


class GuestRefused(NamedTuple):
    """The peer's request is refused."""

    id: int
    status: int
    code: str
    message: str


class GuestBusy(NamedTuple):
    """There is no place for a peer's request; the load, packed."""

    id: int
    longer: bool
    load: bytes


class Entered(NamedTuple):
    """The client may; or there is no such client any more (``gone``), or a limit (``message``)."""

    id: int
    gone: bool
    message: str
    after_s: int | None


class Known(NamedTuple):
    """Those that are nodes."""

    id: int
    names: tuple[str, ...]


class Elsewhere(NamedTuple):
    """Whether another node would be asked."""

    id: int
    yes: bool


class Settled(NamedTuple):
    """The peer has ended it, or was waited for long enough."""

    id: int


class Fail(NamedTuple):
    """An answer is given up: its engine or peer is silent (``fault`` as in `Tried`)."""

    id: int
    fault: str
    why: str


class Down(NamedTuple):
    """A peer was declared dead."""

    name: str


class Ages(NamedTuple):
    """How old the load rows are of the peers that run something for this worker."""

    at: float
    ages: tuple[tuple[str, float], ...]


class Keys(NamedTuple):
    """The ring has changed."""

    keys: tuple[bytes, ...]


class Reread(NamedTuple):
    """Read a file again (`node.reload`), then say `Pong` with this number."""

    number: int
    what: str


class MoveAll(NamedTuple):
    """Ask every stream of our engine to go on elsewhere."""


class EndStreams(NamedTuple):
    """End every stream of a client with an error event: the node is about to be gone."""

    why: str


class Finish(NamedTuple):
    """Take no connection any more; end those that are idle, and the others with their answers."""


class Close(NamedTuple):
    """End now."""


class Ping(NamedTuple):
    """Say `Pong` with this number. The node's load, packed."""

    number: int
    load: bytes


TO_WORKER: tuple[type[Any], ...] = (
    Hello,
    TryLocal,
    TryPeer,
    Cancel,
    Opened,
    Refuse,
    Deny,
    Served,
    GuestRefused,
    GuestBusy,
    Entered,
    Known,
    Elsewhere,
    Settled,
    Fail,
    Down,
    Ages,
    Keys,
    Reread,
    MoveAll,
    EndStreams,
    Finish,
    Close,
    Ping,
)
