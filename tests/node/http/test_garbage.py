"""A request leaves nothing that only the garbage collector frees: it would hold its body, and the collector is slow."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from node.http.connection import Connection
from node.prompt import ParsedRequest
from node.relay import connection as upstream
from tests.node.fakes.client import connect
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.http.bodies import CHAT, chat


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with cluster(2) as running:
        yield running


@pytest.fixture
def kept() -> Iterator[None]:
    """What the collector finds stays in `gc.garbage`, and it finds nothing before it is asked."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("target", ["a", "b"], ids=["0 hops", "1 hop"])
async def test_no_request_is_left_to_the_collector(nodes: Cluster, target: str, stream: bool, kept: None) -> None:
    async with connect("127.0.0.1", nodes[0].port) as client:
        for _ in range(5):
            answer = await client.ask("POST", CHAT, (("x-grapevine-force-target", target),), chat(stream=stream))
            assert answer.status == 200
    gc.collect()
    assert not [thing for thing in gc.garbage if isinstance(thing, ParsedRequest)], Counter(
        type(thing).__name__ for thing in gc.garbage
    )


async def test_no_connection_is_left_to_the_collector(nodes: Cluster, kept: None) -> None:
    for _ in range(5):
        async with connect("127.0.0.1", nodes[0].port) as client:
            target = (("x-grapevine-force-target", "b"), ("Connection", "close"))
            assert (await client.ask("POST", CHAT, target, chat())).status == 200
    assert nodes[0].node.client._session is not None
    await nodes[0].node.client._session.close()
    await nodes[0].until(lambda: not nodes[0].node.client._session._open and not _open(nodes))  # type: ignore[union-attr]
    gc.collect()
    assert not [thing for thing in gc.garbage if isinstance(thing, Connection | upstream.Connection)]


def _open(nodes: Cluster) -> int:
    return sum(len(member.node._http._connections) for member in nodes.members if member.node._http is not None)
