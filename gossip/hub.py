"""What the planes of one endpoint share: settings, own incarnation, randomness, timers, and the way out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from gossip.actions import Action, Notify, SendDatagram
from gossip.config import GossipConfig
from gossip.encode import PacketBuilder, encode_part
from gossip.envelope import Envelope
from gossip.events import GossipEvent
from gossip.identity import Address, Identity
from gossip.incarnation import boot_of, first
from gossip.limits import MAX_FRAME_BYTES
from gossip.messages import Alive, Part
from gossip.timers import Timers


class Hub:
    """Owned by the endpoint, used by every plane. Holds no protocol rule."""

    def __init__(self, identity: Identity, config: GossipConfig, rng: random.Random, envelope: Envelope) -> None:
        self.identity = identity
        self.config = config
        self.rng = rng
        self.envelope = envelope
        self.timers = Timers()
        #: Our own incarnation, packed; see `gossip.incarnation`.
        self.incarnation = first(identity.incarnation)
        self.leaving = False
        #: What happened how often: drops, refutations, conflicts. A fixed set of names, so bounded.
        self.counters: Counter[str] = Counter()
        self._actions: list[Action] = []
        self._seq = rng.randrange(1 << 31)

    @property
    def name(self) -> str:
        """Our own name."""
        return self.identity.name

    @property
    def boot(self) -> int:
        """Our own boot counter, as rows and slow state carry it."""
        return boot_of(self.incarnation)

    def raise_to(self, incarnation: int) -> None:
        """Take a higher incarnation."""
        self.incarnation = incarnation
        self.identity = replace(self.identity, incarnation=boot_of(incarnation))

    def alive(self) -> Alive:
        """Our own record as a rumour."""
        me = self.identity
        return Alive(me.name, self.incarnation, me.host, me.port, me.meta)

    def next_seq(self) -> int:
        """Give a number for a probe or session, unique among those in flight."""
        self._seq = (self._seq + 1) & 0x7FFF_FFFF
        return self._seq

    def packet(self, share: float = 1.0) -> PacketBuilder:
        """Begin a datagram, of that share of the usual size."""
        return self._builder(int(share * self.config.datagram_budget) - self.envelope.overhead)

    def frame(self, parts: Iterable[Part]) -> bytes:
        """Build a stream frame."""
        builder = self._builder(MAX_FRAME_BYTES)
        for part in parts:
            builder.add(encode_part(part))
        return builder.build()

    def send(self, to: Address, *parts: Part) -> None:
        """Send these parts in one datagram; those that do not fit are left out, so put the important ones first."""
        builder = self.packet()
        for part in parts:
            builder.add(encode_part(part))
        self.send_packet(to, builder)

    def send_packet(self, to: Address, builder: PacketBuilder) -> None:
        """Seal a datagram and send it."""
        self.emit(SendDatagram(to, self.envelope.seal(builder.build())))

    def emit(self, action: Action) -> None:
        """Queue an action for the shell."""
        self._actions.append(action)

    def notify(self, event: GossipEvent) -> None:
        """Queue an event for the listener."""
        self._actions.append(Notify(event))

    def drain(self) -> list[Action]:
        """Take what is to be done."""
        actions, self._actions = self._actions, []
        return actions

    def _builder(self, budget: int) -> PacketBuilder:
        me = self.identity
        return PacketBuilder(me.cluster, me.name, self.incarnation, budget)
