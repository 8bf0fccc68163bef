"""The client side of calls between nodes."""

from __future__ import annotations

from node.http.signature import AUTH_HEADER, PeerCall, PeerSigner
from node.meta import NodeMeta
from node.relay.deadlines import Deadlines
from node.relay.headers import REQUEST_ID, internal
from node.relay.session import Session
from node.relay.upstream import (
    Base,
    UpstreamAnswer,
    UpstreamRefusedError,
    UpstreamRequest,
    open_upstream,
)
from node.tls import PEER_NAME, ClusterTrust

PEER_PREFIX = "/peer"
PEER_HEADER = "x-grapevine-peer"
PLAN_HEADER = "x-grapevine-plan"
#: What was read of the request's body (`node.prompt.gist`).
GIST_HEADER = "x-grapevine-gist"
#: On a 429: the peer is full, or its queue is longer than the plan was made for. This is no answer for the client.
BUSY_HEADER = "x-grapevine-busy"
FULL, LONGER = "1", "longer"
#: On any refusal: why the peer cannot run it (draining, engine not ready, ...), not an answer for the client.
REFUSED_HEADER = "x-grapevine-refused"
#: Base64 of the peer's load vector, fresh; on refusals and on answers.
LOAD_HEADER = "x-grapevine-load"

#: Connections to one peer and to all; the node's admission bounds requests, these bound sockets.
MAX_CONNECTIONS_PER_PEER = 1024
MAX_CONNECTIONS = 8192
#: Seconds that a free connection is kept: less than a node keeps its clients' (`node.http.server`).
IDLE_S = 90.0


class PeerClient:
    """Calls other nodes. One connection pool for all of them."""

    def __init__(self, name: str, signer: PeerSigner, deadlines: Deadlines, trust: ClusterTrust) -> None:
        self._name = name
        self._signer = signer
        self._deadlines = deadlines
        self._trust = trust
        self._session: Session | None = None

    async def start(self) -> None:
        """Make the connection pool; needs the running loop."""
        self._session = Session(
            connect_s=self._deadlines.connect_s,
            idle_s=IDLE_S,
            limit=MAX_CONNECTIONS,
            per_address=MAX_CONNECTIONS_PER_PEER,
            trust=lambda: self._trust.calling,
            name=PEER_NAME,
        )

    async def close(self) -> None:
        """Close every connection; what is in flight breaks off."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, peer: NodeMeta, request: UpstreamRequest, *, rid: str, plan: str, first_byte_s: float
    ) -> UpstreamAnswer:
        """Send ``request`` (whose target begins with `PEER_PREFIX`) to a node.

        :raises UpstreamError: it refused, broke off, or was silent; see `node.relay.upstream`.
        """
        assert self._session is not None, "the client was not started"
        base = Base(self._session, peer.url)
        headers = [*request.headers, (PEER_HEADER, self._name), (PLAN_HEADER, plan), (REQUEST_ID, rid)]
        if self._signer.enabled:
            try:
                target = base.sent_target(request.target)
            except ValueError as error:
                raise UpstreamRefusedError(f"{peer.http} is not an address: {error}") from error
            signed = PeerCall(request.method, target, rid, internal(headers))
            headers.append((AUTH_HEADER, self._signer.sign(signed, request.body, receiver=peer.boot)))
        sent = UpstreamRequest(request.method, request.target, headers, request.body)
        return await open_upstream(base, sent, first_byte_s=first_byte_s)
