"""What a worker passes on to the main process: every request that is not for an engine, over a Unix socket.

The first headers of what is passed on are ours: Host, and the client's address. The others are the client's, but for
those of the connection. Nobody but this user's processes can reach that socket.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

from aiohttp import web

from node.http.intake import BodyRoom, header_list, read_body
from node.relay.answer import Relay, first_part
from node.relay.deadlines import Deadlines
from node.relay.headers import HOP_BY_HOP, LOWER, HeaderList
from node.relay.session import Session
from node.relay.upstream import Base, UpstreamError, UpstreamRequest, open_upstream
from node.workers.link import NoAnswer

CLIENT_HEADER = "X-Grapevine-Client"
#: Connections to the main process, and seconds that a free one is kept, less than the main process keeps it.
MAX_CONNECTIONS = 8192
IDLE_S = 90.0
_FRAMING = HOP_BY_HOP | {"host", "content-length", "expect"}


class PassedOn:
    """Asks the main process for what it alone knows."""

    def __init__(self, path: Path, deadlines: Deadlines, bodies: BodyRoom, max_body_mib: int) -> None:
        session = Session(connect_s=deadlines.connect_s, idle_s=IDLE_S, limit=MAX_CONNECTIONS, socket=path)
        self.session = session
        self._base = Base(session, "http://node")
        self._deadlines = deadlines
        self._bodies = bodies
        self._max_body_mib = max_body_mib

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with what the main process answers."""
        with self._bodies.hold() as held:
            body = await read_body(request, self._max_body_mib, held)
            given = [item for item in header_list(request) if LOWER[item[0]] not in _FRAMING]
            sent = [(CLIENT_HEADER, request.remote or ""), *given]
            try:
                target = request.raw_path
                answer = await open_upstream(
                    self._base, UpstreamRequest(request.method, target, sent, body), first_byte_s=inf
                )
                most = self._deadlines.first_byte_max_s
                first = await first_part(answer, method=request.method, deadline_s=most, idle_s=self._deadlines.idle_s)
            except UpstreamError as error:
                raise NoAnswer(str(error)) from error
            headers: HeaderList = [item for item in answer.headers if LOWER[item[0]] not in HOP_BY_HOP]
            relay = Relay(request, answer, headers, idle_s=self._deadlines.idle_s, on_piece=_unseen)
            return await relay.run(first)


def _unseen(piece: bytes) -> None:
    return None
