"""How nodes know each other under TLS: by certificates that follow from the cluster key, so that nobody makes any.

Rules
1. Each key of the ring makes the same authority on every node: its private key is derived from the cluster key, so
   whoever holds that can issue, and nobody else can. It is never written down and never leaves the process.
2. A node issues a certificate for itself when it starts and whenever its ring changes. It shows it to whoever asks
   for `PEER_NAME`; clients, who ask for the host's own name, see the operator's certificate.
3. A node trusts the authorities of all its keys, and shows the certificate of the first: a rotation passes unnoticed.
4. Without a cluster key there is nothing to trust: calls between nodes are encrypted, and anybody could answer them.
5. Certificates are good for ever: they end with the process, and clocks of nodes may be wrong.
6. Who calls proves it by its signature (`node.http.signature`), over whatever connection.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gossip import ClusterKey, Keyring
from node.keys import USE_PEER_TLS

#: The name that a node asks for when it calls another one; no host is called so, .internal being reserved.
PEER_NAME = "peer.grapevine.internal"
_ALWAYS = (datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31))
_CURVE = ec.SECP256R1()
#: Order of P-256 (SEC 2, 2.4.2): private keys are the numbers below it.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class ClusterTrust:
    """What follows from the ring for TLS between nodes; `rekey` it after each change."""

    def __init__(self, ring: Keyring, folder: Path) -> None:
        self._ring = ring
        #: A private directory: OpenSSL takes keys from files only, ours are gone as soon as they were read.
        self._folder = folder
        self._calling: ssl.SSLContext | None = None
        self._followers: list[Callable[[], None]] = []

    def subscribe(self, follower: Callable[[], None]) -> None:
        """Call this after each change."""
        self._followers.append(follower)

    def rekey(self) -> None:
        """The ring has changed."""
        self._calling = None
        for follower in self._followers:
            follower()

    @property
    def calling(self) -> ssl.SSLContext:
        """For connections to other nodes, to be made with the server name `PEER_NAME`."""
        if self._calling is None:
            self._calling = self._make_calling()
        return self._calling

    def _make_calling(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self._ring.first is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        roots = [_authority(key)[0].public_bytes(Encoding.PEM).decode() for key in self._ring]
        context.load_verify_locations(cadata="\n".join(roots))
        return context

    def answering(self) -> ssl.SSLContext | None:
        """For connections of other nodes; None without a cluster key: they get what clients get."""
        key = self._ring.first
        if key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        certificate, secret = _issue(key)
        handle, path = tempfile.mkstemp(dir=self._folder, prefix="peer-tls-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secret + certificate)
            context.load_cert_chain(path)
        finally:
            Path(path).unlink()
        return context


def _authority(key: ClusterKey) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority of a cluster key: the same name and key wherever and whenever it is made."""
    number = int.from_bytes(key.derive(USE_PEER_TLS)) % (_ORDER - 1) + 1
    secret = ec.derive_private_key(number, _CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Grapevine cluster {key.id}")])
    builder = _builder(name, name, secret.public_key(), secret.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs=True), critical=True).sign(secret, hashes.SHA256()), secret


def _issue(key: ClusterKey) -> tuple[bytes, bytes]:
    """A new certificate under the authority of ``key`` and its private key, in PEM."""
    authority, signer = _authority(key)
    secret = ec.generate_private_key(_CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, PEER_NAME)])
    builder = _builder(name, authority.subject, secret.public_key(), signer.public_key())
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([x509.DNSName(PEER_NAME)]), False),
    ):
        builder = builder.add_extension(extension, critical)
    certificate = builder.sign(signer, hashes.SHA256())
    pem = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), pem


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, issuing: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), *_ALWAYS)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
