"""What a node with all three credentials set shows to somebody who has none: exactly what SECURITY.md says.

And what somebody with a client's key cannot do: reach /peer and /admin, name a KV source, or make a node talk to an
address.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node.peers import PLAN_HEADER
from node.plan import Plan
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Cluster, Member, cluster
from tests.node.http.bodies import CHAT, chat

SECURITY = Path(__file__).parents[3] / "SECURITY.md"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
CLIENT = ("Authorization", "Bearer a-key-of-a-client")


def documented() -> tuple[set[str], set[str]]:
    """The table "What is open" of SECURITY.md: paths (and beginnings of paths with a star) that are open, and not."""
    table = SECURITY.read_text().partition("## What is open")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for paths, what in rows:
        found[what.strip().startswith("yes")] |= set(re.findall(r"`([^`]+)`", paths))
    return found[True], found[False]


def covered(path: str, by: set[str]) -> bool:
    return any(path.startswith(item[:-1]) if item.endswith("*") else path == item for item in by)


@pytest.fixture
async def a() -> AsyncIterator[Member]:
    async with cluster() as nodes:
        yield await guarded(nodes, "a")


async def guarded(nodes: Cluster, name: str) -> Member:
    return await nodes.add(name, api_key=(CLIENT[1].split()[1],), admin_token="t", cluster_key="a long enough key")


async def status_of(port: int, method: str, path: str, *headers: tuple[str, str]) -> int:
    """The status of an answer; the stream of events does not end by itself."""
    if path != "/page/events":
        answer: RawAnswer = await ask(port, method, path, headers)
        return answer.status
    async with connect("127.0.0.1", port) as client, asyncio.timeout(60):
        await client.send(method, path)
        return (await client.head()).status


async def test_a_scan_without_credentials_finds_what_is_open_and_nothing_else(a: Member) -> None:
    """Every route of the table, by every method, and something below every prefix."""
    assert a.node._routes is not None
    router = a.node._routes.router()
    is_open, is_closed = documented()
    paths = [*router._exact, *(f"{prefix.rstrip('/')}/x" for prefix, _ in router._prefixes)]
    assert len(paths) > 30
    for path in paths:
        assert covered(path, is_open) != covered(path, is_closed), f"SECURITY.md says nothing, or both, of {path}"
        for method in METHODS:
            status = await status_of(a.port, method, path)
            if covered(path, is_open):
                assert status in {200, 405, 503}, (method, path, status)
            else:
                assert status in {401, 403, 405}, (method, path, status)
    assert await status_of(a.port, "GET", "/something/else") == 404
    assert a.fake.received == []


async def test_what_is_open_shows_no_secret_and_no_prompt(a: Member) -> None:
    body = chat(messages=[{"role": "user", "content": "a very private prompt"}])
    assert (await ask(a.port, "POST", CHAT, (CLIENT, ("X-Request-Id", "private-id")), body)).status == 200
    shown = b""
    for path in ("/metrics", "/gossip/state", "/gossip/members", "/readyz", "/healthz"):
        shown += (await ask(a.port, "GET", path)).body
    async with connect("127.0.0.1", a.port) as client, asyncio.timeout(60):
        await client.send("GET", "/page/events")
        await client.head()
        shown += await client.chunk()
    for secret in (b"a very private prompt", b"a-key-of-a-client", b"a long enough key", b"private-id"):
        assert secret not in shown


@pytest.mark.parametrize("path", ["/admin/drain", "/admin/join", "/admin/keys", "/peer/v1/chat/completions", "/peer/x"])
async def test_the_key_of_a_client_opens_the_api_and_nothing_else(a: Member, path: str) -> None:
    plan = (PLAN_HEADER, Plan(rid="r", model="m", entry="a", target="a", hops=1).header())
    for method in ("GET", "POST"):
        assert await status_of(a.port, method, path, CLIENT, plan) in {403, 404, 405}
    assert a.fake.received == []


@pytest.mark.parametrize(
    "target",
    [
        "http://192.0.2.1/v1/models",
        "//192.0.2.1/v1/models",
        "192.0.2.1:80",
        "*",
        "/v1/../peer/v1/x",
        "/v1/%2e%2e/admin/x",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "CONNECT"])
async def test_no_target_leads_out_of_the_node(a: Member, method: str, target: str) -> None:
    async with connect("127.0.0.1", a.port) as client:
        await client.send(method, target, (CLIENT, ("Host", "192.0.2.1")))
        assert (await client.head()).status >= 400
    assert a.fake.received == []


async def test_a_client_cannot_name_a_source_of_kv_and_an_operator_can() -> None:
    async with cluster() as nodes:
        a, _ = await guarded(nodes, "a"), await guarded(nodes, "b")
        await nodes.agree()
        source = ("x-grapevine-force-source", "b")

        async def status(*more: tuple[str, str]) -> int:
            return (await ask(a.port, "POST", CHAT, (CLIENT, source, *more), chat())).status

        assert await status() == 401
        assert await status(("x-grapevine-admin-token", "u")) == 403
        assert await status(("x-grapevine-admin-token", "t")) == 200
        names = {name.lower() for member in (a, nodes[1]) for r in member.fake.received for name, _ in r.headers}
        assert not any(name.startswith("x-grapevine") for name in names)


PARAMS = {"remote_host": "192.0.2.1", "remote_port": 1, "do_remote_prefill": True}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"model": "m", "messages": [], "kv_transfer_params": PARAMS}),
        '{"model": "m", "messages": [], "kv_transfer_params": {}, "kv_transfer_params": {"remote_host": "192.0.2.1"}}',
        '{"model": "m", "messages": [], "\\u006bv_transfer_params": {"remote_host": "192.0.2.1"}}',
    ],
    ids=["plain", "twice", "escaped"],
)
async def test_no_address_of_a_client_reaches_the_engine_as_a_source(a: Member, body: str) -> None:
    await ask(a.port, "POST", CHAT, (CLIENT,), body.encode())
    assert not any(b"192.0.2.1" in received.body for received in a.fake.received)
