"""Our own standing in the cluster: what is said about us, and what we say to it.

Rules
1. An accusation against ourselves, at or above our incarnation, is refuted by moving above it.
2. Whoever was stopped for longer than `stall_s` has probably been accused meanwhile. It moves above its incarnation and
   tells many peers at once, before it has heard of any accusation: its word races with reports of its death.
3. Where a later boot of our name runs elsewhere, we are the ghost, and refute nothing that is meant for it.
4. Two nodes with one name are reported, again and again while it lasts, but not at each packet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossip.broadcast import BroadcastQueue
from gossip.events import IncarnationRaised, NameConflict
from gossip.health import LocalHealth
from gossip.hub import Hub
from gossip.identity import Address
from gossip.incarnation import above, boot_of
from gossip.limits import MAX_BOOT
from gossip.member import Member
from gossip.messages import Alive, Left, Rumour

#: Most peers that are told directly that we go or are back; the others hear of it by rumour.
MAX_TOLD = 32
#: Seconds between two reports of the same name conflict.
CONFLICT_REPORT_S = 5.0
#: Names in conflict that are remembered for pacing the reports.
MAX_CONFLICTS = 64


class NameConflicts:
    """Reports them at a bounded pace."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._reported: dict[str, float] = {}

    def report(self, name: str, address: Address, now: float) -> None:
        """Two nodes claim that name. `address`: of the one that is not accepted, or of the other one if it is ours."""
        if now - self._reported.get(name, float("-inf")) < CONFLICT_REPORT_S:
            return
        self._reported.pop(name, None)
        self._reported[name] = now
        if len(self._reported) > MAX_CONFLICTS:
            del self._reported[next(iter(self._reported))]
        self._hub.counters["name_conflicts"] += 1
        self._hub.notify(NameConflict(name, *address))


class Standing:
    """Changes our own incarnation and spreads it. `peers`: the members that are up."""

    def __init__(
        self,
        hub: Hub,
        health: LocalHealth,
        broadcasts: BroadcastQueue,
        conflicts: NameConflicts,
        peers: Callable[[], Sequence[Member]],
    ) -> None:
        self._hub = hub
        self._health = health
        self._broadcasts = broadcasts
        self._conflicts = conflicts
        self._peers = peers
        #: A later boot of our own name runs elsewhere (rule 3).
        self._superseded = False

    def announce(self) -> None:
        """Spread our own record."""
        self._broadcasts.put(self._hub.alive())

    def depart(self) -> None:
        """Spread that we leave."""
        self._hub.leaving = True
        goodbye = Left(self._hub.name, self._hub.incarnation)
        self._broadcasts.put(goodbye)
        self._tell(goodbye)

    def accused(self, incarnation: int, *, final: bool = False) -> None:
        """Refute what is said against us (rule 1). `final`: it is a death or a departure, not a suspicion."""
        hub = self._hub
        if incarnation < hub.incarnation or hub.leaving:
            return
        if self._superseded:
            if not final:
                return  # it is the later boot that is suspected, and for it to refute
            self._superseded = False
        boot = hub.boot
        if self._rise(above(hub.incarnation, incarnation)):
            hub.counters["refutations"] += 1
            if hub.boot == boot:
                self._health.add(1)

    def refute_unheard(self) -> None:
        """Refute what has probably been said while we were stopped (rule 2)."""
        if not self._hub.leaving and not self._superseded and self._rise(self._hub.incarnation + 1):
            self._tell(self._hub.alive())

    def heard(self, rumour: Alive, now: float) -> None:
        """Somebody says that we are alive: an echo, a former life of ours, or a namesake."""
        hub, address = self._hub, (rumour.host, rumour.port)
        if address == hub.identity.address:
            if rumour.incarnation > hub.incarnation:
                self.accused(rumour.incarnation)
        elif boot_of(rumour.incarnation) >= hub.boot:
            self._superseded = boot_of(rumour.incarnation) > hub.boot
            self._conflicts.report(rumour.name, address, now)

    def _rise(self, higher: int) -> bool:
        """Take a higher incarnation and spread it; says whether there is such a one."""
        boot = self._hub.boot
        if boot_of(higher) >= MAX_BOOT:  # forged: no node gets there by itself, and there is nothing above it
            self._hub.counters["unrefutable"] += 1
            return False
        self._hub.raise_to(higher)
        if self._hub.boot != boot:
            self._hub.notify(IncarnationRaised(self._hub.boot))
        self.announce()
        return True

    def _tell(self, rumour: Rumour) -> None:
        """Tell many peers at once, directly."""
        peers = self._peers()
        for peer in self._hub.rng.sample(peers, min(len(peers), MAX_TOLD)):
            self._hub.send(peer.address, rumour)
