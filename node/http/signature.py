"""Signatures of calls between nodes: only a holder of the cluster key can make one, and each is good for one call.

Rules
1. A signature covers method, target, request id, every header of ours, the body, and the very process that is called.
   The headers of clients are not covered: a mesh between the nodes may add its own.
2. The body has a tag of its own (Poly1305, RFC 8439, under a key for this call alone), which the signature of the head
   covers. So a call without a good head is refused before any of its body is read, and a body of 220 KB costs 20
   microseconds on each side; HMAC-SHA256 over it would take 250.
3. A signer numbers its calls. Who is called takes each number of a caller once, and a call that was made for a process
   before it not at all: nothing recorded is of any use.
4. The first key of the ring signs, every key verifies. What is signed with says nothing about the gossip encryption:
   each use has a derived key (`gossip.keyring`).
5. Answers are not signed: whoever can change packets between nodes can change them. TLS (`node.tls`) is the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.poly1305 import Poly1305

from gossip import ClusterKey, Keyring
from gossip.keyring import MAX_KEYS
from gossip.replay import ReplayWindow
from node.keys import USE_PEER_BODIES, USE_PEER_CALLS
from node.quick import quick

AUTH_HEADER = "x-grapevine-auth"
#: Hex digits of what names one process of a node.
BOOT_DIGITS = 24
#: Processes whose numbers are remembered; the one that was quiet for longest is forgotten first.
MAX_CALLERS = 8192
#: Calls of one process that may overtake each other: more than the connections it may have to us.
OVERTAKING = 4096
_HEADER = re.compile(rf"([0-9a-f]{{{BOOT_DIGITS}}})\.(0|[1-9][0-9]{{0,17}})\.([0-9a-f]{{32}})\.([0-9a-f]{{64}})")

#: The key for heads, and that which the keys for bodies are made of.
_Derived = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class PeerCall:
    """What is signed beside the body. ``ours``: the headers that begin with x-grapevine-, by lower-case name."""

    method: str
    target: str
    rid: str
    ours: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SignedBody:
    """What the body of a genuine call has to be."""

    _key: bytes
    _tag: bytes

    def secrets(self) -> tuple[bytes, bytes]:
        """What it is made of, for a worker that reads the body."""
        return self._key, self._tag

    def matches(self, body: bytes) -> bool:
        """Whether this is the body that was signed."""
        return hmac.compare_digest(Poly1305.generate_tag(self._key, body), self._tag)


quick(PeerCall, SignedBody)


class PeerSigner:
    """Signs our calls and checks those of others."""

    def __init__(self, ring: Keyring) -> None:
        self._ring = ring
        #: Names this process. Gossip tells it to our peers (`node.meta`), and their calls are signed for it.
        self.boot = secrets.token_hex(BOOT_DIGITS // 2)
        self._numbers = itertools.count()
        self._callers: OrderedDict[str, ReplayWindow] = OrderedDict()
        #: What was derived from the keys of the ring, by their ids.
        self._derived: dict[str, _Derived] = {}

    @property
    def enabled(self) -> bool:
        """Whether the cluster has a key."""
        return self._ring.first is not None

    def sign(self, call: PeerCall, body: bytes, *, receiver: str) -> str:
        """Return the value of the auth header for a call to the process ``receiver``."""
        key = self._ring.first
        assert key is not None, "there is no key to sign with"
        derived = self._derive(key)
        serial = f"{self.boot}.{next(self._numbers)}"
        tag = Poly1305.generate_tag(_body_key(derived, serial), body).hex()
        return f"{serial}.{tag}.{_mac(derived, _signed(serial, tag, receiver, call))}"

    def verify(self, header: str, call: PeerCall) -> SignedBody | None:
        """Return what the body must be; None unless one of our keys signed this very call, for us, and never before."""
        parts = _HEADER.fullmatch(header)
        if parts is None:
            return None
        boot, number, tag, mac = parts.groups()
        serial = f"{boot}.{number}"
        signed = _signed(serial, tag, self.boot, call)
        for key in self._ring:
            derived = self._derive(key)
            if hmac.compare_digest(mac, _mac(derived, signed)):
                if not self._first_time(boot, int(number)):
                    return None
                return SignedBody(_body_key(derived, serial), bytes.fromhex(tag))
        return None

    def _derive(self, key: ClusterKey) -> _Derived:
        derived = self._derived.get(key.id)
        if derived is None:
            if len(self._derived) >= MAX_KEYS:
                self._derived.clear()
            derived = self._derived[key.id] = (key.derive(USE_PEER_CALLS), key.derive(USE_PEER_BODIES))
        return derived

    def _first_time(self, boot: str, number: int) -> bool:
        window = self._callers.get(boot)
        if window is None:
            window = self._callers[boot] = ReplayWindow(OVERTAKING)
            if len(self._callers) > MAX_CALLERS:
                self._callers.popitem(last=False)
        self._callers.move_to_end(boot)
        if not window.fresh(number):
            return False
        window.mark(number)
        return True


def _body_key(derived: _Derived, serial: str) -> bytes:
    """A key that no other call has: Poly1305 is only safe once under each."""
    return hashlib.blake2b(serial.encode(), key=derived[1], digest_size=32).digest()


def _signed(serial: str, tag: str, receiver: str, call: PeerCall) -> bytes:
    """What the head's signature is over."""
    parts = [serial, tag, receiver, call.method, call.target, call.rid]
    for name, value in sorted(call.ours.items()):
        if name != AUTH_HEADER:
            parts += (name, value)
    return "\0".join(parts).encode("utf-8", "surrogateescape")


def _mac(derived: _Derived, signed: bytes) -> str:
    return hmac.digest(derived[0], signed, "sha256").hex()
