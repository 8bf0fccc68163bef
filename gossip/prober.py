"""Failure detection: who is probed, when, how, and what follows from the answer.

Rules
1. Every probe interval the next member of a shuffled list is pinged; newcomers enter at a random place. So every member
   is probed at least once in two rounds, whatever the dice say.
2. No ack within the probe timeout: ping it through k peers and over TCP at the same time, until the interval is over.
3. Still none: our own health is charged for the nacks that did not come, and the member is suspected.
4. An ack by another name means that the address has a new tenant: the old one is dead, on first-hand evidence.
5. A member that is doubted or new is probed at once, out of turn, a bounded number at a time, and quicker: peers are
   asked after a few of its usual round trips, for there is a reason already.
6. Round-trip times are taken from direct pings only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossip.coordinates import Coordinates
from gossip.encode import encode_part
from gossip.health import LocalHealth
from gossip.hub import Hub
from gossip.identity import Address
from gossip.member import Member, MemberState
from gossip.membership import Membership
from gossip.messages import Ack, Nack, Ping, PingRequest, Suspect
from gossip.rtt import RoundTrips
from gossip.timers import Timer

#: Probes under way at which none is begun out of turn, none for an old row; and pings on behalf of others.
MAX_URGENT = 16
MAX_DOUBTED = 4
#: How long a probe out of turn waits before it asks peers: usual round trips of the member, but at least so many
#: seconds. And for how many probe timeouts after that; a helper's nack takes one.
URGENT_ROUND_TRIPS = 4
URGENT_LEAST_S = 0.05
URGENT_TIMEOUTS = 1.5
MAX_RELAYS = 256


@dataclass(slots=True)
class _Probe:
    seq: int
    name: str
    incarnation: int
    sent_at: float
    ends_at: float
    indirect: bool = False
    nacks_due: int = 0
    nacks: int = 0


@dataclass(frozen=True, slots=True)
class _Relay:
    seq: int
    origin: Address


class Prober:
    """All probes under way at one node. `dial` opens a TCP ping: (probe seq, address)."""

    def __init__(
        self,
        hub: Hub,
        membership: Membership,
        health: LocalHealth,
        rtts: RoundTrips,
        *,
        coordinates: Coordinates,
        dial: Callable[[int, Address], None],
    ) -> None:
        self._hub = hub
        self._membership = membership
        self._health = health
        self._rtts = rtts
        self._coordinates = coordinates
        self._dial = dial
        self._round: list[str] = []
        self._probes: dict[int, _Probe] = {}
        self._relays: dict[int, _Relay] = {}

    # --- asking -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Probe the next member and set the timer for the one after."""
        self._hub.timers.set((Timer.PROBE, 0), now + self._health.scale(self._hub.config.probe_interval_s))
        member = self._next()
        if member is not None:
            self.probe(member, now)

    def probe(self, member: Member, now: float) -> None:
        """Ping a member, unless a probe of it is under way."""
        config = self._hub.config
        self._probe(member, config.probe_timeout_s, config.probe_interval_s, now)

    def _probe(self, member: Member, direct_s: float, whole_s: float, now: float) -> None:
        if any(p.name == member.name for p in self._probes.values()):
            return
        seq = self._hub.next_seq()
        ends_at = now + self._health.scale(whole_s)
        self._probes[seq] = _Probe(seq, member.name, member.incarnation, now, ends_at)
        self._hub.timers.set((Timer.PROBE_DIRECT, seq), now + self._health.scale(direct_s))
        self._hub.timers.set((Timer.PROBE_END, seq), ends_at)
        self._ping(member, seq)

    def direct_timeout(self, seq: int, now: float) -> None:
        """The direct ping went unanswered: ask peers, and try TCP (rule 2)."""
        probe = self._probes.get(seq)
        member = self._membership.up(probe.name) if probe else None
        if probe is None or member is None:
            return
        helpers = [m for m in self._membership if m.state is MemberState.ALIVE and m.name != member.name]
        chosen = self._hub.rng.sample(helpers, min(len(helpers), self._hub.config.indirect_probes))
        probe.indirect, probe.nacks_due = True, len(chosen)
        for helper in chosen:
            self._hub.send(helper.address, PingRequest(seq, member.name, *member.address))
        self._dial(seq, member.address)

    def end(self, seq: int, now: float) -> None:
        """The probe found no life (rule 3)."""
        probe = self._probes.pop(seq, None)
        if probe is None:
            return
        self._hub.timers.cancel((Timer.PROBE_DIRECT, seq))
        member = self._membership.up(probe.name)
        if member is None or member.incarnation != probe.incarnation:
            return
        self._health.add(max(0, probe.nacks_due - probe.nacks) if probe.nacks_due else 1)
        self._hub.counters["probes_failed"] += 1
        self._membership.suspect(Suspect(member.name, member.incarnation, self._hub.name), now)

    # --- answers ------------------------------------------------------------------------------------------------------

    def acked(self, ack: Ack, now: float) -> None:
        """Somebody answered one of our pings, directly, through a helper, or over TCP."""
        relay = self._relays.pop(ack.seq, None)
        if relay is not None:
            self._hub.timers.cancel((Timer.RELAY, ack.seq))
            self._hub.send(relay.origin, Ack(relay.seq, ack.name))
            return
        probe = self._probes.pop(ack.seq, None)
        if probe is None:
            return
        self._forget_timers(probe.seq)
        member = self._membership.up(probe.name)
        if member is None:
            return
        if ack.name != probe.name:
            self._hub.counters["replaced"] += 1
            self._membership.bury(member, now)
            return
        self._health.add(-1)
        self._membership.verify(member, now)
        if not probe.indirect:
            self._rtts.add(member.name, now - probe.sent_at)
            self._coordinates.measured(member.name, now - probe.sent_at)

    def nacked(self, seq: int) -> None:
        """A helper is well but the target silent to it too."""
        probe = self._probes.get(seq)
        if probe is not None:
            probe.nacks += 1

    # --- being asked --------------------------------------------------------------------------------------------------

    def pinged(self, ping: Ping, source: Address) -> None:
        """Answer with our own name, whoever was meant; and with our record, if we were mistaken for another."""
        ack = Ack(ping.seq, self._hub.name)
        if ping.target == self._hub.name:  # the place first: the asker needs it when it reads the ack
            self._hub.send(source, self._coordinates.own(), ack)
        else:
            self._hub.send(source, ack, self._hub.alive())

    def requested(self, request: PingRequest, source: Address, now: float) -> None:
        """Ping somebody for a peer."""
        if len(self._relays) >= MAX_RELAYS:
            self._hub.counters["relays_refused"] += 1
            return
        seq = self._hub.next_seq()
        self._relays[seq] = _Relay(request.seq, source)
        self._hub.timers.set((Timer.RELAY, seq), now + self._hub.config.probe_timeout_s)
        self._hub.send((request.host, request.port), Ping(seq, request.target))

    def relay_timeout(self, seq: int) -> None:
        """The target was silent: say so, so that the asker knows that we are not."""
        relay = self._relays.pop(seq, None)
        if relay is not None:
            self._hub.send(relay.origin, Nack(relay.seq))

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Enter the newcomer into the round, and look at it ourselves (rules 1 and 5)."""
        if member.name not in self._round:
            self._round.insert(self._hub.rng.randint(0, len(self._round)), member.name)
        self.member_doubted(member, now)

    def member_down(self, member: Member, now: float) -> None:
        """Stop probing it."""
        for probe in [p for p in self._probes.values() if p.name == member.name]:
            del self._probes[probe.seq]
            self._forget_timers(probe.seq)

    def member_doubted(self, member: Member, now: float) -> None:
        """Probe it at once if there is room."""
        if len(self._probes) < MAX_URGENT:
            self._probe_urgently(member, now)

    def doubt(self, member: Member, now: float) -> bool:
        """Probe it at once because its row is old (see `heartbeat`), if there is room; says whether there was."""
        if len(self._probes) >= MAX_DOUBTED:
            return False
        self._probe_urgently(member, now)
        return True

    def _probe_urgently(self, member: Member, now: float) -> None:
        timeout, usual = self._hub.config.probe_timeout_s, self._rtts.get(member.name)
        direct = timeout if usual is None else min(timeout, max(URGENT_LEAST_S, URGENT_ROUND_TRIPS * usual))
        self._probe(member, direct, direct + URGENT_TIMEOUTS * timeout, now)

    def under_way(self) -> tuple[int, int]:
        """How many probes and relays are under way."""
        return len(self._probes), len(self._relays)

    def _next(self) -> Member | None:
        while self._round:
            member = self._membership.up(self._round.pop())
            if member is not None:
                return member
        self._round = [m.name for m in self._membership if m.state.is_up]
        self._hub.rng.shuffle(self._round)
        return self._membership.up(self._round.pop()) if self._round else None

    def _ping(self, member: Member, seq: int) -> None:
        packet = self._hub.packet()
        if member.state is MemberState.SUSPECT:  # told first, so that it can refute with the ack
            packet.add(encode_part(self._membership.rumour_about(member)))
        packet.add(encode_part(Ping(seq, member.name)))
        self._membership.fill(packet)
        self._hub.send_packet(member.address, packet)

    def _forget_timers(self, seq: int) -> None:
        self._hub.timers.cancel((Timer.PROBE_DIRECT, seq))
        self._hub.timers.cancel((Timer.PROBE_END, seq))
