"""Certificates for tests: an authority of one's own and what it issues."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

HOUR = datetime.timedelta(hours=1)


class Authority:
    """Issues certificates for 127.0.0.1 and the names that are asked for."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Test authority")
        self._root = self._build(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.file = folder / "authority.pem"
        self.file.write_bytes(self._root.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self,
        to: str = "node",
        *,
        name: str = "localhost",
        address: str = "127.0.0.1",
        days: float = 1,
        passphrase: bytes = b"",
    ) -> tuple[Path, Path]:
        """Write a certificate and its key, for the owner alone, as files named for ``to``."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address(address))])
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        built = self._build(_name(name), key.public_key(), ends).add_extension(names, critical=False)
        certificate, secret = self.folder / f"{to}.pem", self.folder / f"{to}.key"
        certificate.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        sealing: KeySerializationEncryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        secret.touch(0o600)
        secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, sealing))
        return certificate, secret

    def trust(self) -> ssl.SSLContext:
        """What a client uses that believes this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.file)
        return context

    def _build(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, ends: datetime.datetime | None = None
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        ends = ends or now + 24 * HOUR
        begins = min(now, ends) - HOUR
        return x509.CertificateBuilder(self._name, subject, public, x509.random_serial_number(), begins, ends)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
