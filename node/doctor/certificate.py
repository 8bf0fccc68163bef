"""The certificate of an HTTP port, as a client would judge it, and the files that it comes from."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.errors import SettingsError
from node.tls.server import server_context

#: Others than owner and group may read or change a file.
_OTHERS = 0o007


@dataclass(frozen=True, slots=True)
class Certificate:
    """``names``: DNS names (also with a star) and addresses; ``begins``, ``ends``: seconds since 1970."""

    names: tuple[str, ...]
    begins: float
    ends: float
    #: SHA-256 of it.
    digest: bytes = b""

    def covers(self, host: str) -> bool:
        """Whether clients that call the node by this name or address take it for the node's."""
        return any(_matches(name, host) for name in self.names)

    @property
    def dns_names(self) -> list[str]:
        """The names by which others can call the node."""
        return [name for name in self.names if not _is_address(name) and name != "localhost"]


@dataclass(frozen=True, slots=True)
class Files:
    """What is in the two files of --tls-cert and --tls-key. ``fault``: why a node could not use them."""

    certificate_path: str
    key_path: str
    certificate: Certificate | None = None
    fault: str = ""
    #: The key may be read by any user of the host.
    exposed: bool = False


def read_files(certificate: str, key: str) -> Files:
    """Read the files as a node does at its start; an empty ``key`` means that it is in the same file."""
    key = key or certificate
    try:
        server_context(Path(certificate), Path(key))
        found = of_pem(Path(certificate).read_bytes())
        exposed = bool(Path(key).stat().st_mode & _OTHERS)
    except (SettingsError, OSError, ValueError) as error:
        return Files(certificate, key, fault=str(error))
    return Files(certificate, key, found, exposed=exposed)


def of_pem(data: bytes) -> Certificate:
    """The first certificate of a file. Raises `ValueError`."""
    return _described(x509.load_pem_x509_certificate(data))


def of_der(data: bytes) -> Certificate | None:
    """The certificate that somebody has shown; None where it makes no sense."""
    try:
        return _described(x509.load_der_x509_certificate(data))
    except ValueError:
        return None


def _described(found: x509.Certificate) -> Certificate:
    try:
        held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names: tuple[str, ...] = ()  # the common name: no client of today looks at it
    else:
        addresses = map(str, held.get_values_for_type(x509.IPAddress))
        names = (*held.get_values_for_type(x509.DNSName), *addresses)
    digest = hashlib.sha256(found.public_bytes(Encoding.DER)).digest()
    return Certificate(names, found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp(), digest)


def _matches(name: str, host: str) -> bool:
    if _is_address(name) or _is_address(host):
        return _is_address(name) and _is_address(host) and ipaddress.ip_address(name) == ipaddress.ip_address(host)
    name, host = name.lower().rstrip("."), host.lower().rstrip(".")
    if name.startswith("*."):  # a star stands for one label
        return host.partition(".")[2] == name[2:] != ""
    return name == host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
