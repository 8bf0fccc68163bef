"""Streams: one request and one reply each. Answers what peers ask, and hands on what they answered us.

A probe asks for a sign of life where datagrams got none, an exchange for the table of members, a pull for slow state.
"""

from __future__ import annotations

from gossip import actions as io
from gossip.errors import RemoteError
from gossip.exchange import Exchange
from gossip.hub import Hub
from gossip.identity import Address
from gossip.intake import Intake
from gossip.messages import Ack, Packet, Part, Ping, PushPull, SlowDelta, SlowPull
from gossip.prober import Prober
from gossip.sessions import Purpose, Session, Sessions
from gossip.slow_state import SlowState


class Dialogue:
    """Both sides of every stream of one endpoint."""

    def __init__(
        self, hub: Hub, intake: Intake, sessions: Sessions, *, exchange: Exchange, prober: Prober, slow: SlowState
    ) -> None:
        self._hub = hub
        self._intake = intake
        self._sessions = sessions
        self._exchange = exchange
        self._prober = prober
        self._slow = slow

    def requested(self, event: io.StreamRequested, now: float) -> None:
        """A peer has opened a stream: answer, or close it."""
        asked = self._intake.request(event.data)
        reply = self._answer(asked[0], now) if asked is not None and asked[0].parts else None
        if asked is None or reply is None:
            self._hub.emit(io.CloseStream(event.stream))
        else:
            sealed = self._hub.envelope.seal_reply(self._hub.frame((reply,)), asked[1])
            self._hub.emit(io.ReplyStream(event.stream, sealed))

    def _answer(self, packet: Packet, now: float) -> Part | None:
        part = packet.parts[0]
        match part:
            case Ping():
                return Ack(part.seq, self._hub.name)
            case SlowPull():
                return self._slow.give(part, self._hub.config.slow_chunk_bytes)
            case PushPull():
                self._exchange.merge(packet.sender, part, self._address_of(packet.sender, part), now)
                return self._exchange.table()
        return None

    def _address_of(self, name: str, table: PushPull) -> Address | None:
        """Where the sender of a table listens: the stream itself came from another port."""
        if name == self._hub.name:
            return None
        return next(((r.host, r.port) for r in table.members[:1] if r.name == name), None)

    def ended(self, session: int, data: bytes | None, now: float) -> None:
        """A stream that we opened is over, with a reply or without."""
        ours = self._sessions.close(session)
        if ours is None:
            return
        packet = self._intake.reply(data, ours.token) if data is not None else None
        try:
            self._hand_on(ours, packet, now)
        except RemoteError:
            self._hub.counters["refused"] += 1

    def _hand_on(self, ours: Session, packet: Packet | None, now: float) -> None:
        part = packet.parts[0] if packet is not None and packet.parts else None
        match ours.purpose:
            case Purpose.EXCHANGE if packet is not None:
                self._exchange.replied(ours.to, packet, now)
            case Purpose.EXCHANGE:
                self._exchange.failed(ours.to)
            case Purpose.PROBE if isinstance(part, Ack):
                self._prober.acked(part, now)
            case Purpose.SLOW:
                delta = part if isinstance(part, SlowDelta) else None
                self._slow.stream_replied(str(ours.key), delta, ours.to, now)
