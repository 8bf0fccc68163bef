"""Seeds given by name: looked up, all their addresses dialled, and looked up again for as long as the agent runs.

Rules
1. Every address of a name is a seed: behind the name of a headless service there is one per node.
2. A name is looked up again, `RESOLVE_S` after it was found, and sooner, with backoff, while it is not: its addresses
   change as nodes come and go. Addresses that a name has lost, and no other name has, are no seeds any more.
3. Names and addresses are bounded, and a lookup has a deadline. A name that cannot be looked up keeps what it had.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable

from gossip.errors import LocalError
from gossip.identity import Address, is_ip_literal

#: Seconds until a name that was found is looked up again; first and longest pause after one that was not.
RESOLVE_S = 30.0
RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0
LOOKUP_TIMEOUT_S = 10.0
#: Names looked up, and addresses taken of each.
MAX_NAMES = 64
MAX_ADDRESSES = 128

Lookup = Callable[[str], Awaitable[list[str]]]


async def lookup(host: str) -> list[str]:
    """Give all addresses of a name, as IP literals. :raises OSError: there are none, or nobody could be asked."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse_seed(seed: str) -> Address:
    """Split `host:port` or `[v6]:port`. :raises LocalError: it is neither."""
    host, colon, port = seed.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise LocalError(f"seed {seed!r}: expected host:port, an IPv6 address in brackets")
    return (host, int(port))


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "cannot be looked up: the name service does not answer"
    return f"cannot be looked up: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"


class SeedNames:
    """`changed(added, removed)` is called in the loop; `failed(name, why)` when a name is not found, "" when it is."""

    def __init__(
        self,
        own: Address,
        changed: Callable[[tuple[Address, ...], tuple[Address, ...]], None],
        failed: Callable[[Address, str], None],
        lookup: Lookup = lookup,
    ) -> None:
        self._own = own
        self._changed = changed
        self._failed = failed
        self._lookup = lookup
        self._names: dict[Address, tuple[Address, ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: str, port: int) -> None:
        """Begin to follow a name. :raises LocalError: there are too many."""
        if (name, port) in self._names:
            return
        if len(self._names) >= MAX_NAMES:
            raise LocalError(f"{MAX_NAMES} seeds are names already, which is the limit")
        self._names[name, port] = ()
        self._tasks.add(asyncio.ensure_future(self._follow(name, port)))

    async def close(self) -> None:
        """Stop all lookups."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, name: str, port: int) -> None:
        retry_s = RETRY_MIN_S
        while True:
            try:
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                    found = await self._lookup(name)
            except (OSError, UnicodeError) as error:  # a timeout is an OSError; a malformed name fails to encode
                self._failed((name, port), _why(error))
                pause_s, retry_s = retry_s, min(RETRY_MAX_S, retry_s * 2)
            else:
                self._failed((name, port), "")
                self._found(name, port, found)
                pause_s, retry_s = RESOLVE_S, RETRY_MIN_S
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    def _found(self, name: str, port: int, hosts: list[str]) -> None:
        now = tuple((host, port) for host in hosts if self._is_reachable(host))[:MAX_ADDRESSES]
        before, self._names[name, port] = self._names[name, port], now
        others = {address for addresses in self._names.values() for address in addresses}
        added = tuple(address for address in now if address not in before)
        removed = tuple(address for address in before if address not in others)
        if added or removed:
            self._changed(added, removed)

    def _is_reachable(self, host: str) -> bool:
        """Leave out what is no address, and loopback of the other family: `localhost` has both, we listen on one."""
        if not is_ip_literal(host):
            return False
        return not ipaddress.ip_address(host).is_loopback or (":" in host) == (":" in self._own[0])
