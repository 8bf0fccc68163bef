"""The certificate of the HTTP port: read from the operator's files, read again when they change, never half.

Rules
1. A pair of files is made a context of its own and checked before it is used: what is wrong with it changes nothing.
2. Connections that are open keep what they began with; new ones get the newest.
3. Peers are told apart by the name that they ask for (`node.tls.cluster`).
"""

from __future__ import annotations

import datetime
import logging
import ssl
from pathlib import Path

from cryptography import x509

from node.errors import SettingsError
from node.tls.cluster import PEER_NAME, ClusterTrust

#: Largest file read, bytes.
MAX_FILE = 1024 * 1024
_ENCRYPTED = b"ENCRYPTED"

_log = logging.getLogger("grapevine")


class ServerTls:
    """The TLS side of the HTTP port."""

    def __init__(self, certificate: Path, key: Path, trust: ClusterTrust) -> None:
        self.files = (certificate, key)
        self._trust = trust
        self._for_clients: ssl.SSLContext
        self._for_peers: ssl.SSLContext | None = None
        #: When the certificate ends, seconds since 1970.
        self.not_after = 0.0

    def start(self) -> ssl.SSLContext:
        """Read the files and return the context to serve with; it stays the same whatever is read later.

        :raises SettingsError: a file cannot be used.
        """
        self.reload()
        self.rekey()
        front = server_context(*self.files)
        front.sni_callback = self._choose
        self._trust.subscribe(self.rekey)
        return front

    def reload(self) -> None:
        """Read the files again. :raises SettingsError: they cannot be used; what was read before still is."""
        context = server_context(*self.files)
        not_after = _not_after(self.files[0])
        self._for_clients, self.not_after = context, not_after

    def rekey(self) -> None:
        """The cluster's keys have changed."""
        self._for_peers = self._trust.answering()

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Called in each handshake, whether a name is asked for or not."""
        peers = self._for_peers if name == PEER_NAME else None
        connection.context = peers or self._for_clients


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a node serves clients with. :raises SettingsError: the files cannot be used."""
    if _ENCRYPTED in _read(key, "--tls-key"):
        raise SettingsError(f"--tls-key {key} is encrypted: a node starts alone, give it a key without a passphrase")
    _read(certificate, "--tls-cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise SettingsError(f"--tls-key {key} is not the key of --tls-cert {certificate}") from error
        raise SettingsError(
            f"--tls-cert {certificate} with --tls-key {key}: not a certificate (its own first, then those that lead to "
            f"its root) and its key in PEM ({error.reason or error})"
        ) from error
    return context


def _not_after(certificate: Path) -> float:
    """When the certificate ends, seconds since 1970."""
    try:
        ends = x509.load_pem_x509_certificate(_read(certificate, "--tls-cert")).not_valid_after_utc
    except ValueError as error:
        raise SettingsError(f"--tls-cert {certificate} is no certificate in PEM: {error}") from error
    if ends < datetime.datetime.now(datetime.UTC):
        _log.warning("--tls-cert %s has ended on %s: clients will refuse it, renew it", certificate, f"{ends:%Y-%m-%d}")
    return ends.timestamp()


def _read(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE)
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}") from error
