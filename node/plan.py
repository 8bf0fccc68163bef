"""The plan: where one request runs and why; and the refusal when it can run nowhere.

The plan travels from entry to target in the header `x-grapevine-plan`, base64 of msgpack. It carries no chunk
hashes: they belong to what was read of the body, a header of its own (`node.prompt.gist`). Time is carried as
seconds left, never as a date. `decode_plan` raises `RemoteError` and nothing else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from node.errors import BadRequest, RemoteError
from node.policy.base import CandidateCost
from node.quick import quick
from node.wire import MAX_MODEL_ID, NAME, integer, number, pack, text, unpack_map
from node.wire import name as node_name

#: Longest header value that we write or read.
MAX_HEADER = 4096

#: Nodes that refused a request, as far as its plan names them (the last ones), and hops it may have made: entry,
#: target, two bounces.
MAX_VISITED = 8
MAX_HOPS = 4

MAX_RID = 128
MAX_REASON = 160
MAX_CHUNKS = 1 << 20
MAX_TOKENS = 1 << 31
MAX_DEADLINE_S = 86_400.0
MAX_PATIENCE_MS = 1e9

FORCE_TARGET = "x-grapevine-force-target"
FORCE_SOURCE = "x-grapevine-force-source"
NO_PULL = "x-grapevine-no-pull"

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """How a request may be routed beyond its body: what was tried before, and what the caller forces."""

    rid: str = ""
    #: Hops made so far, and nodes that refused it.
    hops: int = 0
    visited: tuple[str, ...] = ()
    #: Nodes that had a longer queue than was known, and said so instead of taking it.
    asked: int = 0
    #: Seconds that the whole request may still take; 0 = no limit.
    deadline_s: float = 0.0
    force_target: str | None = None
    force_source: str | None = None
    no_pull: bool = False

    @classmethod
    def from_headers(cls, headers: Mapping[str, str], *, rid: str = "", deadline_s: float = 0.0) -> RouteOptions:
        """Read the client's routing headers (any mapping). Raises `BadRequest` on nonsense."""
        given = {key.lower(): value.strip() for key, value in headers.items() if len(key) < 40}
        no_pull = given.get(NO_PULL, "").lower()
        if no_pull not in ("", "0", "1", "true", "false"):
            raise BadRequest(f"{NO_PULL} must be 1 or 0")
        return cls(
            rid=rid,
            deadline_s=deadline_s,
            force_target=_forced_name(given, FORCE_TARGET),
            force_source=_forced_name(given, FORCE_SOURCE),
            no_pull=no_pull in ("1", "true"),
        )


def _forced_name(headers: Mapping[str, str], key: str) -> str | None:
    value = headers.get(key)
    if not value:
        return None
    if NAME.fullmatch(value) is None:
        raise BadRequest(f"{key} must be the name of a node")
    return value


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request runs."""

    rid: str
    model: str
    entry: str
    target: str
    #: Node to pull KV blocks from before the engine computes the request.
    source: str | None = None
    #: An operator named that node: the pull is tried for its own sake, whatever computing would take.
    forced: bool = False
    #: Chunks of the prompt's beginning to come from a cache: the source's, or without one the target's own.
    chunks: int = 0
    #: Prompt tokens predicted to come from a cache, held by the target or pulled; and of how many.
    matched_tokens: int = 0
    prompt_tokens: int = 0
    reason: str = ""
    policy: str = ""
    #: Hops including the one to the target (0 = runs where it arrived), and nodes that refused it.
    hops: int = 0
    visited: tuple[str, ...] = ()
    #: Seconds that the whole request may still take; 0 = no limit.
    deadline_s: float = 0.0
    #: Milliseconds of queue from which the target should rather say so than take it; 0 = it takes it anyway.
    patience_ms: float = 0.0
    #: Known only where it was decided: what each candidate was expected to cost, and when, in monotonic seconds.
    costs: tuple[CandidateCost, ...] = field(default=(), repr=False, compare=False)
    decided_at: float = field(default=0.0, repr=False, compare=False)

    @property
    def cost(self) -> CandidateCost | None:
        """What the target was expected to cost; None where another node decided."""
        for cost in self.costs:
            if cost.name == self.target:
                return cost
        return None

    def header(self) -> str:
        """The value of `x-grapevine-plan`, at most `MAX_HEADER` long."""
        packed = pack(
            {
                "v": _VERSION,
                "i": self.rid,
                "m": self.model,
                "e": self.entry,
                "t": self.target,
                "s": self.source or "",
                "f": int(self.forced),
                "c": self.chunks,
                "mt": self.matched_tokens,
                "pt": self.prompt_tokens,
                "w": self.reason,
                "p": self.policy,
                "h": self.hops,
                "x": list(self.visited),
                "d": self.deadline_s,
                "q": self.patience_ms,
            }
        )
        return base64.b64encode(packed).decode()


quick(RouteOptions, Plan)


_COUNTS = (("c", MAX_CHUNKS), ("mt", MAX_TOKENS), ("pt", MAX_TOKENS), ("h", MAX_HOPS), ("f", 1))


def decode_plan(header: str) -> Plan:
    """The plan in a header. Raises `RemoteError` when it is too long, malformed or out of range."""
    if len(header) > MAX_HEADER:
        raise RemoteError(f"plan: longer than {MAX_HEADER}")
    try:
        packed = base64.b64decode(header.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RemoteError("plan: not base64") from error
    fields = unpack_map(packed, MAX_HEADER, "plan")
    integer(fields, "v", 1, 1 << 16)  # newer versions only add keys
    visited = fields.get("x", [])
    if not isinstance(visited, list) or len(visited) > MAX_VISITED:
        raise RemoteError("plan: bad list of visited nodes")
    source = fields.get("s", "")
    counts = []
    for key, high in _COUNTS:  # `integer`, written out
        value = fields.get(key, 0)
        if type(value) is not int or not 0 <= value <= high:
            raise RemoteError(f"{key}: no integer within [0, {high}]")
        counts.append(value)
    chunks, matched, prompt, hops, forced = counts
    return Plan(
        rid=text(fields, "i", MAX_RID),
        model=text(fields, "m", MAX_MODEL_ID),
        entry=node_name(fields.get("e"), "plan: entry"),
        target=node_name(fields.get("t"), "plan: target"),
        source=None if source == "" else node_name(source, "plan: source"),
        forced=bool(forced),
        chunks=chunks,
        matched_tokens=matched,
        prompt_tokens=prompt,
        reason=text(fields, "w", MAX_REASON, ""),
        policy=text(fields, "p", MAX_REASON, ""),
        hops=hops,
        visited=tuple([node_name(entry, "plan: visited") for entry in visited]),
        deadline_s=number(fields, "d", 0.0, MAX_DEADLINE_S, 0.0),
        patience_ms=number(fields, "q", 0.0, MAX_PATIENCE_MS, 0.0),
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can run nowhere, in OpenAI's words."""

    status: int
    code: str
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    #: Seconds after which it may work; None = trying again is no use.
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """The JSON body of the answer."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})
