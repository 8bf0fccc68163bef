"""The events of the page: bounded listeners, one picture for all, nothing while nobody looks, an end with the node."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.addresses import listen_http
from node.http import events
from node.http.events import EventHub
from node.http.router import Router
from node.http.server import HttpServer
from tests import waiting
from tests.node.fakes.client import RawClient, ask, connect


class Counting:
    """A source that counts what is asked of it; the test opens the gate for each tick."""

    def __init__(self) -> None:
        self.firsts = self.ticks = 0
        self.size = b"{}"
        self.broken = False

    def nodes(self) -> int:
        return 1

    def first(self) -> bytes:
        self.firsts += 1
        return json.dumps({"first": self.firsts, "more": len(self.size)}).encode()

    def tick(self) -> bytes:
        if self.broken:
            raise ValueError("the picture fell off the wall")
        self.ticks += 1
        return self.size


@asynccontextmanager
async def serving(source: Counting, interval_s: float = 0.01) -> AsyncIterator[tuple[int, EventHub]]:
    hub = EventHub(source, interval=lambda: interval_s)
    router = Router()
    router.add("GET", "/page/events", hub.serve)
    server = HttpServer(router)
    listener = listen_http("127.0.0.1", 0)
    await server.start(listener)
    try:
        yield listener.getsockname()[1], hub
    finally:
        hub.close()
        await server.close()


async def listen(client: RawClient) -> str:
    """The first event of a new connection."""
    await client.send("GET", "/page/events")
    head = await client.head()
    assert head.status == 200 and head.one("content-type") == "text/event-stream; charset=utf-8"
    return (await client.chunk()).decode()


async def until(client: RawClient, word: bytes) -> bytes:
    """The next piece with this word; what was sent before it may fill some buffers, and no more."""
    for _ in range(200):
        if word in (piece := await client.chunk()):
            return piece
    raise AssertionError(f"{word!r} never came")


async def test_a_page_gets_the_whole_first_and_then_ticks() -> None:
    source = Counting()
    async with serving(source) as (port, _), connect("127.0.0.1", port) as client:
        first = await listen(client)
        assert first.startswith("retry: 1000\nevent: first\ndata: {") and first.endswith("}\n\n")
        assert await client.chunk() == b"event: tick\ndata: {}\n\n"


async def test_all_pages_share_one_picture_and_none_is_made_for_nobody() -> None:
    source = Counting()
    async with serving(source) as (port, hub):
        assert (source.firsts, source.ticks) == (0, 0)
        async with connect("127.0.0.1", port) as one, connect("127.0.0.1", port) as two:
            await listen(one)
            await listen(two)
            assert hub.listeners == 2 and source.firsts <= 2
            made = source.ticks
            for _ in range(10):
                await one.chunk()
                await two.chunk()
            assert source.ticks - made <= 14  # not twenty
        await waiting.until(lambda: hub.listeners == 0)
        assert hub._task is None and hub._first is None


async def test_more_pages_than_the_bound_are_refused() -> None:
    async with serving(Counting(), interval_s=60) as (port, _):
        clients = [connect("127.0.0.1", port) for _ in range(events.MAX_LISTENERS)]
        for client in clients:
            await listen(await client.__aenter__())
        refused = await ask(port, "GET", "/page/events")
        assert refused.status == 503 and refused.one("retry-after")
        assert json.loads(refused.body)["error"]["code"] == "too_many_pages"
        for client in clients:
            await client.__aexit__(None, None, None)


async def test_a_page_that_is_too_slow_gets_the_whole_again_and_holds_one_message() -> None:
    source = Counting()
    source.size = b'"' + b"x" * 2_000_000 + b'"'
    async with serving(source) as (port, hub), connect("127.0.0.1", port) as client:
        await listen(client)
        client.pause()
        await waiting.until(lambda: any(listener.missed for listener in hub._listeners))
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert source.firsts >= 1
        assert b"event: first" in await until(client, b"event: first")


async def test_a_page_does_not_hold_up_the_end_of_its_node() -> None:
    async with serving(Counting(), interval_s=60) as (port, hub), connect("127.0.0.1", port) as client:
        await listen(client)
        hub.close()
        assert await client.chunk() == b""
        assert (await ask(port, "GET", "/page/events")).status == 503


async def test_a_picture_that_fails_ends_the_connections_and_the_next_one_tries_again() -> None:
    source = Counting()
    async with serving(source) as (port, _):
        async with connect("127.0.0.1", port) as client:
            source.broken = True
            await listen(client)
            while await client.chunk():
                pass
        source.broken = False
        async with connect("127.0.0.1", port) as client:
            await listen(client)
            assert b"tick" in await client.chunk()
