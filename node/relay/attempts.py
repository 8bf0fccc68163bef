"""What one request has tried so far, and what it may still try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from node.admission import Ticket
from node.plan import Plan, Refusal, RouteOptions
from node.relay.call import Call
from node.relay.ports import Notes
from node.view import ClusterView

#: Refusals by full targets before the request waits.
MAX_BOUNCES = 2
#: Targets that may fail with the request in hand before it is given up: a request that crashes an engine must not be
#: carried through the whole cluster. Those that could not be reached do not count.
MAX_BROKEN = 3
#: Longest message of a refusal, characters.
_MAX_MESSAGE = 2000


class Attempts:
    """What one request has tried so far."""

    def __init__(self, call: Call, deadline: float) -> None:
        self.call = call
        #: Makes the call that is sent to a plan's target; None: it is `call` itself, whoever the target is.
        self.fit: Callable[[Plan, ClusterView], Call] | None = None
        self.deadline = deadline
        self.ticket: Ticket | None = None
        self.joined_at = 0.0
        self.stood = False
        self.must_wait = False
        self.was_busy = False
        self._bounces = 0
        self._busy: list[str] = []
        self._broken = 0
        self._failures: dict[str, str] = {}
        self._left = ""
        self._refusal: Refusal | None = None

    @property
    def bounced(self) -> bool:
        """Whether a target said that it is full since it was last our turn."""
        return bool(self._busy)

    def options(self) -> RouteOptions:
        """The routing options with what was tried."""
        left = (self._left,) if self._left else ()
        return replace(self.call.options, visited=(*self._failures, *self._busy, *left))

    def fitted(self, plan: Plan, view: ClusterView) -> Call:
        """The call for the target of a plan."""
        return self.call if self.fit is None else self.fit(plan, view)

    def bounce(self, target: str) -> None:
        """A target was full."""
        self.was_busy = True
        self._busy.append(target)
        self._bounces += 1
        self.must_wait = self._bounces > MAX_BOUNCES

    def fail(self, target: str, why: str, *, reached: bool) -> None:
        """A target could not begin. ``reached``: it had the request."""
        self._failures[target] = why
        self._broken += reached

    def leave_target(self, target: str) -> None:
        """A target that is in order wants to be rid of it: not there again, until the next one says so."""
        self._left = target

    @property
    def exhausted(self) -> bool:
        """Whether so many targets failed with this request that it may be the cause."""
        return self._broken >= MAX_BROKEN

    def wait(self, refusal: Refusal) -> None:
        """Every node was full: stand in line."""
        self._refusal = refusal
        self.must_wait = True

    def again(self) -> None:
        """It is our turn again: those that were full may have a place now."""
        self._busy.clear()
        self._bounces = 0
        self.must_wait = False

    def leave(self, notes: Notes, now: float) -> None:
        """Leave the line, if we stand in one."""
        if self.ticket is not None:
            ticket, self.ticket = self.ticket, None
            self.stood = True
            ticket.leave()
            notes.waited(now - self.joined_at)

    def explain(self, refusal: Refusal) -> Refusal:
        """Add to a refusal what failed on the way to it."""
        if not self._failures:
            return refusal
        told = "; ".join(f"{target}: {why}" for target, why in self._failures.items())
        if self.was_busy:
            return replace(refusal, message=f"{refusal.message} Failed: {told}"[:_MAX_MESSAGE])
        return replace(refusal, status=503, code="no_node_answered", type="server_error", message=_failed(told))

    def broken(self) -> Refusal:
        """The refusal of a request that several targets failed with."""
        told = "; ".join(f"{target}: {why}" for target, why in self._failures.items())
        return Refusal(503, "no_node_answered", _failed(told), type="server_error")

    def too_busy(self, why: str) -> Refusal:
        """The refusal of a request that waited long enough."""
        after = self._refusal.retry_after_s if self._refusal is not None else None
        message = f"All nodes that serve this model are full. {why} Try again later."
        return Refusal(429, "cluster_busy", message, type="rate_limit_error", retry_after_s=after or 1)


def _failed(told: str) -> str:
    return f"No node that serves this model could run the request ({told})."[:_MAX_MESSAGE]
