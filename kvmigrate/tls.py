"""Encryption of transfer connections: TLS 1.3 that needs no certificate authority.

Rules
1. A source makes a key and a self-signed certificate for its own lifetime. The key never leaves the process readable.
2. Nobody trusts a certificate by itself. Its fingerprint is the channel binding (as `tls-server-end-point` of RFC 5929,
   always by SHA-256): both sides put it into their proofs of the cluster key (`handshake`). Who stands between them
   cannot show the source's certificate, and has no key to make proofs for another one.
3. Who is told to encrypt says nothing in clear but that the other side does not encrypt.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

#: The first byte that a TLS client sends: a record with a handshake message.
CLIENT_HELLO: Final = b"\x16"
#: What a client's library says when the answer to its first message is not TLS.
NOT_TLS: Final = "WRONG_VERSION_NUMBER"
_NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "grapevine")])
# No clock decides whether a certificate is good: it ends with its process.
_FIRST_DAY: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_LAST_DAY: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class SourceTls:
    """The accepting side: one certificate for all its connections."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_NAME)
            .issuer_name(_NAME)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_FIRST_DAY)
            .not_valid_after(_LAST_DAY)
            .sign(key, hashes.SHA256())
        )
        der = certificate.public_bytes(serialization.Encoding.DER)
        self._binding = hashlib.sha256(der).digest()
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # a session that is taken up again would skip nothing that costs
        _load(self._context, key, certificate)

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Take over a connected socket; the TLS handshake follows."""
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def binding(self, _: ssl.SSLSocket) -> bytes:
        """What both sides prove the cluster key over, after the TLS handshake."""
        return self._binding


class PullerTls:
    """The dialling side."""

    def __init__(self) -> None:
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE  # rule 2

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Take over a connected socket; the TLS handshake follows."""
        return self._context.wrap_socket(sock, do_handshake_on_connect=False)

    def binding(self, sock: ssl.SSLSocket) -> bytes:
        """What both sides prove the cluster key over, after the TLS handshake."""
        return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Give key and certificate to the TLS library, which takes them from a file only: the key lies there encrypted."""
    password = secrets.token_bytes(32).hex().encode()
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "identity.pem"
        path.write_bytes(sealed + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(path, password=password)
