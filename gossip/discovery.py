"""Finding peers on the local network by zeroconf (mDNS): `_grapevine._tcp.local.`.

Rules
1. A node announces name, cluster label and gossip port. What it finds is only an address to dial: membership itself
   comes from gossip, so a forged or stale record costs one failed connection.
2. Records of another cluster, without a label, without an address, or of ourselves are ignored; so is a loopback
   address unless we are on loopback ourselves, and the other way round: neither could be reached.
3. All interfaces are used unless some are named, with IPv4 and IPv6 where the host has both. A record may have several
   addresses; each of them is dialled.
4. zeroconf is imported when discovery starts: whoever joins by seeds alone does not pay for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gossip.errors import LocalError
from gossip.identity import Identity, is_ip_literal
from gossip.limits import NAME_PATTERN

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

SERVICE_TYPE: Final = "_grapevine._tcp.local."
#: Milliseconds for resolving one record, and how many are resolved at a time; further ones wait for their next change.
RESOLVE_MS: Final = 3000
MAX_RESOLVING: Final = 64
#: Addresses dialled of one record.
MAX_ADDRESSES: Final = 8


def instance_name(identity: Identity) -> str:
    """Name of our record: readable, within the 63 bytes of a DNS label, and unique per cluster, name and address."""
    unique = f"{identity.cluster}/{identity.name}/{identity.host}/{identity.port}"
    return f"{identity.name[:40]}-{hashlib.sha256(unique.encode()).hexdigest()[:8]}.{SERVICE_TYPE}"


def peers_of(
    identity: Identity, properties: Mapping[bytes, bytes | None], addresses: Sequence[str], port: int | None
) -> list[str]:
    """Give each `host:port` that a record stands for, our own family first; none if it is of no interest (rule 2)."""
    if properties.get(b"cluster") != identity.cluster.encode() or not port:
        return []
    name = (properties.get(b"name") or b"").decode("ascii", "replace")
    usable = [a for a in addresses if is_ip_literal(a) and _is_loopback(a) == _is_loopback(identity.host)]
    if not NAME_PATTERN.match(name) or (name == identity.name and _is_own(identity, usable, port)):
        return []
    usable.sort(key=lambda address: (":" in address) != (":" in identity.host))
    return [f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in usable[:MAX_ADDRESSES]]


def _is_own(identity: Identity, addresses: Sequence[str], port: int) -> bool:
    return port == identity.port and identity.host in addresses


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


class MdnsDiscovery:
    """Announces this node and reports others of its cluster.

    `identity` must carry the real host and port (`GossipAgent.identity` after `start`). `interfaces`: IP addresses of
    the interfaces to use, such as `["127.0.0.1"]`; None or empty for all.
    """

    def __init__(self, identity: Identity, *, interfaces: Sequence[str] | None = None) -> None:
        if not is_ip_literal(identity.host) or identity.port == 0:
            raise LocalError("discovery needs the real address: start the agent first")
        self._identity = identity
        self._interfaces = list(interfaces or ())
        self._on_peer: Callable[[str], None] | None = None
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._resolving: set[asyncio.Task[None]] = set()

    async def start(self, on_peer: Callable[[str], None]) -> None:
        """Announce and browse; `on_peer("host:port")` is called in the loop, possibly often for the same peer.

        :raises OSError: no interface takes multicast.
        """
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

        if self._zeroconf is not None:
            raise LocalError("discovery starts once")
        self._on_peer = on_peer
        me = self._identity
        self._info = AsyncServiceInfo(
            SERVICE_TYPE,
            instance_name(me),
            port=me.port,
            properties={"cluster": me.cluster, "name": me.name, "v": "1"},
            parsed_addresses=[me.host],
            server=f"{instance_name(me).split('.')[0]}.local.",
        )
        self._zeroconf = self._open()
        try:
            # The instance name is unique by its hash: no need for the second that asking for conflicts takes, and a
            # node that restarts must not be renamed because of its own former record.
            await self._zeroconf.async_register_service(self._info, cooperating_responders=True)
        except BaseException:
            await self.close()
            raise
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._changed])

    def _open(self) -> AsyncZeroconf:
        from zeroconf import InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncZeroconf

        interfaces = self._interfaces or InterfaceChoice.All
        if not self._interfaces or any(":" in interface for interface in self._interfaces):
            # A host without IPv6, or with it switched off, is served by IPv4 alone.
            with contextlib.suppress(OSError):
                return AsyncZeroconf(interfaces=interfaces, ip_version=IPVersion.All)
        return AsyncZeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only)

    async def close(self) -> None:
        """Withdraw the announcement and release the sockets. Idempotent."""
        zeroconf, self._zeroconf = self._zeroconf, None
        for task in list(self._resolving):
            task.cancel()
        await asyncio.gather(*self._resolving, return_exceptions=True)
        if zeroconf is not None:
            if self._browser is not None:
                await self._browser.async_cancel()
            await zeroconf.async_unregister_all_services()
            await zeroconf.async_close()

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed or len(self._resolving) >= MAX_RESOLVING:
            return
        task = asyncio.ensure_future(self._resolve(zeroconf, name))
        self._resolving.add(task)
        task.add_done_callback(self._resolving.discard)

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(zeroconf, RESOLVE_MS):
            return
        properties: Any = info.properties
        for peer in peers_of(self._identity, properties, info.parsed_addresses(), info.port):
            if self._on_peer is not None and self._zeroconf is not None:
                self._on_peer(peer)
