"""What a worker says to the main process.

A message is a tuple with named fields whose types are checked by the annotations here when it comes in; `packing.py`
makes bytes of it. Times are monotonic seconds, which all processes of a host share. What is asked for has an ``id``
that the worker chooses and that is used once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from node.relay.attempts import Past
from node.workers.forms import Options, Pairs, Planned, Read


class Ready(NamedTuple):
    """It serves from now on."""

    pid: int


class Ask(NamedTuple):
    """Find a target for a client's request and take a place there; `Refuse`, `TryLocal` or `TryPeer` follow."""

    id: int
    #: The first leg of an answer: whoever has a limit of tokens is charged for it.
    first: bool
    #: Whose it is, by its API key; "" where nobody needs one.
    key_of: str
    #: Who it is for fairness.
    client: str
    method: str
    target: str
    rid: str
    priority: int
    arrived: float
    carries: bool
    #: A digest of the body.
    mark: int
    #: The body depends on the target: say what its model can.
    fits: bool
    read: Read
    options: Options
    past: Past


class Serve(NamedTuple):
    """Is this call of a peer genuine, and for us? `Served` or `GuestRefused` follow."""

    id: int
    method: str
    target: str
    rid: str
    remote: str | None
    arrived: float
    ours: Pairs


class Begin(NamedTuple):
    """Run the peer's request that `Serve` named; `TryLocal`, `GuestBusy` or `GuestRefused` follow."""

    id: int
    rid: str
    target: str
    method: str
    carries: bool
    leg: str
    read: Read


class Tried(NamedTuple):
    """What came of the try ``number``: an answer with its first piece, or an error before that."""

    id: int
    number: int
    #: "" for an answer; else how it failed: refused, broken, silent or stalled.
    fault: str
    why: str
    status: int
    #: The body is whole already.
    whole: bool
    #: Its client gets it in one piece when it is over (`node.relay.carry.entry`): `Counted` says with which status.
    gathered: bool
    #: Events within the first piece; and of some answers their beginning.
    events: int
    first: bytes
    #: Headers of ours.
    ours: Pairs


class Moved(NamedTuple):
    """What came of answers since it was last told: (id, events, time of the last piece, waiting since or 0)."""

    answers: tuple[tuple[int, int, float, float], ...]


class End(NamedTuple):
    """An answer is over, or a request is not wanted any more."""

    id: int
    whole: bool
    events: int
    at: float


class Enter(NamedTuple):
    """A client with a key has come: may it have one more request? `Entered` follows."""

    id: int
    name: str
    at: float


class Left(NamedTuple):
    """What `Enter` let in is over."""

    id: int
    took_s: float


class AskKnown(NamedTuple):
    """Which of these names are nodes of the cluster? `Known` follows."""

    id: int
    names: tuple[str, ...]


class AskElsewhere(NamedTuple):
    """Would another node be asked to go on with this request? `Elsewhere` follows."""

    id: int
    read: Read
    options: Options


class Settle(NamedTuple):
    """Wait until the peer of a plan has ended what it ran under this name; `Settled` follows."""

    id: int
    plan: Planned
    leg: str


class Note(NamedTuple):
    """Something to be counted, by `what`."""

    what: str
    word: str
    more: str = ""


class Refused(NamedTuple):
    """A client was told that nobody runs its request."""

    rid: str
    model: str | None
    stream: bool
    arrived: float
    status: int


class Counted(NamedTuple):
    """An answer that was gathered, or that of another leg, has gone to its client."""

    id: int
    status: int


class Broke(NamedTuple):
    """An answer broke off."""

    rid: str
    why: str


class Carried(NamedTuple):
    """A stream that lost its leg goes on, or cannot."""

    cause: str
    seconds: float
    failed: str


class Pong(NamedTuple):
    """All that was said before `Ping` is said; requests that are answered now, connections, and those ever taken."""

    number: int
    answering: int
    connections: int
    taken: int


FROM_WORKER: tuple[type[Any], ...] = (
    Ready,
    Ask,
    Serve,
    Begin,
    Tried,
    Moved,
    End,
    Enter,
    Left,
    AskKnown,
    AskElsewhere,
    Settle,
    Note,
    Refused,
    Counted,
    Broke,
    Carried,
    Pong,
)
