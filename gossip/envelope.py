"""What goes around every packet: nothing without a key, an AEAD seal with one.

Form: `SEALED | kind (1) | key id (4) | session (12) | counter (4) | ciphertext and tag`. A datagram carries 38 bytes
more than in clear. Everything before the ciphertext, and the cluster label, is authenticated with it.

Rules
1. Each sender draws a random session at its start and counts its datagrams. Cipher key = keyed BLAKE2b of the session,
   nonce = the counter: no pair is ever used twice, whatever the number of nodes and boots. A session that is counted
   out is replaced by a new one.
2. A receiver keeps a window of 64 counters per session, for at most `MAX_SESSIONS`, the least lately heard leave first.
   Only what decrypts enters the table, so that a stranger cannot push anybody out.
3. A stream's request has a session of its own and is taken once; the reply is sealed under both its own session and the
   request's, so that it answers that request and no other.
4. With a key, nothing in clear is taken; without one, nothing sealed. Whatever is refused is refused before it is
   decoded, as `SealError`, with the reason under which it is counted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from gossip.errors import SealError
from gossip.keyring import KEY_ID_BYTES, ClusterKey, Keyring
from gossip.replay import ReplayWindow

#: First byte of whatever is sealed; packets in clear begin with the protocol version.
SEALED: Final = 0xE5
_DATAGRAM: Final = b"\xe5\x01"
_REQUEST: Final = b"\xe5\x02"
_REPLY: Final = b"\xe5\x03"
SESSION_BYTES: Final = 12
_COUNTER_BYTES: Final = 4
_TAG_BYTES: Final = 16
_PREFIX_BYTES: Final = 2 + KEY_ID_BYTES + SESSION_BYTES
#: Bytes that sealing adds to a datagram, at most.
OVERHEAD: Final = _PREFIX_BYTES + _COUNTER_BYTES + _TAG_BYTES
#: Senders' sessions with a window, and stream requests remembered.
MAX_SESSIONS: Final = 8192
MAX_REQUESTS: Final = 4096
_USE: Final = b"gossip"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Token:
    """Ties the reply of a stream to its request."""

    key: ClusterKey
    session: bytes


class _Sender:
    """A peer's session: its cipher and its window."""

    __slots__ = ("cipher", "window")

    def __init__(self, cipher: ChaCha20Poly1305) -> None:
        self.cipher = cipher
        self.window = ReplayWindow()


class Envelope:
    """Seals and opens for one node. `entropy(n)` gives n unpredictable bytes; without keys it is never asked."""

    def __init__(self, keyring: Keyring, cluster: str, entropy: Callable[[int], bytes]) -> None:
        self.keyring = keyring
        self._label = cluster.encode()
        self._entropy = entropy
        self._own: tuple[ClusterKey, bytes, ChaCha20Poly1305] | None = None
        self._counter = 0
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()
        self._requests: OrderedDict[bytes, None] = OrderedDict()
        #: How many packets each key of the ring has opened, by its id.
        self.opened: dict[str, int] = {}

    @property
    def overhead(self) -> int:
        """Bytes that `seal` adds to a datagram."""
        return OVERHEAD if len(self.keyring) else 0

    @property
    def sizes(self) -> tuple[int, int]:
        """How many senders and stream requests are remembered."""
        return len(self._senders), len(self._requests)

    # --- datagrams ----------------------------------------------------------------------------------------------------

    def seal(self, data: bytes) -> bytes:
        """Give a datagram as it travels."""
        key = self.keyring.first
        if key is None:
            return data
        session, cipher = self._own_session(key)
        counter = self._counter.to_bytes(_COUNTER_BYTES, "big")
        self._counter += 1
        head = _DATAGRAM + bytes.fromhex(key.id) + session + counter
        return head + cipher.encrypt(bytes(8) + counter, data, head + self._label)

    def open(self, data: bytes) -> bytes:
        """Give what a datagram carries. :raises SealError: it is not from a holder of our keys, or came before."""
        if not self._is_sealed(data):
            return data
        start = _PREFIX_BYTES + _COUNTER_BYTES
        key = self._key_of(data, _DATAGRAM, start + _TAG_BYTES)
        session = data[2:_PREFIX_BYTES]  # with the key's id: one session, one key
        sender = self._senders.get(session) or _Sender(_cipher(key, session))
        counter = int.from_bytes(data[_PREFIX_BYTES:start], "big")
        if not sender.window.fresh(counter):
            raise SealError("replayed")
        nonce = bytes(8) + data[_PREFIX_BYTES:start]
        opened = _decrypt(sender.cipher, nonce, data[start:], data[:start] + self._label)
        sender.window.mark(counter)
        _remember(self._senders, session, sender, MAX_SESSIONS)
        self._count(key)
        return opened

    def _own_session(self, key: ClusterKey) -> tuple[bytes, ChaCha20Poly1305]:
        if self._own is None or self._own[0] is not key or self._counter >> (8 * _COUNTER_BYTES):
            session = self._entropy(SESSION_BYTES)
            self._own = (key, session, _cipher(key, bytes.fromhex(key.id) + session))
            self._counter = 0
        return self._own[1], self._own[2]

    # --- streams ------------------------------------------------------------------------------------------------------

    def seal_request(self, data: bytes) -> tuple[bytes, Token | None]:
        """Give a stream's request as it travels, and what its reply will be checked against."""
        key = self.keyring.first
        if key is None:
            return data, None
        session = self._entropy(SESSION_BYTES)
        head = _REQUEST + bytes.fromhex(key.id) + session
        sealed = _cipher(key, session, b"request").encrypt(bytes(12), data, head + self._label)
        return head + sealed, Token(key, session)

    def open_request(self, data: bytes) -> tuple[bytes, Token | None]:
        """Give what a request carries, and what the reply is to be sealed with. :raises SealError: as in `open`."""
        if not self._is_sealed(data):
            return data, None
        key = self._key_of(data, _REQUEST, _PREFIX_BYTES + _TAG_BYTES)
        session = data[2 + KEY_ID_BYTES : _PREFIX_BYTES]
        if session in self._requests:
            raise SealError("replayed")
        head, body = data[:_PREFIX_BYTES], data[_PREFIX_BYTES:]
        opened = _decrypt(_cipher(key, session, b"request"), bytes(12), body, head + self._label)
        _remember(self._requests, session, None, MAX_REQUESTS)
        self._count(key)
        return opened, Token(key, session)

    def seal_reply(self, data: bytes, token: Token | None) -> bytes:
        """Give a stream's reply as it travels."""
        if token is None:
            return data
        session = self._entropy(SESSION_BYTES)
        head = _REPLY + bytes.fromhex(token.key.id) + session
        cipher = _cipher(token.key, token.session + session, b"reply")
        return head + cipher.encrypt(bytes(12), data, head + self._label)

    def open_reply(self, data: bytes, token: Token | None) -> bytes:
        """Give what a reply carries. :raises SealError: it is not the answer to that request."""
        if token is None:
            self._is_sealed(data)
            return data
        if len(data) < _PREFIX_BYTES + _TAG_BYTES or data[:2] != _REPLY:
            raise SealError("unsealed")
        head, body = data[:_PREFIX_BYTES], data[_PREFIX_BYTES:]
        cipher = _cipher(token.key, token.session + head[2 + KEY_ID_BYTES :], b"reply")
        return _decrypt(cipher, bytes(12), body, head + self._label)

    # --- shared -------------------------------------------------------------------------------------------------------

    def _is_sealed(self, data: bytes) -> bool:
        sealed = data[:1] == _DATAGRAM[:1]
        if sealed and not len(self.keyring):
            raise SealError("sealed_without_key")
        if not sealed and len(self.keyring):
            raise SealError("unsealed")
        return sealed

    def _key_of(self, data: bytes, kind: bytes, least: int) -> ClusterKey:
        if len(data) < least or data[:2] != kind:
            raise SealError("unsealed")
        key = self.keyring.get(data[2 : 2 + KEY_ID_BYTES].hex())
        if key is None:
            raise SealError("unknown_key")
        return key

    def _count(self, key: ClusterKey) -> None:
        self.opened[key.id] = self.opened.get(key.id, 0) + 1
        if len(self.opened) > len(self.keyring):  # a key was removed
            self.opened = {key_id: count for key_id, count in self.opened.items() if key_id in self.keyring.ids}


def _remember(table: OrderedDict[bytes, T], session: bytes, value: T, most: int) -> None:
    table[session] = value
    table.move_to_end(session)
    if len(table) > most:
        table.popitem(last=False)


def _cipher(key: ClusterKey, session: bytes, purpose: bytes = b"datagram") -> ChaCha20Poly1305:
    return ChaCha20Poly1305(hashlib.blake2b(session, key=key.derive(_USE), person=purpose, digest_size=32).digest())


def _decrypt(cipher: ChaCha20Poly1305, nonce: bytes, body: bytes, authenticated: bytes) -> bytes:
    try:
        return cipher.decrypt(nonce, body, authenticated)
    except InvalidTag:
        raise SealError("forged") from None
