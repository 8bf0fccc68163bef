"""The asyncio shell: sockets, timers and tasks around one `Endpoint`. No protocol rule lives here.

Every call and callback runs in one event loop, uvloop or asyncio's own. TCP is the business of `gossip.streams`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gossip import actions as io
from gossip.config import GossipConfig
from gossip.endpoint import Endpoint
from gossip.envelope import Envelope
from gossip.errors import GossipBindError, LocalError
from gossip.events import GossipEvent, RowReceived, RowView
from gossip.identity import Address, Identity, is_ip_literal
from gossip.joinwatch import JoinWatch
from gossip.keyring import Keyring
from gossip.member import MemberView
from gossip.seeds import Lookup, SeedNames, lookup, parse_seed
from gossip.sockets import bind_pair
from gossip.streams import Streams

#: Seconds for the event loop to release the UDP socket.
CLOSE_TIMEOUT_S = 1.0


class GossipAgent:
    """One node's gossip on real sockets.

    `listener` is called in the loop, once per event, and must not block. `bind_host` is where to listen if that is not
    `identity.host`, such as `0.0.0.0`. `keyring` seals everything sent and opens everything received; change it in the
    loop and the next packet follows. `rng` and `lookup` are for tests.
    """

    def __init__(
        self,
        identity: Identity,
        config: GossipConfig,
        *,
        listener: Callable[[GossipEvent], None],
        rng: random.Random | None = None,
        bind_host: str | None = None,
        keyring: Keyring | None = None,
        lookup: Lookup = lookup,
    ) -> None:
        self._identity = identity
        self._config = config
        self._listener = listener
        self._rng = rng or random.Random()
        self._bind_host = bind_host
        self._envelope = Envelope(Keyring() if keyring is None else keyring, identity.cluster, os.urandom)
        self._endpoint: Endpoint | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._datagrams: _Datagrams | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._closed = False
        self._lookup = lookup
        self._names: SeedNames | None = None
        self._watch = JoinWatch(self._peers, lambda: self._running().counters)
        self._streams = Streams(config, self._feed, self._watch.failed)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind UDP and TCP and begin.

        :raises GossipBindError: the port is taken, the address is not ours, or the host name does not resolve.
        :raises LocalError: started before, or `identity.host` is a wildcard.
        """
        if self._endpoint is not None or self._closed:
            raise LocalError("an agent starts once")
        self._loop = asyncio.get_running_loop()
        host = await self._resolve(self._identity.host)
        if not is_ip_literal(host):
            raise LocalError(f"{host}: peers need an address to reach us at, not the wildcard")
        bind_host = await self._resolve(self._bind_host) if self._bind_host is not None else host
        datagrams, stream = bind_pair(bind_host, self._identity.port)
        self._identity = replace(self._identity, host=host, port=datagrams.getsockname()[1])
        try:
            await self._listen(self._loop, datagrams, stream)
        except BaseException:
            datagrams.close()
            stream.close()
            raise
        self._feed(io.Started())

    async def _listen(self, loop: asyncio.AbstractEventLoop, datagrams: socket.socket, stream: socket.socket) -> None:
        # The endpoint first: a peer may speak before the second transport is up.
        self._endpoint = Endpoint(self._identity, self._config, self._rng, self._envelope)
        self._transport, self._datagrams = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=datagrams)
        await self._streams.listen(stream)

    async def _resolve(self, host: str) -> str:
        assert self._loop is not None
        try:
            found = await self._loop.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except OSError as error:
            raise GossipBindError(f"gossip host {host} does not resolve: {error.strerror or error}") from error
        # IPv4 first: a name such as localhost means 127.0.0.1 to whoever else writes it.
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return str(found[0][4][0])

    async def leave(self) -> None:
        """Tell the peers that this node goes, within `leave_timeout_s` seconds. `close()` is still to be called."""
        if self._endpoint is None or self._closed or self._endpoint.leaving:
            return
        self._feed(io.LeaveRequested())
        peers = any(m.state.is_up for m in self._endpoint.membership)
        if not peers:
            return
        until = time.monotonic() + self._config.leave_timeout_s
        # The goodbye goes out with the next gossip ticks; when it has been repeated often enough, it leaves the queue.
        while self._identity.name in self._endpoint.membership.broadcasts:
            left = until - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(left, self._config.gossip_interval_s / 2))

    async def close(self) -> None:
        """Release sockets and tasks; peers notice as with a crash unless `leave()` came before. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        if self._names is not None:
            await self._names.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
        await self._streams.close()
        if self._datagrams is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._datagrams.released.wait(), CLOSE_TIMEOUT_S)

    # --- use ----------------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Who we are, with the resolved host, the real port, and the incarnation as raised."""
        return self._endpoint.identity if self._endpoint is not None else self._identity

    @property
    def address(self) -> Address:
        """Host and real port that peers reach us at."""
        return self.identity.address

    def add_seeds(self, seeds: Iterable[str]) -> None:
        """Dial these `host:port` now, and again for ever while nobody there is a member.

        A name stands for all its addresses, and is looked up again as long as the agent runs. Where nothing answers,
        the log says so.

        :raises LocalError: a seed is not `host:port` (an IPv6 address in brackets), or too many are names.
        """
        addresses = [parse_seed(seed) for seed in seeds]
        self._feed(io.SeedsAdded(tuple(address for address in addresses if is_ip_literal(address[0]))))
        for host, port in addresses:
            if not is_ip_literal(host):
                self._follow(host, port)
        if addresses:
            self._watch.seeded()

    def _follow(self, name: str, port: int) -> None:
        if self._names is None:
            self._names = SeedNames(self.address, self._seeds_changed, self._watch.failed, self._lookup)
        self._names.add(name, port)

    def _seeds_changed(self, added: tuple[Address, ...], removed: tuple[Address, ...]) -> None:
        self._feed(io.SeedsRemoved(removed))
        self._feed(io.SeedsAdded(added))

    def _peers(self) -> int:
        return self._running().membership.size() - 1

    def set_row(self, payload: bytes) -> None:
        """Set our load row; it is pushed at the next gossip tick. :raises LocalError: above `max_row_bytes`."""
        self._feed(io.RowSet(payload))

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of our slow state. :raises LocalError: too large, or too many keys."""
        self._feed(io.KeyPut(key, value))

    def delete(self, key: bytes) -> None:
        """Remove a key of our slow state; an unknown one is fine."""
        self._feed(io.KeyDeleted(key))

    def members(self) -> list[MemberView]:
        """Everybody we know, ourselves first. The dead are in it until they are forgotten."""
        return self._running().members(time.monotonic())

    def member(self, name: str) -> MemberView | None:
        """One member."""
        return self._running().member(name, time.monotonic())

    def row(self, name: str) -> RowView | None:
        """The latest load row of a node, with its age now."""
        return self._running().row(name, time.monotonic())

    def slow(self, name: str) -> Mapping[bytes, bytes]:
        """A node's slow state: a read-only view that follows it; empty for a stranger."""
        return self._running().slow_of(name)

    def estimate_rtt_s(self, a: str, b: str) -> float | None:
        """Estimate the round-trip time between any two members, in seconds; None while one is not located."""
        return self._running().estimate_rtt_s(a, b)

    def keyring_view(self) -> list[dict[str, Any]]:
        """Show the ring: id, whether it seals, and how many packets of peers each key has opened since the start."""
        ids, opened = self._envelope.keyring.ids, self._envelope.opened
        return [{"id": key, "seals": key == ids[0], "opened": opened.get(key, 0)} for key in ids]

    def snapshot(self) -> dict[str, Any]:
        """Give the whole view as plain JSON types."""
        return self._running().snapshot(time.monotonic())

    def failed_dials(self) -> dict[str, str]:
        """Give the addresses to join by whose last dial failed, and why."""
        return self._watch.failures()

    def validate(self) -> None:
        """Check every invariant. :raises InvariantError: a bug of ours."""
        self._running().validate()

    def _running(self) -> Endpoint:
        if self._endpoint is None:
            raise LocalError("the agent is not started")
        return self._endpoint

    # --- the pump -----------------------------------------------------------------------------------------------------

    def _feed(self, event: io.Input) -> None:
        endpoint = self._running()
        if not self._closed:
            self._perform(endpoint.handle(event, time.monotonic()))

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        if self._endpoint is not None and not self._closed:
            self._perform(self._endpoint.handle_timeout(time.monotonic()))

    def _perform(self, actions: list[io.Action]) -> None:
        for action in actions:
            match action:
                case io.SendDatagram():
                    self._send(action)
                case io.Notify():
                    self._tell(action.event)
                case io.RowsReceived():
                    asyncio.get_running_loop().call_soon(self._tell_rows)
                case io.OpenStream():
                    self._streams.dial(action)
                case io.ReplyStream():
                    self._streams.answer(action.stream, action.data)
                case io.CloseStream():
                    self._streams.answer(action.stream, None)
        self._arm()

    def _arm(self) -> None:
        if self._endpoint is None or self._loop is None or self._closed:
            return
        at = self._endpoint.next_deadline()
        if at == self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._on_timer)

    def _send(self, action: io.SendDatagram) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.sendto(action.data, action.to)
        except (OSError, ValueError):
            # An address family that this socket does not speak, no route: a lost datagram like any other.
            return

    def _tell_rows(self) -> None:
        """Hand over what came in this turn of the loop, the rows of all datagrams together."""
        if not self._closed:
            for row in self._running().take_rows(time.monotonic()):
                self._tell(RowReceived(row))

    def _tell(self, event: GossipEvent) -> None:
        try:
            self._listener(event)
        except Exception as error:  # a listener's bug must not stop the node from answering pings
            assert self._loop is not None
            self._loop.call_exception_handler({"message": "gossip listener failed", "exception": error})

    def datagram(self, data: bytes, source: Any) -> None:
        """Called by the transport."""
        if self._endpoint is not None:
            self._feed(io.DatagramReceived((str(source[0]), int(source[1])), data))


class _Datagrams(asyncio.DatagramProtocol):
    """Hands datagrams to the agent. Errors on a UDP socket are losses: the prober notices what matters."""

    def __init__(self, agent: GossipAgent) -> None:
        self._agent = agent
        #: Set when the socket is released, which is later than `close()`: the port must be free for a restart.
        self.released = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.released.set()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._agent.datagram(data, addr)

    def error_received(self, exc: Exception) -> None:
        pass
