"""What the dispatcher needs from the rest of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from node.load import LoadVector
from node.plan import Plan, Refusal
from node.prompt import ParsedRequest
from node.relay.call import Call, Opened, Outcome
from node.relay.carry.lost import Lost
from node.view import ClusterView


class Sights(Protocol):
    """What whoever carries an answer needs to know of the cluster, and tells of it."""

    def view(self, parsed: ParsedRequest) -> ClusterView:
        """The candidates for a request, now."""
        ...

    def failed(self, target: str, why: str) -> None:
        """Learn that a target could not begin, or go on."""
        ...

    def row_age_s(self, target: str) -> float:
        """Seconds since a target's newest load row was true; infinite for a stranger."""
        ...


class Cluster(Sights, Protocol):
    """What the dispatcher needs to know of the cluster; `node.registry` is it."""

    def sent(self, plan: Plan) -> Callable[[bool], None]:
        """Count a request as sent to the plan's target; the returned function ends that (True: it was run)."""
        ...

    def busy(self, target: str, load: LoadVector | None) -> None:
        """Learn that a target is full."""
        ...

    def worked(self, target: str) -> None:
        """Learn that a target answered."""
        ...

    def answered(self, parsed: ParsedRequest, target: str, first: bytes) -> None:
        """Learn from the first piece of an answer without an error."""
        ...


def unnoticed() -> None:
    """Do nothing: for whoever does not care when a target has taken a request."""


class Runner(Protocol):
    """Something that can try a plan."""

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Try the plan's target once. ``admitted`` is called as soon as the target has taken the request."""
        ...


class Settling(Protocol):
    """Who can tell that something is over."""

    async def settled(self, opened: Opened) -> None:
        """Wait, bounded, until the peer has ended an attempt that was closed here."""
        ...


class Peers(Runner, Settling, Protocol):
    """The runner on peers."""


class Notes(Protocol):
    """Who is told what happened: metrics and the page."""

    def decided(self, call: Call, plan: Plan | Refusal, seconds: float) -> None:
        """A decision was made."""
        ...

    def retried(self, why: str) -> None:
        """An attempt ended without an answer: ``busy``, ``longer``, ``refused`` or ``failed``."""
        ...

    def waited(self, call: Call, seconds: float) -> None:
        """A request left the waiting room."""
        ...

    def denied(self, why: str) -> None:
        """A request was refused for want of a place or of time: ``line``, ``waited``, ``displaced``, ``deadline``."""
        ...

    def answered(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str] = ...,
    ) -> None:
        """A request was answered or refused; ``first_byte_s`` counts from its arrival.

        ``told``: what the target says about its work, headers of ours by lower-case name.
        """
        ...

    def carried(self, call: Call, lost: Lost, seconds: float, failed: str) -> None:
        """A stream that lost its leg goes on after ``seconds``, or failed to, for the reason that is given."""
        ...

    def gathered(self, result: str) -> None:
        """An answer that was to be gathered is over: ``whole``, ``failed``, or ``unlike`` what can be put together."""
        ...

    def broke(self, call: Call, plan: Plan, why: str) -> None:
        """A stream broke after its first byte (``client gone`` or the target's fault)."""
        ...
