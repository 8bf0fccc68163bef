"""What one request has tried so far, and what it may still try."""

from __future__ import annotations

from dataclasses import replace

from node.admission import Ticket
from node.plan import Refusal, RouteOptions
from node.relay.call import Call
from node.relay.ports import Notes

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
        self.deadline = deadline
        self.ticket: Ticket | None = None
        self.joined_at = 0.0
        self.stood = False
        self.must_wait = False
        self.was_busy = False
        self._bounces = 0
        self._asked = 0
        self._busy: list[str] = []
        self._broken = 0
        self._failures: dict[str, str] = {}
        self._refusal: Refusal | None = None

    @property
    def bounced(self) -> bool:
        """Whether a target said that it is full since it was last our turn."""
        return bool(self._busy)

    def options(self) -> RouteOptions:
        """The routing options with what was tried."""
        return replace(self.call.options, visited=(*self._failures, *self._busy), asked=self._asked)

    def bounce(self, target: str) -> None:
        """A target was full."""
        self.was_busy = True
        self._busy.append(target)
        self._bounces += 1
        self.must_wait = self._bounces > MAX_BOUNCES

    def longer(self) -> None:
        """A target has a longer queue than was known: it stays a candidate, with the load that it told."""
        self._asked += 1

    def fail(self, target: str, why: str, *, reached: bool) -> None:
        """A target could not begin. ``reached``: it had the request."""
        self._failures[target] = why
        self._broken += reached

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
        self._bounces = self._asked = 0
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
