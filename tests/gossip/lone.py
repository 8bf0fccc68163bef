"""One endpoint under the microscope: feed it parts by hand, read what it sends."""

from __future__ import annotations

import random
from dataclasses import replace

from gossip import Endpoint, GossipConfig, GossipEvent, Identity, MemberState, RowReceived
from gossip import actions as io
from gossip.decode import decode_packet
from gossip.encode import encode_packet, make_row
from gossip.identity import Address
from gossip.incarnation import first
from gossip.limits import MAX_FRAME_BYTES
from gossip.messages import Ack, Alive, Packet, Part, Ping, Rows

CLUSTER = "test"
HERE: Address = ("10.0.0.1", 7946)
PEER: Address = ("10.0.0.2", 7946)
OTHER: Address = ("10.0.0.3", 7946)
THIRD: Address = ("10.0.0.4", 7946)


def row(name: str, boot: int, seq: int, age_ms: int, payload: bytes) -> Rows:
    """A part with one row in it."""
    return Rows((age_ms // 10,), (make_row(name, boot, seq, payload),))


class Lone:
    """The endpoint `me`; time stands still unless `wait` is called."""

    def __init__(self, config: GossipConfig | None = None, incarnation: int = 5, seed: int = 1) -> None:
        self.now = 1000.0
        self.config = config or GossipConfig.lan()
        self.endpoint = Endpoint(
            Identity("me", CLUSTER, incarnation, *HERE, meta=b"mine"), self.config, random.Random(seed)
        )
        self.events: list[GossipEvent] = []
        self.sent: list[tuple[Address, Packet]] = []
        self.pings: list[tuple[Address, Ping]] = []
        self.streams: list[io.OpenStream] = []
        self.replies: list[io.ReplyStream | io.CloseStream] = []

    def do(self, event: io.Input) -> None:
        self._take(self.endpoint.handle(event, self.now))

    def start(self) -> Lone:
        self.do(io.Started())
        return self

    def hear(self, sender: str, *parts: Part, source: Address = PEER, incarnation: int = first(1)) -> None:
        packet = Packet(sender, incarnation, parts)
        self.do(io.DatagramReceived(source, encode_packet(CLUSTER, packet)))

    def meet(self, name: str = "peer", address: Address = PEER, boot: int = 1) -> None:
        """Let a member be known, and forget what that caused to be sent."""
        self.hear(name, Alive(name, first(boot), *address, b""), source=address, incarnation=first(boot))
        self.sent.clear()

    def answer(self, target: str, by: str | None = None) -> int:
        """Ack every ping for `target` so far, in its own name or another's; says how many there were."""
        mine = [(to, p) for to, p in self.pings if p.target == target]
        self.pings = [(to, p) for to, p in self.pings if p.target != target]
        for to, ping in mine:
            self.hear(by or target, Ack(ping.seq, by or target), source=to)
        return len(mine)

    def request(self, sender: str, *parts: Part, stream: int = 1, incarnation: int = first(1)) -> Packet | None:
        """Play a peer that opens a stream; gives the reply."""
        frame = encode_packet(CLUSTER, Packet(sender, incarnation, parts))
        self.do(io.StreamRequested(stream, ("10.9.9.9", 5000), frame))
        last = self.replies.pop()
        return decode_packet(last.data, CLUSTER, MAX_FRAME_BYTES) if isinstance(last, io.ReplyStream) else None

    def wait(self, seconds: float) -> None:
        """Let time pass, timers firing on their time."""
        until = self.now + seconds
        while (due := self.endpoint.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self._take(self.endpoint.handle_timeout(self.now))
        self.now = until

    def state(self, name: str = "peer") -> MemberState | None:
        view = self.endpoint.member(name, self.now)
        return view.state if view else None

    def parts(self, kind: type, to: Address | None = None) -> list[Part]:
        """Everything of one kind that was sent, to one address or any."""
        return [p for a, packet in self.sent for p in packet.parts if isinstance(p, kind) and to in (None, a)]

    def told(self, kind: type) -> list[GossipEvent]:
        return [e for e in self.events if isinstance(e, kind)]

    def _take(self, actions: list[io.Action]) -> None:
        for action in actions:
            match action:
                case io.SendDatagram():
                    packet = decode_packet(action.data, CLUSTER, 9000)
                    self.sent.append((action.to, packet))
                    self.pings += [(action.to, p) for p in packet.parts if isinstance(p, Ping)]
                case io.Notify():
                    self.events.append(action.event)
                case io.RowsReceived():
                    self.events += [RowReceived(view) for view in self.endpoint.take_rows(self.now)]
                case io.OpenStream():
                    self.streams.append(action)
                case _:
                    self.replies.append(action)


def quick(**changes: object) -> GossipConfig:
    """A preset for tests of the long-term rules: the dead are forgotten soon."""
    base = GossipConfig.lan(dead_keep_s=20.0, gossip_to_dead_s=5.0, push_pull_interval_s=5.0)
    return replace(base, **changes)  # type: ignore[arg-type]
