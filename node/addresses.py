"""Names and addresses: what a node is called, how peers reach it, and whether its ports are free."""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import socket

from node.errors import PortTakenError, SettingsError

#: A port that is not given is the HTTP port plus this (minus, above 65535): neighbouring nodes never collide.
GOSSIP_OFFSET = 10_000
KV_OFFSET = 20_000
DEFAULT_PORT = 8100
DEFAULT_GOSSIP_PORT = DEFAULT_PORT + GOSSIP_OFFSET
DEFAULT_KV_PORT = DEFAULT_PORT + KV_OFFSET
MAX_PORT = 65535
#: Longest name of a node or a cluster label, characters.
MAX_NAME = 64
NAME_PATTERN = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}")
WILDCARD_HOSTS = ("0.0.0.0", "::", "")
#: Connections that wait to be accepted.
BACKLOG = 1024
#: Family, an address that is reserved for documentation (so it is behind the default route), and this host.
_V4 = (socket.AF_INET, "192.0.2.1", "127.0.0.1")
_V6 = (socket.AF_INET6, "2001:db8::1", "::1")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")


def split_address(address: str) -> tuple[str, int]:
    """`host[:port]` (`[v6][:port]`) as a pair; the default port is that of gossip. Raises `SettingsError`."""
    match = _ADDRESS.fullmatch(address)
    port = int(match[2] or DEFAULT_GOSSIP_PORT) if match else 0
    if match is None or not 0 < port <= MAX_PORT:
        raise SettingsError(f"--join {address!r}: use HOST:PORT with the gossip port of a running node")
    return match[1].strip("[]"), port


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def beside(port: int, offset: int) -> int:
    """The default of a second port next to `port`; 0 (any) stays 0."""
    if port == 0:
        return 0
    return port + offset if port + offset <= MAX_PORT else port - offset


def default_name(port: int) -> str:
    """A valid name from the host name and the HTTP port; with port 0 (any) from a random number."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname().split(".")[0]).strip("-") or "node"
    end = str(port) if port else secrets.token_hex(4)
    return f"{host[: MAX_NAME - 1 - len(end)]}-{end}"


def advertised(host: str) -> str:
    """The address at which peers can reach a server that listens on `host`."""
    if host not in WILDCARD_HOSTS:
        return host
    family, far, loopback = _V6 if host == "::" else _V4
    # No packet is sent: connecting a UDP socket only asks the kernel which own address a route would use.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return loopback


def is_ipv4(host: str) -> bool:
    """Whether `host` is an IPv4 address."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def listen_http(host: str, port: int) -> socket.socket:
    """A listening socket for the HTTP server, made before anything slow is started.

    Raises `PortTakenError` when somebody else has the port, `SettingsError` when the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def _bind_error(host: str, port: int, error: Exception) -> SettingsError:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return PortTakenError(
            f"port {port} of {host} is taken by another process: choose another with --port (see `ss -ltnp`)"
        )
    if code == errno.EACCES:
        return SettingsError(f"port {port} needs more rights than this user has; choose one above 1023 with --port")
    return SettingsError(f"--host {host!r} cannot be listened on ({error}); use an address of this host or 0.0.0.0")
