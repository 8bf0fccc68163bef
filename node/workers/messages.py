"""What the main process and its workers say to each other; `packing.py` makes bytes of it.

A message is a tuple with named fields whose types are checked by the annotations here when it comes in. Times are
monotonic seconds, which all processes of a host share. What is asked for has an ``id`` that the worker chooses and that
is used once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from node.relay.attempts import Past

Pairs = tuple[tuple[str, str], ...]
"""Headers in order, or any other names with values."""


# --- requests and plans in the form in which they travel (`told.py`)


class Read(NamedTuple):
    """What a worker has read of a request: `ParsedRequest` without its body."""

    path: str
    model: str | None
    stream: bool
    #: 8 bytes a chunk, in the order of this host's bytes.
    chunks: bytes
    prompt_bytes: int
    est_prompt_tokens: int
    exact_tokens: bool
    max_tokens: int | None
    has_kv_params: bool
    is_json: bool
    prompts: int
    answers: int
    least_tokens: int
    refers_to: str | None
    continues: bool
    #: `Carriage`: reasons why not, by tokens and again; own_ids, ask_ids, strip, gathers.
    carriage: tuple[str, str, bool, bool, bool, bool] | None


class Options(NamedTuple):
    """`RouteOptions`."""

    rid: str
    hops: int
    visited: tuple[str, ...]
    asked: int
    deadline_s: float
    force_target: str | None
    force_source: str | None
    no_pull: bool


class Planned(NamedTuple):
    """`Plan` without its costs."""

    rid: str
    model: str
    entry: str
    target: str
    source: str | None
    chunks: int
    matched_tokens: int
    prompt_tokens: int
    reason: str
    policy: str
    hops: int
    visited: tuple[str, ...]
    deadline_s: float
    patience_ms: float


# --- from a worker


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


# --- to a worker


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
