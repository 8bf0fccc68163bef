"""Who is in the cluster: the member table and every rule by which it changes.

Rules
1. Only a higher incarnation brings back the dead; a suspect too is cleared by nothing else.
2. The highest incarnation counts, whatever kind of message it came in: a member that is dead stays dead, but at the
   higher incarnation, so that a late `Alive` in between cannot resurrect it.
3. An accusation against ourselves is refuted: see `standing`.
4. A death report about a member that we hold for alive is checked (short suspicion, probe at once) before we believe
   it. One about a suspect is believed: we had the time to hear the refutation.
5. The same name at another address is a restart if its boot counter is higher. Otherwise it is a conflict: the holder
   stays, both hear of it, and it is reported.
6. A new name at a known address puts the old tenant under probe at once; its answer, by the new name, settles it.
7. A suspect is told of the accusation directly and first, so that it can refute before the rumour spreads.
8. The dead and the departed are kept for `dead_keep_s`, then forgotten entirely; a report of the death of somebody
   unknown never creates a member.
9. A suspect whose row is renewed after the suspicion began is not buried, whoever says so: it speaks, and will refute
   once it hears. One that goes on speaking without hearing is buried after `HELD_MULT` times the longest suspicion.
10. What we read first after a stop of our own is as old as that was long: for `DROWSY_TICKS` no death is believed,
    reported or concluded.

What else changes with this file: `checks.py` states the invariants, `exchange.py` feeds whole tables through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from gossip.broadcast import BroadcastQueue, retransmits
from gossip.encode import PacketBuilder
from gossip.events import MemberChanged
from gossip.health import LocalHealth
from gossip.hub import Hub
from gossip.identity import Address
from gossip.incarnation import boot_of
from gossip.member import Member, MemberState
from gossip.messages import Alive, Dead, Left, Rumour, Suspect
from gossip.rtt import RoundTrips
from gossip.standing import NameConflicts, Standing
from gossip.suspicion import Suspicion, confirmations_wanted, suspicion_min_s
from gossip.timers import Timer

#: Gossip intervals after a stop of our own in which no death is believed (rule 10).
DROWSY_TICKS = 5


class Observer(Protocol):
    """A plane that keeps something per member and has to follow its fate."""

    def member_up(self, member: Member, now: float) -> None:
        """The member is new, back from the dead, or in a new boot (after `member_down` in that case)."""

    def member_down(self, member: Member, now: float) -> None:
        """The member died, left, or its boot ended; what it owned is void."""

    def member_doubted(self, member: Member, now: float) -> None:
        """There is a reason to probe this member at once."""


class Membership:
    """The table. All times are monotonic seconds."""

    def __init__(self, hub: Hub, health: LocalHealth, rtts: RoundTrips) -> None:
        self._hub = hub
        self._health = health
        self._rtts = rtts
        self._members: dict[str, Member] = {}
        self._tenants: dict[Address, str] = {}
        #: Who is up, and who is not; None when that has changed. Asked for at every tick, changed by few.
        self._split: tuple[list[Member], list[Member]] | None = None
        self._conflicts = NameConflicts(hub)
        #: Until then no death is believed: we were stopped.
        self._awake_at = float("-inf")
        #: When a member last showed life beside the protocol of this file: its latest row, on our clock.
        self.seen_at: Callable[[str], float] = lambda name: float("-inf")
        self.broadcasts = BroadcastQueue()
        self.standing = Standing(hub, health, self.broadcasts, self._conflicts, lambda: self._sides()[0])
        self.observers: list[Observer] = []

    # --- reading ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        """Give another node's record, dead ones included."""
        return self._members.get(name)

    def up(self, name: str) -> Member | None:
        """Give another node's record if it is alive or suspect."""
        member = self._members.get(name)
        return member if member is not None and member.state.is_up else None

    def tenant(self, address: Address) -> Member | None:
        """Who is up at that address."""
        name = self._tenants.get(address)
        return self.up(name) if name is not None else None

    def size(self) -> int:
        """Cluster size for the formulas: members that are up, and us."""
        return 1 + len(self._sides()[0])

    def sample(self, count: int, now: float) -> list[Member]:
        """Draw peers for one gossip tick: those up, and the dead of late, who may want to refute."""
        pool, down = self._sides()
        if down:
            since = now - self._hub.config.gossip_to_dead_s
            pool = pool + [m for m in down if m.state is MemberState.DEAD and m.state_since > since]
        return list(pool) if len(pool) <= count else self._hub.rng.sample(pool, count)

    def _sides(self) -> tuple[list[Member], list[Member]]:
        if self._split is None:
            up = [m for m in self._members.values() if m.state.is_up]
            self._split = up, [m for m in self._members.values() if not m.state.is_up]
        return self._split

    def fill(self, builder: PacketBuilder) -> None:
        """Piggy-back rumours onto a packet."""
        self.broadcasts.fill(builder, retransmits(self._hub.config.retransmit_mult, self.size()))

    def rumour_about(self, member: Member) -> Rumour:
        """Say what we believe about a member, as a rumour."""
        if member.state is MemberState.ALIVE:
            return Alive(member.name, member.incarnation, member.host, member.port, member.meta)
        if member.suspicion is not None:
            return Suspect(member.name, member.incarnation, member.suspicion.first_accuser)
        if member.state is MemberState.LEFT:
            return Left(member.name, member.incarnation)
        return Dead(member.name, member.incarnation, self._hub.name)

    # --- rumours ------------------------------------------------------------------------------------------------------

    def apply(self, rumour: Rumour, now: float) -> None:
        """Take one rumour into account."""
        match rumour:
            case Alive():
                self._alive(rumour, now)
            case Suspect():
                self.suspect(rumour, now)
            case Dead():
                self._dead(rumour, now)
            case Left():
                self._left(rumour, now)

    def _alive(self, rumour: Alive, now: float) -> None:
        if rumour.name == self._hub.name:
            self.standing.heard(rumour, now)
            return
        member = self._members.get(rumour.name)
        address = (rumour.host, rumour.port)
        if member is None:
            self._admit(rumour, now)
        elif address == member.address:
            if rumour.incarnation > member.incarnation:
                self._accept(member, rumour, now)
        elif boot_of(rumour.incarnation) > member.boot:
            self._accept(member, rumour, now)
        elif not member.state.is_up:
            if rumour.incarnation > member.incarnation:
                self._accept(member, rumour, now)
        elif boot_of(rumour.incarnation) == member.boot:
            self._conflicts.report(rumour.name, address, now)
            self._hub.send(address, Alive(member.name, member.incarnation, *member.address, member.meta))

    def _admit(self, rumour: Alive, now: float) -> None:
        if len(self._members) >= self._hub.config.max_members:
            self._hub.counters["members_refused"] += 1
            return
        member = Member(rumour.name, rumour.incarnation, rumour.host, rumour.port, rumour.meta, MemberState.ALIVE, now)
        self._members[rumour.name] = member
        if self._split is not None:
            self._split[0].append(member)
        self._settle(member, now)
        self.broadcasts.put(rumour)
        self._notify(member, None, now)
        for observer in self.observers:
            observer.member_up(member, now)

    def _accept(self, member: Member, rumour: Alive, now: float) -> None:
        """A higher incarnation of a known member: refutation, restart, or return from the dead."""
        previous, restarted = member.state, boot_of(rumour.incarnation) > member.boot
        news = previous is not MemberState.ALIVE or restarted or rumour.meta != member.meta
        if restarted and previous.is_up:
            self._down(member, now)
        if self._tenants.get(member.address) == member.name:
            del self._tenants[member.address]
        if member.address != (rumour.host, rumour.port) or restarted:
            member.verified = False
        member.incarnation, member.meta = rumour.incarnation, rumour.meta
        member.host, member.port = rumour.host, rumour.port
        self._enter(member, MemberState.ALIVE, now)
        self._settle(member, now)
        self.broadcasts.put(rumour)
        if news:
            self._notify(member, previous, now)
        if restarted or not previous.is_up:
            for observer in self.observers:
                observer.member_up(member, now)

    def _settle(self, member: Member, now: float) -> None:
        """Enter a member as the tenant of its address (rule 6)."""
        old = self.tenant(member.address)
        self._tenants[member.address] = member.name
        if old is not None and old is not member:
            self._hub.counters["address_taken"] += 1
            for observer in self.observers:
                observer.member_doubted(old, now)

    def suspect(self, rumour: Suspect, now: float, within_s: float | None = None) -> None:
        """Start or confirm a suspicion; `within_s` caps its duration, in seconds."""
        if rumour.name == self._hub.name:
            self.standing.accused(rumour.incarnation)
            return
        member = self._members.get(rumour.name)
        if member is None or rumour.incarnation < member.incarnation:
            return
        if member.state is MemberState.ALIVE:
            self._start_suspicion(member, rumour, now, within_s)
            return
        member.incarnation = rumour.incarnation  # rule 2, also for the dead
        if member.suspicion is None:
            return
        if member.suspicion.confirm(rumour.accuser):
            self.broadcasts.put(rumour)
            self._hub.timers.set((Timer.SUSPICION, member.name), member.suspicion.deadline())

    def _start_suspicion(self, member: Member, rumour: Suspect, now: float, within_s: float | None) -> None:
        config, size = self._hub.config, self.size()
        shortest = suspicion_min_s(config.suspicion_mult, size, config.probe_interval_s)
        longest = shortest * config.suspicion_max_mult
        wanted = confirmations_wanted(config.suspicion_confirmations, size)
        if within_s is not None:
            shortest, longest, wanted = within_s, within_s, 0
        member.incarnation = rumour.incarnation
        self._enter(member, MemberState.SUSPECT, now)
        member.suspicion = Suspicion(now, shortest, longest, wanted, rumour.accuser)
        self._hub.timers.set((Timer.SUSPICION, member.name), member.suspicion.deadline())
        self._hub.counters["suspicions"] += 1
        self.broadcasts.put(rumour)
        self._hub.send(member.address, rumour)  # rule 7
        self._notify(member, MemberState.ALIVE, now)

    def suspicion_over(self, name: str, now: float) -> None:
        """The timer of a suspicion ran out: nobody refuted it. Who has shown life since it began gets more time."""
        member = self._members.get(name)
        if member is None or member.suspicion is None:
            return
        if now < self._awake_at:
            self._hub.timers.set((Timer.SUSPICION, name), self._awake_at)
            return
        if not self._lives(member, member.suspicion, now):
            self.bury(member, now)
            return
        self._hub.counters["suspicions_held"] += 1
        member.suspicion.started = self.seen_at(name)
        self._hub.timers.set((Timer.SUSPICION, name), max(now, member.suspicion.deadline()))
        for observer in self.observers:
            observer.member_doubted(member, now)

    def _lives(self, member: Member, suspicion: Suspicion, now: float) -> bool:
        """Whether the suspect has renewed its row since: it speaks, and gets time to refute, within reason (rule 9)."""
        return self.seen_at(member.name) > suspicion.started and now < suspicion.ends_at

    def shift_suspicions(self, seconds: float) -> None:
        """We were stopped for that long: running suspicions started later by as much. Their timers move with them."""
        for member in self:
            if member.suspicion is not None:
                member.suspicion.shift(seconds)

    def bury(self, member: Member, now: float) -> None:
        """Hold a member for dead, on evidence of our own, and spread it."""
        self._end(member, MemberState.DEAD, now)
        self.broadcasts.put(Dead(member.name, member.incarnation, self._hub.name))

    def _dead(self, rumour: Dead, now: float) -> None:
        if rumour.name == self._hub.name:
            self.standing.accused(rumour.incarnation, final=True)
            return
        member = self._members.get(rumour.name)
        if member is None or rumour.incarnation < member.incarnation:
            return
        if member.state is MemberState.ALIVE:
            self.check_death(rumour, now)
            return
        raised = rumour.incarnation > member.incarnation
        member.incarnation = rumour.incarnation
        if member.suspicion is not None and (now < self._awake_at or self._lives(member, member.suspicion, now)):
            self._hub.counters["deaths_doubted"] += 1
        elif member.state is MemberState.SUSPECT:
            self._end(member, MemberState.DEAD, now)
            self.broadcasts.put(rumour)
        elif raised and member.state is MemberState.DEAD:
            self.broadcasts.put(rumour)

    def check_death(self, rumour: Dead, now: float) -> None:
        """Doubt, but do not yet believe, that a member is dead (rule 4)."""
        member = self.up(rumour.name)
        if member is None:
            return
        within = self._health.scale(self._hub.config.probe_interval_s) * 2
        self.suspect(Suspect(rumour.name, rumour.incarnation, rumour.accuser), now, within)
        for observer in self.observers:
            observer.member_doubted(member, now)

    def _left(self, rumour: Left, now: float) -> None:
        if rumour.name == self._hub.name:
            self.standing.accused(rumour.incarnation, final=True)
            return
        member = self._members.get(rumour.name)
        if member is None or rumour.incarnation < member.incarnation:
            return
        if member.state is not MemberState.LEFT:
            member.incarnation = rumour.incarnation
            self._end(member, MemberState.LEFT, now)
            self.broadcasts.put(rumour)

    def verify(self, member: Member, now: float) -> None:
        """Something came from the member itself, not only about it."""
        if not member.verified:
            member.verified = True
            self._notify(member, member.state, now)

    def awake(self, now: float) -> None:
        """We were stopped for a while, and now run (rule 10)."""
        self._awake_at = now + DROWSY_TICKS * self._hub.config.gossip_interval_s
        self.standing.refute_unheard()

    # --- ends ---------------------------------------------------------------------------------------------------------

    def reap(self, now: float) -> None:
        """Forget those who are dead or gone for long enough (rule 8)."""
        keep = self._hub.config.dead_keep_s
        for member in [m for m in self._sides()[1] if now - m.state_since >= keep]:
            del self._members[member.name]
            self._split = None
            self.broadcasts.drop(member.name)

    def _end(self, member: Member, state: MemberState, now: float) -> None:
        previous = member.state
        self._enter(member, state, now)
        if self._tenants.get(member.address) == member.name:
            del self._tenants[member.address]
        if previous.is_up:
            self._down(member, now)
        self._notify(member, previous, now)

    def _down(self, member: Member, now: float) -> None:
        self._rtts.drop(member.name)
        for observer in self.observers:
            observer.member_down(member, now)

    def _enter(self, member: Member, state: MemberState, now: float) -> None:
        if member.suspicion is not None:
            member.suspicion = None
            self._hub.timers.cancel((Timer.SUSPICION, member.name))
        if member.state is not state:
            if member.state.is_up is not state.is_up:
                self._split = None
            member.state, member.state_since = state, now

    def _notify(self, member: Member, previous: MemberState | None, now: float) -> None:
        view = member.view(now, self._rtts.get(member.name))
        self._hub.notify(MemberChanged(view, previous))
