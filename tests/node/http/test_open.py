"""What a node with all three credentials set shows to somebody who has none: exactly what SECURITY.md says."""

from __future__ import annotations

import asyncio

from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import cluster

OPEN = {"/healthz", "/readyz", "/metrics", "/gossip/state", "/gossip/members", "/"}
PREFIXES = {"/v1/": 401, "/admin": 401, "/peer/v1/": 403}


async def first_status(port: int, method: str, path: str) -> int:
    """The status of an answer; the stream of events does not end by itself."""
    if path != "/page/events":
        answer: RawAnswer = await ask(port, method, path)
        return answer.status
    async with connect("127.0.0.1", port) as client, asyncio.timeout(10):
        await client.send(method, path)
        return (await client.head()).status


async def test_a_scan_without_credentials_finds_what_is_open_and_nothing_else() -> None:
    async with cluster() as nodes:
        a = await nodes.add("a", api_key=("k",), admin_token="t", cluster_key="a long enough key")
        assert a.node._routes is not None
        router = a.node._routes.router()
        statuses = {
            path: await first_status(a.port, "GET" if method == "*" else method, path)
            for path, methods in router._exact.items()
            for method in methods
        }
        files = {path for path in router._exact if path.startswith("/page/")}
        assert {path for path, status in statuses.items() if status == 200} == OPEN | files
        assert {status for path, status in statuses.items() if path not in OPEN | files} == {401, 403}
        assert {prefix for prefix, _ in router._prefixes} == set(PREFIXES)
        for prefix, status in PREFIXES.items():
            for method in ("GET", "POST", "PUT", "DELETE"):
                assert (await ask(a.port, method, prefix + "x")).status == status
        assert a.fake.received == []
