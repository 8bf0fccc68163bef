"""The whole protocol of one node, without IO: events in, actions out.

`handle(event, now)` and `handle_timeout(now)` return what is to be done, in order; `next_deadline()` says when
`handle_timeout` is wanted next. `now` is monotonic seconds and never goes back. Same events, same times and same seed
give the same actions: there is no clock, no socket and no global randomness in here.

The work is done by one plane each: `membership`, `prober`, `rows`, `slow_state`, `exchange`. This file only tells them
what happened.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from gossip import actions as io
from gossip.config import GossipConfig
from gossip.coordinates import Coordinates
from gossip.decode import decode_packet
from gossip.dialogue import Dialogue
from gossip.envelope import Envelope
from gossip.errors import RemoteError
from gossip.events import RowView
from gossip.exchange import Exchange
from gossip.health import LocalHealth
from gossip.heartbeat import Heartbeat
from gossip.hub import Hub
from gossip.identity import Address, Identity
from gossip.incarnation import refutations_of
from gossip.intake import Decode, Intake
from gossip.keyring import Keyring
from gossip.member import MemberState, MemberView
from gossip.membership import Membership
from gossip.messages import (
    Ack,
    Alive,
    Dead,
    Left,
    Nack,
    Packet,
    Part,
    Ping,
    PingRequest,
    Place,
    PushPull,
    Rows,
    SlowDelta,
    SlowDigest,
    SlowPull,
    Suspect,
)
from gossip.prober import Prober
from gossip.rows import LoadRows
from gossip.rtt import RoundTrips
from gossip.sessions import Purpose, Sessions
from gossip.slow_state import SlowState
from gossip.timers import Timer

#: Seconds between two rounds of forgetting and collecting.
REAP_INTERVAL_S = 1.0


class Endpoint:
    """One node's side of the protocol. `envelope` seals and opens packets; without it they travel in clear. `decode` is
    for a simulation, where several endpoints get the same bytes and one reading of them is enough.
    """

    def __init__(
        self,
        identity: Identity,
        config: GossipConfig,
        rng: random.Random,
        envelope: Envelope | None = None,
        decode: Decode = decode_packet,
    ) -> None:
        self.config = config
        self.envelope = envelope or Envelope(Keyring(), identity.cluster, rng.randbytes)
        self._hub = hub = Hub(identity, config, rng, self.envelope)
        self._intake = Intake(hub, self.envelope, decode)
        self.rtts = RoundTrips()
        self.health = LocalHealth(config.health_max)
        self.sessions = Sessions(hub)
        self.membership = Membership(hub, self.health, self.rtts)
        self.rows = LoadRows(hub, self.membership)
        self.slow = SlowState(hub, self.membership, self.sessions)
        self.exchange = Exchange(hub, self.membership, self.slow, self.sessions)
        self.coordinates = Coordinates(hub, self.membership)
        self.prober = Prober(
            hub, self.membership, self.health, self.rtts, coordinates=self.coordinates, dial=self._dial_probe
        )
        self._dialogue = Dialogue(
            hub, self._intake, self.sessions, exchange=self.exchange, prober=self.prober, slow=self.slow
        )
        self.heartbeat = Heartbeat(hub, self.membership, self.health, self.prober.doubt)
        self.rows.heartbeat = self.heartbeat.tick
        self.membership.seen_at = self.rows.set_at
        self.membership.observers += [self.rows, self.slow, self.exchange, self.coordinates, self.prober]
        self._now = self._started_at = 0.0

    # --- in -----------------------------------------------------------------------------------------------------------

    def handle(self, event: io.Input, now: float) -> list[io.Action]:
        """Take one event into account.

        :raises LocalError: a row, key or value of our own is too large; nothing is changed.
        """
        self._now = now = max(now, self._now)
        self._forgive_stall(now)
        match event:
            case io.DatagramReceived():
                self._datagram(event, now)
            case io.StreamRequested():
                self._dialogue.requested(event, now)
            case io.StreamReplied():
                self._dialogue.ended(event.session, event.data, now)
            case io.StreamFailed():
                self._dialogue.ended(event.session, None, now)
            case io.RowSet():
                self.rows.set_own(event.payload, now)
            case io.KeyPut():
                self.slow.put(event.key, event.value)
            case io.KeyDeleted():
                self.slow.delete(event.key, now)
            case io.SeedsAdded():
                self.exchange.add_seeds(event.seeds, now)
            case io.SeedsRemoved():
                self.exchange.remove_seeds(event.seeds)
            case io.Started():
                self._start(now)
            case io.LeaveRequested():
                self._leave()
        return self._hub.drain()

    def next_deadline(self) -> float | None:
        """When `handle_timeout` is wanted, in the clock of `now`; None before `Started`."""
        return self._hub.timers.next_deadline()

    def handle_timeout(self, now: float) -> list[io.Action]:
        """Do what is due."""
        self._now = now = max(now, self._now)
        self._forgive_stall(now)
        while key := self._hub.timers.pop_due(now):
            self._timeout(key[0], key[1], now)
        return self._hub.drain()

    def _forgive_stall(self, now: float) -> None:
        """A process that was stopped must not blame others for answers that it did not read: shift every deadline. And
        it must be quick to say that it is back, for it is probably suspected.
        """
        due = self._hub.timers.next_deadline()
        if due is not None and now - due > self.config.stall_s:
            self._hub.counters["stalls"] += 1
            self._hub.timers.shift(now - due)
            self.membership.shift_suspicions(now - due)
            self.membership.awake(now)

    def _timeout(self, timer: Timer, key: Any, now: float) -> None:
        match timer:
            case Timer.PROBE:
                self.prober.tick(now)
            case Timer.PROBE_DIRECT:
                self.prober.direct_timeout(key, now)
            case Timer.PROBE_END:
                self.prober.end(key, now)
            case Timer.RELAY:
                self.prober.relay_timeout(key)
            case Timer.SUSPICION:
                self.membership.suspicion_over(key, now)
            case Timer.GOSSIP:
                self._gossip(now)
            case Timer.PUSH_PULL:
                self.exchange.tick(now)
            case Timer.REDIAL:
                self.exchange.redial(now)
            case Timer.REAP:
                self._hub.timers.set((Timer.REAP, 0), now + REAP_INTERVAL_S)
                self.membership.reap(now)
                self.slow.collect(now)
            case Timer.SESSION:
                self._dialogue.ended(key, None, now)

    def _start(self, now: float) -> None:
        self._started_at = now
        jitter, config, timers = self._hub.rng.random, self.config, self._hub.timers
        timers.set((Timer.PROBE, 0), now + jitter() * config.probe_interval_s)
        timers.set((Timer.GOSSIP, 0), now + jitter() * config.gossip_interval_s)
        timers.set((Timer.PUSH_PULL, 0), now + (0.5 + jitter()) * config.push_pull_interval_s)
        timers.set((Timer.REDIAL, 0), now)
        timers.set((Timer.REAP, 0), now + REAP_INTERVAL_S)
        self.membership.standing.announce()

    def _leave(self) -> None:
        if not self._hub.leaving:
            self.membership.standing.depart()

    # --- datagrams ----------------------------------------------------------------------------------------------------

    def _datagram(self, event: io.DatagramReceived, now: float) -> None:
        packet = self._intake.datagram(event.data)
        if packet is None:
            return
        if packet.sender == self._hub.name:
            self._hub.counters["from_own_name"] += 1
            return
        self.exchange.heard(packet, event.source, now)
        incarnation = self._hub.incarnation
        for part in packet.parts:
            try:
                self._part(part, packet, event.source, now)
            except RemoteError:
                self._hub.counters["refused"] += 1
        if self._hub.incarnation != incarnation:  # accused and refuted: the accuser hears of it first
            self._hub.send(event.source, self._hub.alive())

    def _part(self, part: Part, packet: Packet, source: Address, now: float) -> None:
        match part:  # the most frequent first
            case Rows():
                self.rows.receive(part, packet.sender, now)
            case Place():
                self.coordinates.receive(part)
            case SlowDigest():
                self.slow.digested(part, source, now)
            case Ping():
                self.prober.pinged(part, source)
            case Ack():
                self.prober.acked(part, now)
            case Nack():
                self.prober.nacked(part.seq)
            case PingRequest():
                self.prober.requested(part, source, now)
            case Alive() | Suspect() | Dead() | Left():
                self.membership.apply(part, now)
            case SlowPull():
                self.slow.pulled_by_datagram(part, source)
            case SlowDelta():
                self.slow.receive(part, now)
            case PushPull():
                self._hub.counters["refused"] += 1  # streams only

    def _gossip(self, now: float) -> None:
        """One tick: rumours first, then slow marks, then rows, to each chosen peer."""
        self._hub.timers.set((Timer.GOSSIP, 0), now + self.config.gossip_interval_s)
        parcel, digest = self.rows.parcel(now), self.slow.digest()
        targets = self.membership.sample(self.config.fanout, now)
        fed = []
        for member in targets:
            first = self._hub.packet()
            self.membership.fill(first)
            if member.state.is_up and not self._hub.leaving:
                fed.append(member)
                self.slow.fill(first, digest)
                self.coordinates.fill(first)
                parcel.fill(first, member.name)
            if len(first):
                self._hub.send_packet(member.address, first)
        for data in parcel.rest():
            sealed = self.envelope.seal(data)  # once for all of them: each has a replay window of its own
            for member in fed:
                self._hub.emit(io.SendDatagram(member.address, sealed))

    def _dial_probe(self, seq: int, address: Address) -> None:
        member = self.membership.tenant(address)
        if member is not None:
            self.sessions.open(Purpose.PROBE, address, (Ping(seq, member.name),), seq, self._now)

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Who we are; `incarnation` is the boot counter, raised if peers remember a later one."""
        return self._hub.identity

    @property
    def leaving(self) -> bool:
        """Whether we have said goodbye."""
        return self._hub.leaving

    @property
    def counters(self) -> Mapping[str, int]:
        """How often what happened."""
        return self._hub.counters

    def timers_set(self) -> int:
        """How many timers are set; for `checks` and the simulator."""
        return len(self._hub.timers)

    @property
    def timers(self) -> Mapping[str, float | None]:
        """For `checks`: the deadline of each suspicion."""
        return {m.name: self._hub.timers.at((Timer.SUSPICION, m.name)) for m in self.membership}

    def own_view(self, now: float) -> MemberView:
        """Ourselves as a member; the state's age is the time since the start."""
        me, state = self._hub.identity, MemberState.LEFT if self._hub.leaving else MemberState.ALIVE
        refutations = refutations_of(self._hub.incarnation)
        age = max(0.0, now - self._started_at)
        return MemberView(
            me.name, me.incarnation, me.host, me.port, me.meta, state, age, 0.0, True, (), refutations, True
        )

    def members(self, now: float) -> list[MemberView]:
        """Everybody we know, ourselves first, then by name."""
        others = sorted(self.membership, key=lambda m: m.name)
        return [self.own_view(now), *(m.view(now, self.rtts.get(m.name)) for m in others)]

    def member(self, name: str, now: float) -> MemberView | None:
        """One member, or None for a stranger."""
        if name == self._hub.name:
            return self.own_view(now)
        found = self.membership.get(name)
        return found.view(now, self.rtts.get(name)) if found is not None else None

    def row(self, name: str, now: float) -> RowView | None:
        """The latest load row of a node."""
        return self.rows.get(name, now)

    def take_rows(self, now: float) -> list[RowView]:
        """Give the rows of peers that were renewed since the last call; `RowsReceived` says when there are some."""
        return self.rows.take(now)

    def estimate_rtt_s(self, a: str, b: str) -> float | None:
        """Estimate the round-trip time between any two members, in seconds; None while one is not located."""
        return self.coordinates.estimate_rtt_s(a, b)

    def slow_of(self, name: str) -> Mapping[bytes, bytes]:
        """A node's slow state: a read-only view that follows it."""
        return self.slow.of(name)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Give the whole view as plain JSON types. See `gossip.snapshot`."""
        from gossip.snapshot import snapshot

        return snapshot(self, now)

    def validate(self) -> None:
        """Check every invariant. :raises InvariantError: one does not hold. See `gossip.checks`."""
        from gossip.checks import check

        check(self)
