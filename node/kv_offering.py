"""Sends a peer an offer of KV blocks and reads what it took."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

from node.errors import RemoteError
from node.kv_offer import MAX_TAKEN, TAKE_PATH, Offer, Taken, decode_taken
from node.meta import NodeMeta
from node.peers import PEER_PREFIX, PeerClient
from node.plan import Plan
from node.relay.deadlines import Deadlines
from node.relay.upstream import UpstreamRefusedError, UpstreamRequest


class Offering:
    """Calls peers by name; each call is bounded by what the offer gives the peer, and an exchange more."""

    def __init__(
        self, name: str, client: PeerClient, deadlines: Deadlines, *, peer_of: Callable[[str], NodeMeta | None]
    ) -> None:
        self._name = name
        self._client = client
        self._deadlines = deadlines
        self._peer_of = peer_of
        self._ids = (f"take-{os.urandom(4).hex()}.{number}" for number in itertools.count())

    async def __call__(self, heir: str, offer: Offer) -> Taken:
        """Offer it. Raises `RemoteError` when the peer cannot be reached, refuses, or answers too late or nonsense."""
        peer = self._peer_of(heir)
        if peer is None:
            raise UpstreamRefusedError("its address is not known")
        rid = next(self._ids)
        plan = Plan(rid=rid, model="", entry=self._name, target=heir)
        request = UpstreamRequest("POST", PEER_PREFIX + TAKE_PATH, [], offer.encode())
        limit = self._deadlines.exchange_s + (offer.seconds if offer.chains else 0.0)
        try:
            async with asyncio.timeout(limit):
                answer = await self._client.call(peer, request, rid=rid, plan=plan.header(), first_byte_s=limit)
                try:
                    body = await answer.read_all(MAX_TAKEN)
                finally:
                    answer.close()
        except TimeoutError as error:
            raise RemoteError("it took too long") from error
        if answer.status != 200:
            raise RemoteError(f"it answers with status {answer.status}")
        return decode_taken(body)
