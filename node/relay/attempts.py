"""What one request has tried so far, and what it may still try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from node.forecast import MAX_WAIT_S
from node.outlook import Outlook
from node.plan import Plan, Refusal, RouteOptions
from node.relay.call import Call
from node.relay.ports import Notes
from node.turns import Denial, Entrance, Ticket
from node.view import ClusterView

#: Refusals by full targets before the request waits.
MAX_BOUNCES = 2
#: Targets that may fail with the request in hand before it is given up: a request that crashes an engine must not be
#: carried through the whole cluster. Those that could not be reached do not count.
MAX_BROKEN = 3
#: Time left that is told to a target, seconds, when there is none: 0 would mean that there is no limit.
LEAST_S = 0.001
#: Longest message of a refusal, characters.
_MAX_MESSAGE = 2000


class Past(NamedTuple):
    """What a request has tried, as plain values: see `Attempts`."""

    avoided: tuple[str, ...]
    until: float
    stood: bool
    keeps_turn: bool
    must_wait: bool
    was_busy: bool
    bounces: int
    asked: int
    busy: tuple[str, ...]
    broken: int
    failures: tuple[tuple[str, str], ...]
    left: str
    waited_s: float


class Attempts:
    """What one request has tried so far. ``avoided``: where it must not run, whatever happens."""

    def __init__(self, call: Call, *, avoided: Sequence[str] = ()) -> None:
        self.call = call
        self._avoided = avoided
        #: Makes the call that is sent to a plan's target; None: it is `call` itself, whoever the target is.
        self.fit: Callable[[Plan, ClusterView], Call] | None = None
        #: Monotonic seconds until which a place is waited for, where that is less than usual.
        self.until = float("inf")
        self.ticket: Ticket | None = None
        #: Seconds spent in line.
        self.waited_s = 0.0
        self.stood = False
        #: Its turn is not over: the target that it tried has failed, and another one may have a place.
        self.keeps_turn = False
        self.must_wait = False
        self.was_busy = False
        self._bounces = 0
        self._asked = 0
        self._busy: list[str] = []
        self._broken = 0
        self._failures: dict[str, str] = {}
        self._left = ""

    def past(self) -> Past:
        """What was tried, for another process that goes on with it."""
        return Past(
            tuple(self._avoided),
            self.until,
            self.stood,
            self.keeps_turn,
            self.must_wait,
            self.was_busy,
            self._bounces,
            self._asked,
            tuple(self._busy),
            self._broken,
            tuple(self._failures.items()),
            self._left,
            self.waited_s,
        )

    def adopt(self, past: Past) -> None:
        """Go on from what another process has tried with this request."""
        self._avoided = past.avoided
        self.until = past.until
        self.stood = past.stood
        self.keeps_turn = past.keeps_turn
        self.must_wait = past.must_wait
        self.was_busy = past.was_busy
        self._bounces = past.bounces
        self._asked = past.asked
        self._busy = list(past.busy)
        self._broken = past.broken
        self._failures = dict(past.failures)
        self._left = past.left
        self.waited_s = past.waited_s

    @property
    def probing(self) -> bool:
        """Whether to try even those that seem to be full."""
        return self.ticket is not None and self.ticket.probing

    @property
    def bounced(self) -> bool:
        """Whether a target said that it is full since it was last our turn."""
        return bool(self._busy)

    def options(self, now: float, *, full: Sequence[str] = ()) -> RouteOptions:
        """The routing options with what was tried, what seems to be ``full``, and the time that is left."""
        options = self.call.options
        if not (
            self._failures or full or self._busy or self._left or self._asked or options.deadline_s or options.visited
        ):
            return options  # nearly always: nothing was tried yet, and there is no hurry
        gone = (self._left,) if self._left else ()
        visited = dict.fromkeys((*self._avoided, *self._failures, *full, *self._busy, *gone))
        left = self.time_left(now)
        return replace(
            options,
            visited=tuple(visited),
            asked=self._asked,
            deadline_s=0.0 if left is None else max(left, LEAST_S),
        )

    def time_left(self, now: float) -> float | None:
        """Seconds until the client's deadline; None without one."""
        deadline = self.call.deadline
        return None if deadline is None else deadline - now

    def fitted(self, plan: Plan, view: ClusterView) -> Call:
        """The call for the target of a plan."""
        return self.call if self.fit is None else self.fit(plan, view)

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
        self.keeps_turn = True
        self._failures[target] = why
        self._broken += reached

    def leave_target(self, target: str) -> None:
        """A target that is in order wants to be rid of it: not there again, until the next one says so."""
        self._left = target

    @property
    def exhausted(self) -> bool:
        """Whether so many targets failed with this request that it may be the cause."""
        return self._broken >= MAX_BROKEN

    def entrance(self, line: str, outlook: Outlook, now: float) -> Entrance:
        """Who wants to stand in line."""
        left = self.time_left(now)
        return Entrance(
            line,
            self.call.client,
            self.mark(),
            self.call.priority,
            first=self.stood,
            usual_s=outlook.usual_s,
            guess_per_s=outlook.places_per_s,
            patience_s=None if left is None else left - outlook.usual_s,
        )

    def mark(self) -> int:
        """What the request is known by when it comes again."""
        return xxh3_64_intdigest(self.call.parsed.body)

    def wait_left(self, now: float) -> float:
        """Seconds that it may still stand in line."""
        joined = now if self.ticket is None else self.ticket.joined_at
        left = self.time_left(now)
        return min(joined + MAX_WAIT_S - now if left is None else left, self.until - now)

    def again(self) -> None:
        """It is our turn again: those that were full may have a place now."""
        self._busy.clear()
        self._bounces = self._asked = 0
        self.must_wait = self.keeps_turn = False

    def anew(self, call: Call) -> None:
        """Ask for all of it once more, with what was tried so far."""
        self.call, self.fit, self.until = call, None, float("inf")
        self.stood = True
        self.again()

    def leave(self, notes: Notes, now: float, *, served: bool = False) -> None:
        """Leave the line, if we stand in one. ``served``: a target has taken the request."""
        if self.ticket is not None:
            ticket, self.ticket = self.ticket, None
            self.stood = True
            ticket.leave(served=served)
            self.waited_s += now - ticket.joined_at
            notes.waited(self.call, now - ticket.joined_at)

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

    def too_late(self) -> Refusal:
        """The refusal of a request whose time is over."""
        message = f"The request was not answered within the {self.call.options.deadline_s:g} s that it was given."
        return Refusal(504, "deadline_exceeded", message, type="timeout_error", param="x-request-timeout")


def too_busy(denial: Denial) -> Refusal:
    """The refusal of a request that cannot wait (any longer)."""
    message = f"All nodes that serve this model are full. {denial.why} Try again after {denial.after_s} s."
    return Refusal(429, "cluster_busy", message, type="rate_limit_error", retry_after_s=denial.after_s)


def _failed(told: str) -> str:
    return f"No node that serves this model could run the request ({told})."[:_MAX_MESSAGE]
