"""Who a node is: name, cluster, boot, address, meta."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from gossip.errors import LocalError
from gossip.limits import MAX_BOOT, MAX_META_BYTES, NAME_PATTERN

#: An IP literal and a port.
Address = tuple[str, int]


@lru_cache(maxsize=8192)
def is_ip_literal(host: str) -> bool:
    """Tell whether `host` is a usable IPv4 or IPv6 literal: no name, no zone, not the wildcard."""
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host and not parsed.is_unspecified


@dataclass(frozen=True, slots=True)
class Identity:
    """One boot of one node.

    `name`: unique in the cluster, `[A-Za-z0-9._-]{1,64}`. `cluster`: the label; nodes with another one ignore each
    other. `incarnation`: persisted boot counter, at least 1 (`gossip.boot.next_incarnation`). `host`: the address that
    peers reach us at, not a wildcard (a host name is resolved once by the agent). `port`: UDP and TCP; 0 takes a free
    one. `meta`: at most 512 opaque bytes that travel with the member record.

    :raises LocalError: a field is out of its range.
    """

    name: str
    cluster: str
    incarnation: int
    host: str
    port: int
    meta: bytes = b""

    def __post_init__(self) -> None:
        if not NAME_PATTERN.match(self.name):
            raise LocalError(f"node name {self.name!r}: 1 to 64 of letters, digits, '.', '_' and '-'")
        if not NAME_PATTERN.match(self.cluster):
            raise LocalError(f"cluster label {self.cluster!r}: 1 to 64 of letters, digits, '.', '_' and '-'")
        if not 1 <= self.incarnation < MAX_BOOT:
            raise LocalError(f"incarnation {self.incarnation}: a boot counter is at least 1 and below 2**44")
        if not 0 <= self.port <= 65535:
            raise LocalError(f"port {self.port}: 0 to 65535")
        if len(self.meta) > MAX_META_BYTES:
            raise LocalError(f"meta has {len(self.meta)} bytes, {MAX_META_BYTES} is the limit")

    @property
    def address(self) -> Address:
        """Host and port as one pair."""
        return (self.host, self.port)
