"""One client's request on its way: what came, what it is called, and how an attempt to run it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.load import LoadVector
from node.plan import Plan, RouteOptions
from node.prompt import ParsedRequest
from node.quick import quick
from node.relay.headers import HeaderList
from node.relay.upstream import UpstreamAnswer

if TYPE_CHECKING:
    from node.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was read whole. Bytes and headers are the client's; hop-by-hop and our own are gone."""

    method: str
    #: Raw path with its query, beginning with ``/v1/``, ``/tokenize`` or ``/detokenize``.
    target: str
    headers: HeaderList
    parsed: ParsedRequest
    #: The client's X-Request-Id, or ours.
    rid: str
    options: RouteOptions
    #: Monotonic seconds at which its head arrived.
    arrived: float
    #: Whoever gets the answer can carry it to another engine: it takes token ids out and understands our comments.
    carries: bool = False
    #: Whose it is, for fairness: a digest of the API key, or the client's address.
    client: str = ""
    #: Lower is earlier.
    priority: int = 0
    #: Its span, where traces are kept (`node.tracing`).
    trace: Trace | None = None

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds by which all of it must be over; None = the client set no time."""
        return self.arrived + self.options.deadline_s if self.options.deadline_s else None


quick(Call)


def _nothing(piece: bytes) -> None:
    return None


def _finished(whole: bool) -> None:
    return None


@dataclass(slots=True)
class Opened:
    """An attempt that has its first byte: from here on, no other node can take over unnoticed."""

    plan: Plan
    upstream: UpstreamAnswer
    first: bytes
    #: Our own headers for the answer.
    headers: HeaderList = field(default_factory=list)
    #: The peer's name for this attempt, where it runs on one that we can carry it from.
    leg: str = ""
    #: Called with every piece of the answer, before it is written.
    on_piece: Callable[[bytes], None] = _nothing
    #: Called exactly once at the end, True when the answer was whole. Gives back what the attempt holds.
    on_end: Callable[[bool], None] = _finished

    def end(self, whole: bool) -> None:
        """End the attempt, whatever happened to it."""
        on_end, self.on_end = self.on_end, _finished
        self.upstream.close()
        on_end(whole)


@dataclass(frozen=True, slots=True)
class Busy:
    """The target is full (or draining) and said so at once, with its fresh load where it gave one.

    ``longer``: it has room, but a longer queue than the plan was made for.
    """

    target: str
    load: LoadVector | None = None
    longer: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The target could not begin. ``why`` is for people; ``reached`` is False when nothing was sent to it.

    ``innocent``: it refused this very request, and would take another one.
    """

    target: str
    why: str
    reached: bool
    innocent: bool = False


Outcome = Opened | Busy | Failed
