"""Who is there: the handshake of a transfer connection, without I/O.

Both sides prove that they hold the cluster key by an HMAC-SHA256 over both nonces, the cluster label and the puller's
name. Either may hold several keys while they are rotated: the source proves its first one, the puller answers with the
same if it holds it, and the source takes any of its own. The two proofs carry different labels, so neither can be
played back as the other. Without a key on either side the proofs are empty; a side with a key refuses one without. It
authenticates the connection's opening and does not encrypt: whoever can change packets between the hosts can still
take the connection over. Inside TLS (`tls`) the proofs are also over the connection's `binding`, which ties them to
exactly the two ends of the encryption; without TLS the binding is empty.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, TypeAlias

from .errors import LocalError, RemoteError
from .messages import Challenge, Error, Hello, Message, Proof, Welcome
from .wire import PROTOCOL_VERSION

#: One key, several (the one to prove first), or none.
Secrets: TypeAlias = bytes | tuple[bytes, ...] | None
#: Why nothing is encrypted without a key.
NO_KEY: Final = "encryption of KV blocks needs a cluster key: without one nobody knows who is at the other end"

_SOURCE: Final = b"grapevine transfer source"
_PULLER: Final = b"grapevine transfer puller"


class PullerHandshake:
    """The dialling side. `nonce`: NONCE_BYTES fresh random bytes."""

    def __init__(self, cluster: str, name: str, secrets: Secrets, nonce: bytes, binding: bytes = b"") -> None:
        self._secrets = _candidates(secrets, binding)
        self._binding = binding
        self._hello = Hello(PROTOCOL_VERSION, cluster, name, nonce)
        self._proven = False  # the source has shown that it holds the key
        self.done = False

    def start(self) -> Hello:
        """Return the first message to send."""
        return self._hello

    def receive(self, message: Message) -> Proof | None:
        """Take the source's message, return the answer to send if there is one; RemoteError = close."""
        match message:
            case Challenge() if not self._proven:
                for secret in self._secrets:
                    if hmac.compare_digest(
                        _proof(secret, _SOURCE, self._hello, message.nonce, self._binding), message.proof
                    ):
                        self._proven = True
                        return Proof(_proof(secret, _PULLER, self._hello, message.nonce, self._binding))
                raise RemoteError("transfer: the source does not have our cluster key")
            case Welcome() if self._proven:
                self.done = True
                return None
            case Error():
                raise RemoteError(f"transfer refused: {message.message}")
            case _:
                raise RemoteError("transfer: unexpected message in the handshake")


class SourceHandshake:
    """The accepting side. `nonce`: NONCE_BYTES fresh random bytes."""

    def __init__(self, cluster: str, secrets: Secrets, nonce: bytes, binding: bytes = b"") -> None:
        self._cluster = cluster
        self._secrets = _candidates(secrets, binding)
        self._binding = binding
        self._nonce = nonce
        self._hello: Hello | None = None
        self.done = False

    @property
    def peer(self) -> str:
        """The puller's name, as it says."""
        return self._hello.name if self._hello is not None else ""

    def receive(self, message: Message) -> Message:
        """Take the puller's message, return the answer. After an Error answer close; RemoteError = close."""
        match message:
            case Hello() if self._hello is None:
                if message.cluster != self._cluster:
                    return Error("cluster", f"this node is in cluster {self._cluster!r}")
                self._hello = message
                return Challenge(self._nonce, _proof(self._secrets[0], _SOURCE, message, self._nonce, self._binding))
            case Proof() if self._hello is not None and not self.done:
                proofs = [_proof(secret, _PULLER, self._hello, self._nonce, self._binding) for secret in self._secrets]
                if not any(hmac.compare_digest(expected, message.proof) for expected in proofs):
                    return Error("auth", "wrong cluster key")
                self.done = True
                return Welcome()
            case _:
                raise RemoteError("transfer: unexpected message in the handshake")


def _candidates(secrets: Secrets, binding: bytes) -> tuple[bytes | None, ...]:
    if binding and not secrets:
        raise LocalError(NO_KEY)  # the binding would bind nothing
    return (secrets or (None,)) if isinstance(secrets, tuple) else (secrets,)


def _proof(secret: bytes | None, side: bytes, hello: Hello, source_nonce: bytes, binding: bytes) -> bytes:
    if secret is None:
        return b""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (side, hello.nonce, source_nonce, hello.cluster.encode(), hello.name.encode(), binding):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.digest()
