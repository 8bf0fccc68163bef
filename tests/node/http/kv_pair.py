"""Two nodes with KV pools, whose engines report what ones with our connector would."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvmigrate.link import messages as m
from tests.node.fakes import connector as kv
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import Cluster, Member
from tests.node.fakes.connector import FakeConnector
from tests.node.http.bodies import CHAT, chat

BLOCKS = 64
TOKENS = BLOCKS * kv.BLOCK_TOKENS
ADMIN_TOKEN = "t"
#: About as fast as a node is taken to be before it has measured anything.
PREFILL_S = 1.0
LONG = chat(messages=[{"role": "user", "content": "All happy families are alike. " * 180}])


class Pair:
    """Two nodes with connectors in their engines; the engines report what a real one would."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.connectors: dict[str, FakeConnector] = {}
        #: An answer waits until its node has read the reports, as any real one is long after them.
        self.patient = False

    async def add(
        self,
        name: str,
        fingerprint: bytes = kv.FINGERPRINT,
        fields: Mapping[str, str | int] | None = None,
        *,
        holds: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> Member:
        member = await self.nodes.add(name, kv=True, kv_pool_gib=0.01, admin_token=ADMIN_TOKEN, **(settings or {}))
        connector = FakeConnector(member.node.settings.link_socket)
        await connector.connect(fingerprint, fields, holds=holds)
        self.connectors[name] = connector
        member.fake.script = self._script(member)
        await member.until(lambda: member.node.kv.connected and member.node.registry.may_pull("m"))
        return member

    def _script(self, member: Member) -> fake.Script:
        async def script(exchange: fake.Exchange) -> None:
            params = exchange.received.json["kv_transfer_params"]
            assert isinstance(params, dict)
            rid = params["grapevine"]["rid"]
            pool = member.node.kv.pool
            assert pool is not None
            hashes = kv.hashes_of(json.dumps(exchange.received.json["messages"]).encode(), BLOCKS)
            here = len(pool.lookup(hashes, use=False))
            connector = self.connectors[member.name]
            connector.send(m.Started(rid, TOKENS, 0, here * kv.BLOCK_TOKENS))
            connector.send(m.Prefilled(rid, PREFILL_S))
            kv.store(pool, hashes[here:])
            connector.send(m.Filled(rid, hashes, TOKENS))
            connector.send(m.Finished(rid))
            if self.patient:
                await member.until(lambda: member.node.kv.cached(rid) is not None)
            await fake.answer_chat(exchange)

        return script


async def send(entry: Member, *headers: tuple[str, str], body: bytes = LONG) -> RawAnswer:
    answer = await ask(entry.port, "POST", CHAT, headers, body)
    assert answer.status == 200, answer.body
    return answer


def force(target: str, source: str | None = None) -> list[tuple[str, str]]:
    headers = [("x-grapevine-force-target", target)]
    return (
        headers
        if source is None
        else [*headers, ("x-grapevine-force-source", source), ("x-grapevine-admin-token", ADMIN_TOKEN)]
    )


async def warmed(
    pair: Pair, *, holds: bool = False, settings: Mapping[str, object] | None = None
) -> tuple[Member, Member]:
    """Two nodes; the first has served the long prompt and the second, with these settings, has heard of it."""
    a, b = await pair.add("a"), await pair.add("b", holds=holds, settings=settings)
    await pair.nodes.agree()
    await send(a, *force("a"))
    await b.until(lambda: b.node.registry.describe("a").digest_size > 0)
    await b.until(lambda: published(b, "a") == published(a, "a"))
    await b.until(lambda: not b.node.registry.roster.prefixes.promised)
    return a, b


def published(member: Member, name: str) -> int:
    return member.node.registry.describe(name).digest_size
