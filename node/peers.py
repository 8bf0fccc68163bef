"""The client side of calls between nodes, and which peers to leave alone for now.

A peer that refuses a connection is avoided at once, long before gossip calls it dead: `Circuits` keeps, for each
peer, until when. The time doubles with each failure in a row and ends with the first success; a peer that came
back under a new incarnation starts clean.
"""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from node.http.auth import AUTH_HEADER, PeerSigner
from node.relay.deadlines import Deadlines
from node.relay.headers import REQUEST_ID
from node.relay.upstream import (
    Base,
    UpstreamAnswer,
    UpstreamRefusedError,
    UpstreamRequest,
    make_session,
    open_upstream,
)

PEER_PREFIX = "/peer"
PEER_HEADER = "x-grapevine-peer"
PLAN_HEADER = "x-grapevine-plan"
#: On a 429: the peer is full, or its queue is longer than the plan was made for. This is no answer for the client.
BUSY_HEADER = "x-grapevine-busy"
FULL, LONGER = "1", "longer"
#: On any refusal: why the peer cannot run it (draining, engine not ready, ...), not an answer for the client.
REFUSED_HEADER = "x-grapevine-refused"
#: Base64 of the peer's load vector, fresh; on refusals and on answers.
LOAD_HEADER = "x-grapevine-load"

#: First and longest time, in seconds, that a failing peer is left alone.
AVOID_FIRST_S = 1.0
AVOID_MAX_S = 15.0
#: Peers remembered as failing; far above any cluster, only so that the table has a bound.
MAX_CIRCUITS = 4096
#: Connections to one peer and to all; the node's admission bounds requests, these bound sockets.
MAX_CONNECTIONS_PER_PEER = 1024
MAX_CONNECTIONS = 8192


@dataclass(slots=True)
class _Circuit:
    incarnation: int
    failures: int
    until: float


class Circuits:
    """Which peers to avoid, as this node alone knows it."""

    def __init__(self) -> None:
        self._circuits: dict[str, _Circuit] = {}

    def __len__(self) -> int:
        return len(self._circuits)

    def failed(self, name: str, incarnation: int, now: float) -> None:
        """Note that a call to ``name`` failed before its first byte."""
        circuit = self._circuits.get(name)
        if circuit is None or circuit.incarnation != incarnation:
            if len(self._circuits) >= MAX_CIRCUITS:
                del self._circuits[next(iter(self._circuits))]
            circuit = self._circuits[name] = _Circuit(incarnation, 0, 0.0)
        circuit.failures += 1
        circuit.until = now + min(AVOID_FIRST_S * 2.0 ** (circuit.failures - 1), AVOID_MAX_S)

    def worked(self, name: str) -> None:
        """Note that ``name`` answered."""
        self._circuits.pop(name, None)

    def avoided(self, name: str, incarnation: int, now: float) -> bool:
        """Say whether ``name`` is to be left alone at ``now``."""
        circuit = self._circuits.get(name)
        return circuit is not None and circuit.incarnation == incarnation and now < circuit.until


class PeerClient:
    """Calls other nodes. One connection pool for all of them."""

    def __init__(self, name: str, signer: PeerSigner, deadlines: Deadlines) -> None:
        self._name = name
        self._signer = signer
        self._deadlines = deadlines
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Make the connection pool; needs the running loop."""
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, limit_per_host=MAX_CONNECTIONS_PER_PEER)
        self._session = make_session(connector, connect_s=self._deadlines.connect_s)

    async def close(self) -> None:
        """Close every connection; what is in flight breaks off."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, address: str, request: UpstreamRequest, *, rid: str, plan: str, first_byte_s: float
    ) -> UpstreamAnswer:
        """Send ``request`` (whose target begins with `PEER_PREFIX`) to the node at ``address`` (host:port).

        :raises UpstreamError: it refused, broke off, or was silent; see `node.relay.upstream`.
        """
        assert self._session is not None, "the client was not started"
        base = Base(self._session, f"http://{address}")
        headers = [*request.headers, (PEER_HEADER, self._name), (PLAN_HEADER, plan), (REQUEST_ID, rid)]
        if self._signer.enabled:
            try:
                target = base.sent_target(request.target)
            except ValueError as error:
                raise UpstreamRefusedError(f"{address} is not an address: {error}") from error
            headers.append((AUTH_HEADER, self._signer.sign(request.method, target, rid, plan)))
        sent = UpstreamRequest(request.method, request.target, headers, request.body)
        return await open_upstream(base, sent, first_byte_s=first_byte_s)
