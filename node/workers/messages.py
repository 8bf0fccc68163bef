"""What the main process and its workers say to each other: msgpack, one message a frame.

`decode` raises `RemoteError` and nothing else. A message is a tuple with named fields whose types are checked by the
annotations here; numbers and texts are bounded by the frame. Times are monotonic seconds, which all processes of a host
share. What is asked for has an ``id`` that the worker chooses and that is used once.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack

from node.errors import RemoteError
from node.relay.attempts import Past

#: Longest message in bytes: the chunk hashes of the longest prompt, and some room.
MAX_MESSAGE = 8 * 1024 * 1024
#: Nested arrays and maps are shorter than this.
_MAX_ITEMS = 1 << 20

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
_NUMBERS = {kind: number for number, kind in enumerate((*FROM_WORKER, *TO_WORKER))}

_Check = Callable[[Any], Any]


def encode(message: Any) -> bytes:
    """Pack one of the messages above.

    :raises RemoteError: it is too long, or holds a number that cannot be told.
    """
    try:
        data = msgpack.packb((_NUMBERS[type(message)], *message), unicode_errors="surrogateescape")
    except (OverflowError, ValueError) as error:
        raise RemoteError(f"worker: cannot be told ({error})") from error
    if len(data) > MAX_MESSAGE:
        raise RemoteError(f"worker: a message of {len(data)} bytes")
    return bytes(data)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Unpack a message. :raises RemoteError: it is none."""
    try:
        unpacked = msgpack.unpackb(
            data,
            use_list=False,
            unicode_errors="surrogateescape",
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
        build = _BUILDS[unpacked[0]]
    except Exception as error:  # msgpack raises half a dozen unrelated kinds
        raise RemoteError(f"worker: malformed ({type(error).__name__})") from error
    return build(unpacked[1:])


def _wrong(what: str) -> RemoteError:
    return RemoteError(f"worker: {what} is not what it should be")


class _Kind:
    """How one class of messages is made of what was unpacked.

    The types of all fields together are looked up: those that came before and were right are right again, and mostly
    all that there is to see. Only fields that hold something are looked into each time.
    """

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind)
        self._kind = kind
        self._allowed = [_types_of(hints[name]) for name in kind._fields]
        built = ((place, _check_of(hints[name])) for place, name in enumerate(kind._fields))
        self._inside = [(place, check) for place, check in built if check is not None]
        self._right: set[tuple[type[Any], ...]] = set()

    def build(self, fields: Any) -> Any:
        if type(fields) is not tuple:
            raise _wrong("a group of fields")
        shape = tuple(map(type, fields))
        if shape not in self._right:
            self._look(shape)
        if self._inside:
            values = list(fields)
            for place, check in self._inside:
                if (value := values[place]) is not None and value != ():
                    values[place] = check(value)
            fields = values
        return tuple.__new__(self._kind, fields)

    def _look(self, shape: tuple[type[Any], ...]) -> None:
        if len(shape) != len(self._allowed):
            raise _wrong("the number of fields")
        for allowed, found in zip(self._allowed, shape, strict=True):
            if found not in allowed:
                raise _wrong(f"a field of {self._kind.__name__}")
        if len(self._right) < _MAX_SHAPES:
            self._right.add(shape)


#: Combinations of types that one class is remembered to have had.
_MAX_SHAPES = 256
_NONE = type(None)


def _types_of(hint: Any) -> frozenset[type[Any]]:
    """The types that a field may have when it was unpacked."""
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset().union(*(_types_of(item) for item in get_args(hint)))
    if hint is _NONE:
        return frozenset((_NONE,))
    if get_origin(hint) is tuple or issubclass(hint, tuple):
        return frozenset((tuple,))
    return frozenset((float, int) if hint is float else (hint,))


def _check_of(hint: Any) -> _Check | None:
    """What a field has to be looked into for; None where its type says all. It has that type, and is not empty."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (one,) = [item for item in inner if item is not _NONE]
        return _check_of(one)
    if origin is not tuple:
        return _Kind(hint).build if issubclass(hint, tuple) else None
    if inner[-1] is Ellipsis:
        return _many(inner[0])
    return _fixed(inner)


def _many(hint: Any) -> _Check:
    allowed, check = _types_of(hint), _check_of(hint)

    def build(value: Any) -> Any:
        if not allowed.issuperset(map(type, value)):
            raise _wrong("an item of a list")
        return value if check is None else tuple([check(item) for item in value])

    return build


def _fixed(hints: tuple[Any, ...]) -> _Check:
    allowed = [_types_of(hint) for hint in hints]

    def build(value: Any) -> Any:
        if len(value) != len(allowed) or not all(type(item) in one for item, one in zip(value, allowed, strict=True)):
            raise _wrong("an item of a group")
        return value

    return build


_BUILDS = {number: _Kind(kind).build for kind, number in _NUMBERS.items()}
