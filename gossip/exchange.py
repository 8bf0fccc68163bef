"""Whole-table exchange over TCP (push/pull), joining, and finding back.

Rules
1. Both sides send their whole member table; each merges the other's through `membership`.
2. A remote "dead" is only a doubt here (rule 4 of `membership`): one partitioned node must not kill hundreds by table.
   A remote "left" is believed, for it comes from the node itself.
3. A seed or a remembered dead address is dialled by such an exchange. So is whoever talks to us without our knowing
   them, at most once a second.
4. Whoever learnt of many at once (at a join, or when a partition heals) exchanges again soon, with somebody else: in a
   cluster that is itself just starting, the first table was incomplete.
5. Somebody who speaks to us and whom we hold for dead or departed is told so, directly, so that it can refute.
"""

from __future__ import annotations

import math

from gossip.addresses import AddressBook, Contact
from gossip.hub import Hub
from gossip.identity import Address
from gossip.member import Member, MemberState
from gossip.membership import Membership
from gossip.messages import Alive, Dead, Left, MemberRecord, Packet, PushPull, Suspect
from gossip.sessions import Purpose, Sessions
from gossip.slow_state import SlowState
from gossip.timers import Timer

#: Seconds between two exchanges opened because a stranger spoke to us, and between two telling a node that it is dead.
STRANGER_PAUSE_S = 1.0
TELL_PAUSE_S = 1.0
#: Seconds until a second exchange follows one that taught much (rule 4), and how many new members are much.
AGAIN_S = 1.0
MUCH = 2
#: A node that left is not told so for this long: its last packets may still be under way.
LEFT_GRACE_S = 5.0


class Exchange:
    """Opens and answers push/pull exchanges."""

    def __init__(self, hub: Hub, membership: Membership, slow: SlowState, sessions: Sessions) -> None:
        config = hub.config
        self._hub = hub
        self._membership = membership
        self._slow = slow
        self._sessions = sessions
        self._stranger_at = float("-inf")
        self.book = AddressBook(config.max_addresses, config.redial_min_s, config.redial_max_s, hub.rng)

    # --- periodic -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Exchange tables with a random member."""
        self._hub.timers.set((Timer.PUSH_PULL, 0), now + self._interval())
        peers = [m for m in self._membership if m.state is MemberState.ALIVE]
        if peers and not self._hub.leaving:
            self._open(self._hub.rng.choice(peers).address, now)

    def redial(self, now: float) -> None:
        """Dial what is due in the address book."""
        self._hub.timers.set((Timer.REDIAL, 0), now + self._hub.config.redial_min_s / 2)
        if self._hub.leaving:
            return
        for contact in self.book.due(now, self._sessions.room(), self._settled):
            self.book.dialling(contact, now)
            if not self._open(contact.address, now):
                self.book.answered(contact.address, None)

    def add_seeds(self, seeds: tuple[Address, ...], now: float) -> None:
        """Remember seeds and dial them at once."""
        for seed in seeds:
            if seed != self._hub.identity.address:
                self.book.add_seed(seed, now)
        self._hub.timers.set((Timer.REDIAL, 0), now)

    def remove_seeds(self, seeds: tuple[Address, ...]) -> None:
        """Forget seeds."""
        for seed in seeds:
            self.book.remove_seed(seed)

    def _interval(self) -> float:
        base, size = self._hub.config.push_pull_interval_s, self._membership.size()
        scaled = base if size <= 32 else base * (math.ceil(math.log2(size) - 5) + 1)
        return scaled * self._hub.rng.uniform(0.8, 1.2)

    def _settled(self, contact: Contact) -> bool:
        if contact.name is not None and (contact.name == self._hub.name or self._membership.up(contact.name)):
            return True
        return self._membership.tenant(contact.address) is not None

    # --- the exchange itself ------------------------------------------------------------------------------------------

    def _open(self, address: Address, now: float) -> bool:
        return self._sessions.open(Purpose.EXCHANGE, address, (self.table(),), address, now)

    def table(self) -> PushPull:
        """Our member table, ourselves first."""
        me, state = self._hub.identity, MemberState.LEFT if self._hub.leaving else MemberState.ALIVE
        own = MemberRecord(
            me.name, self._hub.incarnation, me.host, me.port, me.meta, state, self._slow.version(me.name)
        )
        return PushPull((own, *(self._record(m) for m in self._membership))[: self._hub.config.max_members])

    def _record(self, m: Member) -> MemberRecord:
        return MemberRecord(m.name, m.incarnation, m.host, m.port, m.meta, m.state, self._slow.version(m.name))

    def merge(self, sender: str, table: PushPull, giver: Address | None, now: float) -> None:
        """Take a peer's table into account. `giver`: where its slow state can be pulled, if we know."""
        before = len(self._membership)
        for record in table.members:
            self._merge_one(sender, record, now)
        if len(self._membership) - before >= MUCH:
            self._again(now)
        if giver is not None:
            for record in table.members:
                self._slow.offered(record.name, record.incarnation >> 16, record.slow_version, giver, now)

    def _again(self, now: float) -> None:
        soon = now + AGAIN_S * self._hub.rng.uniform(0.5, 1)
        if soon < (self._hub.timers.at((Timer.PUSH_PULL, 0)) or soon):
            self._hub.timers.set((Timer.PUSH_PULL, 0), soon)

    def _merge_one(self, sender: str, r: MemberRecord, now: float) -> None:
        match r.state:
            case MemberState.ALIVE:
                self._membership.apply(Alive(r.name, r.incarnation, r.host, r.port, r.meta), now)
            case MemberState.SUSPECT:
                if r.name != self._hub.name:
                    self._membership.apply(Alive(r.name, r.incarnation, r.host, r.port, r.meta), now)
                self._membership.apply(Suspect(r.name, r.incarnation, sender), now)
            case MemberState.LEFT:
                self._membership.apply(Left(r.name, r.incarnation), now)
            case MemberState.DEAD:
                self._membership.apply(Dead(r.name, r.incarnation, sender), now)

    def replied(self, address: Address, packet: Packet, now: float) -> None:
        """Our exchange was answered."""
        self.book.answered(address, packet.sender)
        for part in packet.parts:
            if isinstance(part, PushPull):
                self.merge(packet.sender, part, address, now)

    def failed(self, address: Address) -> None:
        """Our exchange came to nothing."""
        self.book.answered(address, None)

    # --- being spoken to ----------------------------------------------------------------------------------------------

    def heard(self, packet: Packet, source: Address, now: float) -> None:
        """A datagram came from somebody: do we know them as they know themselves? (rules 3 and 5)"""
        if packet.sender == self._hub.name:
            return
        member = self._membership.get(packet.sender)
        if member is not None and member.state.is_up:
            if source == member.address and packet.incarnation >> 16 == member.boot:
                self._membership.verify(member, now)
            return
        if member is None or packet.incarnation > member.incarnation:
            if now - self._stranger_at >= STRANGER_PAUSE_S and not self._hub.leaving:
                self._stranger_at = now
                self._open(source, now)
        elif self._may_tell(member, now):
            member.told_at = now
            self._hub.send(source, self._membership.rumour_about(member))

    def _may_tell(self, member: Member, now: float) -> bool:
        if member.state is MemberState.LEFT and now - member.state_since < LEFT_GRACE_S:
            return False
        return now - member.told_at >= TELL_PAUSE_S

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Nothing to do: the book drops settled contacts when it is next read."""

    def member_down(self, member: Member, now: float) -> None:
        """Remember where the dead lived (rule 2 of `addresses`)."""
        if member.state is MemberState.DEAD:
            self.book.add_dead(member.address, member.name, now)

    def member_doubted(self, member: Member, now: float) -> None:
        """Nothing to do."""
