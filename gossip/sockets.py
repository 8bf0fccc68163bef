"""One port, UDP and TCP: binding both, with an error that says what is wrong. Blocking-free: binding never waits."""

from __future__ import annotations

import errno
import socket

from gossip.errors import GossipBindError

#: Attempts to find a port that is free for both when any will do.
EPHEMERAL_ATTEMPTS = 32
#: Kernel buffer for received datagrams, in bytes: rides out a stall of the event loop.
RECEIVE_BUFFER_BYTES = 1 << 20
BACKLOG = 128


def bind_pair(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Give a bound UDP and a listening TCP socket on the same port; port 0 takes a free one.

    `host` is an IP literal, the wildcard included. :raises GossipBindError: with the port and the reason.
    """
    for attempt in range(EPHEMERAL_ATTEMPTS if port == 0 else 1):
        try:
            return _bind_once(host, port)
        except OSError as error:
            last = error
            if error.errno != errno.EADDRINUSE or attempt == EPHEMERAL_ATTEMPTS - 1:
                break
    raise GossipBindError(_explain(host, port, last)) from last


def _bind_once(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stream.bind((host, port))
        datagrams = socket.socket(family, socket.SOCK_DGRAM)
        try:
            datagrams.setblocking(False)
            datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            datagrams.bind((host, stream.getsockname()[1]))
            stream.listen(BACKLOG)
        except OSError:
            datagrams.close()
            raise
    except OSError:
        stream.close()
        raise
    return datagrams, stream


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"gossip port {port} on {host} is in use (UDP and TCP are both needed): choose another --gossip-port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this host: gossip cannot bind port {port} there"
    if error.errno == errno.EACCES:
        return f"no permission to bind gossip port {port} on {host}: ports below 1024 need privileges"
    return f"gossip cannot bind port {port} on {host}: {error.strerror or error}"
