"""What must hold in every run, whatever the faults. Each checker has a test that shows it bite.

A checker sees every event of every listener, and is asked now and then to look at everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gossip.errors import InvariantError
from gossip.events import GossipEvent, MemberChanged, SlowChanged, SlowReset
from gossip.member import MemberState
from gossip.simulator.node import INBOX, SimNode

#: Timers that an endpoint has beside one per member under suspicion, two per probe, one per relay and session: the
#: five periodic ones, and room for what a plane may add.
FIXED_TIMERS = 8


class Violation(AssertionError):
    """A property that must always hold did not."""


class Checker(Protocol):
    """One property of the whole cluster."""

    def observe(self, node: SimNode, event: GossipEvent, now: float) -> None:
        """A listener was told something. :raises Violation: it must not have been."""

    def inspect(self, nodes: Mapping[str, SimNode], now: float) -> None:
        """Look at every running node. :raises Violation: the state must not be."""


def standard_checkers() -> list[Checker]:
    """All of them, new."""
    return [IncarnationMonotone(), NoResurrection(), NeverDeadToItself(), BoundedQueues(), EventsAddUp()]


class _Quiet:
    """A checker that needs only one of the two."""

    def observe(self, node: SimNode, event: GossipEvent, now: float) -> None:
        """Nothing to see."""

    def inspect(self, nodes: Mapping[str, SimNode], now: float) -> None:
        """Nothing to see."""


class IncarnationMonotone(_Quiet):
    """A member's incarnation never falls at an observer, unless the observer had forgotten it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[int, int]] = {}

    def observe(self, node: SimNode, event: GossipEvent, now: float) -> None:
        """Compare with the last one heard by this boot of the observer."""
        if not isinstance(event, MemberChanged):
            return
        view, key = event.view, (node.serial, event.view.name)
        stamp = (view.incarnation, view.refutations)
        known = self._known.get(key) if event.previous is not None else None
        if known is not None and stamp < known:
            raise Violation(f"{node.name}: incarnation of {view.name} fell from {known} to {stamp} at {now:.3f}")
        self._known[key] = stamp


class NoResurrection(_Quiet):
    """Nobody returns from the dead without a higher incarnation, or before it was kept dead for its time."""

    def __init__(self) -> None:
        #: At which incarnation, and when on the observer's clock, it went down.
        self._down: dict[tuple[int, str], tuple[tuple[int, int], float]] = {}

    def observe(self, node: SimNode, event: GossipEvent, now: float) -> None:
        """Remember deaths; question returns."""
        if not isinstance(event, MemberChanged):
            return
        view, key = event.view, (node.serial, event.view.name)
        stamp, clock = (view.incarnation, view.refutations), node.clock.read(now)
        if not view.state.is_up:
            self._down[key] = (stamp, clock)
            return
        died_at, since = self._down.pop(key, ((0, -1), clock))
        pruned = event.previous is None and clock - since >= node.endpoint.config.dead_keep_s
        if stamp <= died_at and not pruned:
            raise Violation(f"{node.name}: {view.name} rose from the dead at {stamp}, {clock - since:.1f} s later")


class NeverDeadToItself(_Quiet):
    """A running node never sees itself dead or departed unless it said goodbye, and is not in its own table."""

    def observe(self, node: SimNode, event: GossipEvent, now: float) -> None:
        """Nobody's listener hears of itself."""
        if isinstance(event, MemberChanged) and event.view.name == node.name:
            raise Violation(f"{node.name} was told that it is {event.view.state.value} at {now:.3f}")

    def inspect(self, nodes: Mapping[str, SimNode], now: float) -> None:
        """Ask each what it thinks of itself."""
        for node in nodes.values():
            own = node.endpoint.own_view(node.clock.read(now)).state
            wanted = MemberState.LEFT if node.endpoint.leaving else MemberState.ALIVE
            if node.running and own is not wanted:
                raise Violation(f"{node.name} runs and holds itself for {own.value}")


class BoundedQueues(_Quiet):
    """Every queue and table is within its bound, and the endpoint's own invariants hold (`gossip.checks`)."""

    def inspect(self, nodes: Mapping[str, SimNode], now: float) -> None:
        """Measure each."""
        for node in nodes.values():
            if node.running:
                self._measure(node)

    def _measure(self, node: SimNode) -> None:
        endpoint = node.endpoint
        try:
            endpoint.validate()
        except InvariantError as error:
            raise Violation(f"{node.name}: {error}") from error
        probes, relays = endpoint.prober.under_way()
        most = FIXED_TIMERS + 2 * probes + relays + len(endpoint.sessions) + len(node.suspects)
        if endpoint.timers_set() > most:
            raise Violation(f"{node.name}: {endpoint.timers_set()} timers, {most} are explained")
        if len(node.inbox) > INBOX:
            raise Violation(f"{node.name}: {len(node.inbox)} datagrams in the socket")


class EventsAddUp:
    """The listener's events rebuild exactly the members and the slow state that the endpoint shows."""

    def __init__(self) -> None:
        self._slow: dict[tuple[int, str], dict[bytes, bytes]] = {}

    def observe(self, node: SimNode, event: GossipEvent, now: float) -> None:
        """Apply the event to the copy."""
        match event:
            case SlowChanged(name, changes):
                held = self._slow.setdefault((node.serial, name), {})
                for key, value in changes:
                    if value is None:
                        held.pop(key, None)
                    else:
                        held[key] = value
            case SlowReset(name):
                self._slow[node.serial, name] = {}

    def inspect(self, nodes: Mapping[str, SimNode], now: float) -> None:
        """Compare."""
        running = {node.serial: node for node in nodes.values() if node.running}
        for node in running.values():
            up = {m.name for m in node.endpoint.membership if m.state.is_up}
            if node.up != up:
                raise Violation(f"{node.name}: the events do not add up to the members: {node.up ^ up}")
        for (observer, name), held in self._slow.items():
            if observer in running and dict(running[observer].endpoint.slow_of(name)) != held:
                raise Violation(f"{running[observer].name}: the events do not add up to the slow state of {name}")
