"""Connections to sources: dialled, authenticated, and one for each peer kept warm."""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
from collections import OrderedDict
from typing import Final

from . import messages
from .errors import LocalError, RemoteError
from .handshake import PullerHandshake, Secrets
from .tls import NOT_TLS, PullerTls
from .transport import Deadline, Transport

#: Warm connections in all; the one that was used longest ago is closed for a new one.
MAX_WARM: Final = 64


class Dialer:
    """Thread-safe. A connection is used by one thread at a time, between `ask` and `keep` or `discard`.

    `encrypt`: over TLS or not at all.
    """

    def __init__(self, label: str, name: str, secret: Secrets, connect_s: float, *, encrypt: bool = False) -> None:
        self._tls = PullerTls() if encrypt else None
        self._label = label
        self._name = name
        self._secret = secret
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._warm: OrderedDict[str, Transport] = OrderedDict()
        self._busy: set[Transport] = set()
        self._closed = False

    def rekey(self, secret: Secrets) -> None:
        """Prove these keys on new connections."""
        self._secret = secret

    def ask(self, address: str, request: messages.Message, deadline: Deadline) -> tuple[Transport, messages.Message]:
        """Send a request, and return the connection and the answer.

        A warm connection that turns out to be dead is replaced by a new one, once. Raises OSError when the source
        cannot be reached, RemoteError when it refuses us or breaks the protocol.
        """
        with self._lock:
            transport = self._warm.pop(address, None)
            if transport is not None:
                self._busy.add(transport)
        if transport is not None:
            try:
                return self._exchange(transport, request, deadline)
            except TimeoutError:
                raise
            except OSError:
                pass  # the source restarted or closed an idle connection: not news about the source of today
        return self._exchange(self._dial(address, deadline), request, deadline)

    def keep(self, address: str, transport: Transport) -> None:
        """Take a connection back that can be used again."""
        surplus: Transport | None = None
        with self._lock:
            self._busy.discard(transport)
            if self._closed or address in self._warm:
                surplus = transport
            else:
                self._warm[address] = transport
                if len(self._warm) > MAX_WARM:
                    surplus = self._warm.popitem(last=False)[1]
        if surplus is not None:
            surplus.close()

    def discard(self, transport: Transport) -> None:
        """Close a connection that cannot be used again."""
        with self._lock:
            self._busy.discard(transport)
        transport.close()

    def close(self) -> None:
        """Close all connections, those in use too: their threads wake up with an OSError. Idempotent."""
        with self._lock:
            self._closed = True
            doomed = [*self._warm.values(), *self._busy]
            self._warm.clear()
        for transport in doomed:
            transport.close()

    def _exchange(
        self, transport: Transport, request: messages.Message, deadline: Deadline
    ) -> tuple[Transport, messages.Message]:
        try:
            transport.send(request, deadline)
            return transport, transport.receive(deadline)
        except BaseException:
            self.discard(transport)
            raise

    def _dial(self, address: str, deadline: Deadline) -> Transport:
        part = deadline.within(self._connect_s)
        try:
            sock = socket.create_connection(split_address(address), timeout=part.wait())
        except UnicodeError as error:  # what the resolver says of a name with a label that is empty or too long
            raise LocalError(f"not an address: {address!r}") from error
        transport = Transport(sock)
        with self._lock:
            self._busy.add(transport)
            closed = self._closed
        if closed:
            self.discard(transport)
            raise ConnectionAbortedError("closing")
        try:
            self._introduce(transport, part)
        except BaseException:
            self.discard(transport)
            raise
        return transport

    def _introduce(self, transport: Transport, deadline: Deadline) -> None:
        binding = self._encrypt(transport, deadline) if self._tls is not None else b""
        nonce = secrets.token_bytes(messages.NONCE_BYTES)
        shake = PullerHandshake(self._label, self._name, self._secret, nonce, binding)
        transport.send(shake.start(), deadline)
        while not shake.done:
            answer = shake.receive(transport.receive(deadline))
            if answer is not None:
                transport.send(answer, deadline)

    def _encrypt(self, transport: Transport, deadline: Deadline) -> bytes:
        assert self._tls is not None
        try:
            return transport.encrypt(self._tls, deadline)
        except ssl.SSLError as error:
            if error.reason == NOT_TLS:
                raise RemoteError("it does not encrypt KV blocks and this node does: start it with --kv-tls") from error
            raise


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"; LocalError when it is neither."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise LocalError(f"not an address: {address!r}")
    return host.strip("[]"), int(port)
