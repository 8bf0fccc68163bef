"""Running a request on a peer: its bytes go there unchanged, the plan goes along in headers.

The receiver decides. What comes back is an answer of its engine (`Opened`), a refusal because it is full (`Busy`,
with its fresh load vector), or a failure before the first byte (`Failed`): then nothing of it has been seen by
the client and the next candidate may try.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import os
from collections.abc import Callable
from math import inf

from node import load as load_vector
from node.errors import RemoteError
from node.load import LoadVector
from node.meta import NodeMeta
from node.peers import BUSY_HEADER, GIST_HEADER, LOAD_HEADER, LONGER, PEER_PREFIX, REFUSED_HEADER, PeerClient
from node.plan import Plan
from node.prompt import gist
from node.relay.answer import first_part
from node.relay.call import Busy, Call, Failed, Opened, Outcome
from node.relay.carry import hint
from node.relay.carry.marks import CARRY_HEADER, CHUNKS_HEADER, GONE_PATH
from node.relay.deadlines import Deadlines
from node.relay.downs import Downs
from node.relay.headers import HeaderList, internal
from node.relay.patience import patience
from node.relay.ports import unnoticed
from node.relay.upstream import (
    UpstreamAnswer,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamRequest,
)

#: A full peer says so at once and one that admits says nothing before its first byte: seconds of silence, a few round
#: trips, that count as admission.
ADMITTED_S = 0.05
#: Longest load header that is looked at: base64 of the longest vector.
_MAX_LOAD_HEADER = 4 * (load_vector.MAX_BYTES // 3 + 1)
#: Refusals that say nothing about the peer but that its limits are others than ours.
_OF_THE_REQUEST = frozenset({400, 408, 413, 415, 417})
#: Longest body of a peer's refusal, bytes.
_MAX_REFUSAL = 16 * 1024
#: What the target tells about KV that it pulled; goes on to the client, like all that follows.
SOURCE_HEADER = "x-grapevine-source"
PULLED_HEADER = "x-grapevine-pulled-blocks"
#: The same by node: `a=12, b=9`.
PULLED_FROM_HEADER = "x-grapevine-pulled-from"
#: Prompt tokens that its engine found cached, its own and pulled ones.
CACHED_HEADER = "x-grapevine-cached-tokens"
_PASSED_ON = (SOURCE_HEADER, PULLED_HEADER, PULLED_FROM_HEADER, CACHED_HEADER)


class PeerRunner:
    """Runs requests on peers."""

    def __init__(
        self,
        client: PeerClient,
        deadlines: Deadlines,
        downs: Downs,
        *,
        peer_of: Callable[[str], NodeMeta | None],
        load_of: Callable[[str], LoadVector],
        moves_of: Callable[[str], int | None],
    ) -> None:
        self._client = client
        self._deadlines = deadlines
        self._downs = downs
        self._peer_of = peer_of
        self._load_of = load_of
        self._moves_of = moves_of
        # Unique over restarts of this node: a peer may still run what the one before us asked for.
        self._legs = (f"{os.urandom(4).hex()}.{number}" for number in itertools.count())

    async def settled(self, opened: Opened) -> None:
        """Wait, bounded, until a peer has ended an attempt that was closed here. One that is gone has ended it."""
        peer = self._peer_of(opened.plan.target)
        if peer is None or not opened.leg:
            return
        request = UpstreamRequest("POST", PEER_PREFIX + GONE_PATH, [(CARRY_HEADER, opened.leg)], b"")
        limit = self._deadlines.exchange_s
        try:
            plan = opened.plan
            answer = await self._client.call(peer, request, rid=plan.rid, plan=plan.header(), first_byte_s=limit)
            await _read_refusal(answer, limit)
        except UpstreamError:
            return

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Try the plan's target once. A peer that has not refused within `ADMITTED_S` is taken to have admitted it."""
        peer = self._peer_of(plan.target)
        if peer is None:
            return Failed(plan.target, "its address is not known", reached=False)
        limit = self._deadlines.first_byte(
            call.parsed, self._load_of(plan.target), predicted_ms=predicted_ms, prompt_tokens=plan.prompt_tokens
        )
        taken = asyncio.get_running_loop().call_later(ADMITTED_S, admitted)
        try:
            return await self._open(call, plan, peer, limit)
        except UpstreamError as error:
            return Failed(plan.target, str(error), reached=not isinstance(error, UpstreamRefusedError))
        finally:
            taken.cancel()

    async def _open(self, call: Call, plan: Plan, peer: NodeMeta, limit: float) -> Outcome:
        leg = next(self._legs) if call.carries else ""
        loop, most = asyncio.get_running_loop(), self._deadlines.first_byte_max_s
        async with patience(limit, most, lambda: self._moves_of(plan.target)) as timer:
            with self._downs.watch(plan.target, lambda: None if timer.expired() else timer.reschedule(loop.time())):
                upstream, first = await self._exchange(call, plan, peer, leg)
        ours = internal(upstream.headers)
        refusal = refusal_of(plan.target, upstream.status, ours)
        return refusal or Opened(plan, upstream, first, headers=passed_on(ours), leg=leg)

    async def _exchange(self, call: Call, plan: Plan, peer: NodeMeta, leg: str) -> tuple[UpstreamAnswer, bytes]:
        """Ask the peer; its answer and the first part of that. The caller sets the deadline."""
        return await exchange(self._client, self._deadlines, call, plan, peer=peer, leg=leg)


async def exchange(
    client: PeerClient, deadlines: Deadlines, call: Call, plan: Plan, *, peer: NodeMeta, leg: str
) -> tuple[UpstreamAnswer, bytes]:
    """Send a call to a peer; its answer, and the first part of that: b"" of a refusal, which is read to its end.

    The caller sets the deadline. Raises what `node.relay.upstream` raises.
    """
    request = UpstreamRequest(call.method, PEER_PREFIX + call.target, _headers(call, leg), call.parsed.body)
    upstream = await client.call(peer, request, rid=call.rid, plan=plan.header(), first_byte_s=inf)
    if refusal_of(plan.target, upstream.status, internal(upstream.headers)) is not None:
        await _read_refusal(upstream, deadlines.exchange_s)
        return upstream, b""
    most = deadlines.first_byte_max_s
    return upstream, await first_part(upstream, method=call.method, deadline_s=most, idle_s=deadlines.idle_s)


def _headers(call: Call, leg: str) -> HeaderList:
    """The client's headers, what was read of its body, and what a peer must know to run a stream that we can carry."""
    told = gist.encode(call.parsed)
    ours = [(GIST_HEADER, told)] if told else []
    if not call.carries:
        return [*call.headers, *ours]
    ours.append((CARRY_HEADER, leg))
    if call.parsed.continues:
        ours.append((CHUNKS_HEADER, hint.encode(call.parsed.chunks, call.parsed.prompt_bytes)))
    return [*call.headers, *ours]


async def _read_refusal(upstream: UpstreamAnswer, deadline_s: float) -> None:
    """Read the body of a refusal whole, so that the connection is kept; what does not come in time is cut."""
    try:
        async with asyncio.timeout(deadline_s):
            await upstream.read_all(_MAX_REFUSAL)
    except (UpstreamError, TimeoutError):
        upstream.close()  # its headers said all that matters
    except BaseException:
        upstream.close()
        raise


def passed_on(ours: dict[str, str]) -> HeaderList:
    """What a target tells of its work, for the client; ``ours``: its headers that are ours."""
    return [(name, ours[name]) for name in _PASSED_ON if name in ours]


def refusal_of(target: str, status: int, ours: dict[str, str]) -> Busy | Failed | None:
    """How a peer refused; None where it gave an answer of its engine."""
    if BUSY_HEADER in ours and status == 429:
        return Busy(target, read_load(ours.get(LOAD_HEADER)), longer=ours[BUSY_HEADER] == LONGER)
    if REFUSED_HEADER in ours:
        return Failed(target, ours[REFUSED_HEADER][:200], reached=True, innocent=status in _OF_THE_REQUEST)
    return None


def write_load(vector: LoadVector) -> str:
    """Return a load vector as a header value."""
    return base64.b64encode(vector.encode()).decode()


def read_load(header: str | None) -> LoadVector | None:
    """Return the load vector of a header, None when there is none or it is nonsense."""
    if header is None or len(header) > _MAX_LOAD_HEADER:
        return None
    try:
        return load_vector.decode(base64.b64decode(header.encode("ascii"), validate=True))
    except (RemoteError, binascii.Error, UnicodeEncodeError):
        return None
