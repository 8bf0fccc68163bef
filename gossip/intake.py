"""From sealed bytes to a packet: unsealed first, then decoded. What is wrong with it is counted, and it is dropped."""

from __future__ import annotations

from collections.abc import Callable

from gossip.envelope import Envelope, Token
from gossip.errors import RemoteError, SealError, WrongClusterError
from gossip.hub import Hub
from gossip.limits import MAX_DATAGRAM_BYTES, MAX_FRAME_BYTES
from gossip.messages import Packet

#: Reads a packet: bytes, the cluster's name, the most bytes allowed. Raises `RemoteError`.
Decode = Callable[[bytes, str, int], Packet]


class Intake:
    """The one place where foreign bytes become packets. The counters are the hub's."""

    def __init__(self, hub: Hub, envelope: Envelope, decode: Decode) -> None:
        self._hub = hub
        self._envelope = envelope
        self._decode = decode

    def datagram(self, sealed: bytes) -> Packet | None:
        """The packet in a datagram."""
        return self._opened(self._envelope.open, sealed, MAX_DATAGRAM_BYTES)

    def request(self, sealed: bytes) -> tuple[Packet, Token | None] | None:
        """The packet that opened a stream, and the token that its reply is to be sealed with."""
        try:
            data, token = self._envelope.open_request(sealed)
        except SealError as error:
            self._hub.counters[error.reason] += 1
            return None
        packet = self._read(data, MAX_FRAME_BYTES)
        return (packet, token) if packet is not None else None

    def reply(self, sealed: bytes, token: Token | None) -> Packet | None:
        """The packet that came back on a stream of ours; `token` is what our request was sealed with."""
        return self._opened(lambda data: self._envelope.open_reply(data, token), sealed, MAX_FRAME_BYTES)

    def _opened(self, unseal: Callable[[bytes], bytes], sealed: bytes, most: int) -> Packet | None:
        try:
            data = unseal(sealed)
        except SealError as error:
            self._hub.counters[error.reason] += 1
            return None
        return self._read(data, most)

    def _read(self, data: bytes, most: int) -> Packet | None:
        try:
            return self._decode(data, self._hub.identity.cluster, most)
        except WrongClusterError:
            self._hub.counters["wrong_cluster"] += 1
        except RemoteError:
            self._hub.counters["malformed"] += 1
        return None
