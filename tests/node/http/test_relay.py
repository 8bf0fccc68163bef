"""The relay alone: one fake engine, one server that does nothing but relay."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from node.http.intake import header_list
from node.http.server import HttpServer
from node.http.writer import Flow
from node.relay.answer import Relay, Watchdog, first_part
from node.relay.headers import for_downstream, for_upstream
from node.relay.session import Session
from node.relay.upstream import (
    Base,
    UpstreamBrokenError,
    UpstreamRefusedError,
    UpstreamRequest,
    UpstreamSilentError,
    open_upstream,
)
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.engine import FakeEngine, Gate, Reply

#: Far more than the sockets and buffers between an engine and a client hold.
LIMIT = 32 * 1024 * 1024


def session_to(path: Path) -> Session:
    return Session(connect_s=2, idle_s=60, limit=100, socket=path)


class Proxy:
    """The smallest server around a relay."""

    def __init__(self, path: Path, *, idle_s: float = 5.0) -> None:
        self.path = path
        self.idle_s = idle_s
        self.port = 0
        self.errors: list[str | None] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        headers, body = header_list(request), await request.content.readany()
        sent = UpstreamRequest(request.method, request.raw_path, for_upstream(headers), body)
        upstream = await open_upstream(Base(self.session, "http://engine"), sent, first_byte_s=5)
        first = await first_part(upstream, method=request.method, deadline_s=5, idle_s=5)
        relay = Relay(request, upstream, for_downstream(upstream.headers), idle_s=self.idle_s, on_piece=lambda n: None)
        response = await relay.run(first)
        self.errors.append(relay.error)
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        self.session = session_to(self.path)
        server = HttpServer(self)  # type: ignore[arg-type]  # all it needs of a router
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        await server.start(listener)
        try:
            yield self
        finally:
            await server.close()
            await self.session.close()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="gv") as folder:
        fake_engine = await FakeEngine(Path(folder) / "engine.sock").start()
        yield fake_engine
        await fake_engine.close()


@pytest.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[Proxy]:
    async with Proxy(engine.path).running() as running:
        yield running


async def test_headers_go_on_with_duplicates_and_without_hop_by_hop(engine: FakeEngine, proxy: Proxy) -> None:
    engine.script = fake.reply(
        Reply(
            418,
            (
                ("Set-Cookie", "a=1"),
                ("X-Odd", "v"),
                ("Set-Cookie", "b=2"),
                ("Connection", "X-Secret, keep-alive"),
                ("X-Secret", "s"),
                ("x-grapevine-target", "forged"),
                ("Content-Type", "text/x"),
            ),
            (b"teapot",),
            reason="Short And Stout",
        )
    )
    sent = (("X-A", "1"), ("x-a", "2"), ("Connection", "X-Hop"), ("X-Hop", "1"), ("TE", "trailers"))
    answer = await ask(proxy.port, "PUT", "/v1/x%2Fy?a=%20b&c", sent, b"body")
    assert (answer.status, answer.reason, answer.body) == (418, "Short And Stout", b"teapot")
    assert answer.all("Set-Cookie") == ["a=1", "b=2"]
    assert answer.one("X-Odd") == "v" and answer.one("Content-Length") == "6"
    assert not answer.all("X-Secret") and not answer.all("x-grapevine-target")
    got = engine.received[0]
    assert (got.method, got.target, got.body) == ("PUT", "/v1/x%2Fy?a=%20b&c", b"body")
    assert got.header("X-A") == ["1", "2"]
    for name in ("X-Hop", "TE", "User-Agent", "Accept-Encoding", "Accept"):
        assert not got.header(name), name


async def test_no_header_is_invented(engine: FakeEngine, proxy: Proxy) -> None:
    engine.script = fake.reply(Reply(200, (("X-Only", "1"),), (b"x",)))
    answer = await ask(proxy.port, "GET", "/v1/x")
    assert {name.lower() for name, _ in answer.headers} == {"x-only", "content-length"}


async def test_a_compressed_body_is_not_touched(engine: FakeEngine, proxy: Proxy) -> None:
    packed = bytes.fromhex("1f8b08000000000000034b4c4a0600c241243503000000")
    engine.script = fake.reply(Reply(200, (("Content-Encoding", "gzip"),), (packed,)))
    answer = await ask(proxy.port, "POST", "/v1/x", (("Content-Encoding", "gzip"),), packed)
    assert answer.body == packed and answer.one("Content-Encoding") == "gzip"
    assert engine.received[0].body == packed


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_body_stays_without(engine: FakeEngine, proxy: Proxy, status: int) -> None:
    engine.script = fake.reply(Reply(status, (("X-Only", "1"),), (), length=False))
    async with connect("127.0.0.1", proxy.port) as client:
        for _ in range(2):
            answer = await client.ask("GET", "/v1/x")
            assert answer.status == status and not answer.all("Transfer-Encoding")


async def test_head_keeps_the_length_and_the_connection(engine: FakeEngine, proxy: Proxy) -> None:
    engine.script = fake.reply(Reply(200, (("Content-Length", "12345"),), ()))
    async with connect("127.0.0.1", proxy.port) as client:
        for _ in range(2):
            answer = await client.ask("HEAD", "/v1/x")
            assert answer.one("Content-Length") == "12345"


async def test_the_first_chunk_is_seen_while_the_engine_holds_the_second(engine: FakeEngine, proxy: Proxy) -> None:
    gate = Gate()
    engine.script = fake.gated(gate, [fake.sse("one"), fake.sse("two"), fake.DONE])
    async with connect("127.0.0.1", proxy.port) as client:
        await client.send("POST", "/v1/x", body=b"{}")
        gate.open()
        head = await client.head()
        assert head.one("Transfer-Encoding") == "chunked"
        assert await client.chunk() == fake.sse("one")
        assert engine.active == 1
        gate.open(2)
        rest = b""
        while piece := await client.chunk():
            rest += piece
        assert rest == fake.sse("two") + fake.DONE


@pytest.mark.parametrize("when", ["before the first byte", "in the stream"])
async def test_a_client_that_goes_away_ends_the_engine_request(engine: FakeEngine, proxy: Proxy, when: str) -> None:
    gate = Gate()
    engine.script = fake.gated(gate, [fake.sse("one"), fake.sse("two")])
    async with connect("127.0.0.1", proxy.port) as client:
        await client.send("POST", "/v1/x", body=b"{}")
        await engine.until(lambda: engine.active == 1)
        if when == "in the stream":
            gate.open()
            await client.head()
            await client.chunk()
    await engine.until(lambda: engine.disconnects == 1)


async def test_a_broken_event_stream_ends_with_an_error_event(engine: FakeEngine, proxy: Proxy) -> None:
    engine.script = fake.reset_after([fake.sse("one"), b"data: {half"])
    answer = await ask(proxy.port, "POST", "/v1/x", body=b"{}")
    assert answer.complete
    assert answer.body.startswith(fake.sse("one"))
    assert answer.body.rstrip().endswith(b'"code":"upstream_failed"}}')
    assert b'\n\ndata: {"error"' in answer.body
    assert proxy.errors[0] is not None


async def test_a_broken_plain_answer_is_cut(engine: FakeEngine, proxy: Proxy) -> None:
    engine.script = fake.reset_after([b"x" * 10], length=20)
    answer = await ask(proxy.port, "POST", "/v1/x", body=b"{}")
    assert not answer.complete


async def test_a_silent_stream_is_ended_by_the_watchdog(engine: FakeEngine) -> None:
    gate = Gate()
    engine.script = fake.gated(gate, [fake.sse("one"), fake.sse("two")])
    gate.open()
    async with Proxy(engine.path, idle_s=0.05).running() as proxy:
        answer = await ask(proxy.port, "POST", "/v1/x", body=b"{}")
        assert b"upstream_failed" in answer.body
    await engine.until(lambda: engine.disconnects == 1)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_does_not_take_the_end_is_cut(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The end waits for what was written before it: for ever, with a client that takes nothing and stays."""

    async def stuck(self: Flow) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Flow, "drain", stuck)
    monkeypatch.setattr(Flow, "paused", True)
    if not whole:
        engine.script = fake.reply(
            Reply(200, (("Content-Type", "text/event-stream"),), (b"data: 1\n\n",), length=False)
        )
    async with (
        Proxy(engine.path, idle_s=0.05).running() as proxy,
        asyncio.timeout(60),
        connect("127.0.0.1", proxy.port) as client,
    ):
        await client.send("POST", "/v1/x", body=b"{}")
        assert await client.reader.read() and client.reader.at_eof()  # the connection ends


async def test_a_death_that_is_told_twice_is_no_error() -> None:
    failed: list[RuntimeError] = []

    def tell_again() -> None:
        try:
            watchdog.hurry(0.0)
        except RuntimeError as error:
            failed.append(error)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60) as timer:
            watchdog = Watchdog(timer, 5.0)
            watchdog.hurry(0.0)
            asyncio.get_running_loop().call_soon(tell_again)  # between the end of the time and the end of the wait
            await asyncio.Event().wait()
    assert not failed


async def test_a_slow_reader_pauses_the_engine(engine: FakeEngine, proxy: Proxy) -> None:
    piece, written, paused = b"x" * 65536, 0, asyncio.Event()

    async def flood(exchange: fake.Exchange) -> None:
        nonlocal written
        await exchange.start(Reply(headers=(), chunks=(), length=False))
        try:
            while written < LIMIT:
                async with asyncio.timeout(0.5):  # a write that takes this long is one that waits for the reader
                    await exchange.write(piece)
                written += len(piece)
        except TimeoutError:
            paused.set()
        await asyncio.Event().wait()

    engine.script = flood
    async with connect("127.0.0.1", proxy.port) as client:
        client.pause()
        await client.send("POST", "/v1/x", body=b"{}")
        await asyncio.wait_for(paused.wait(), 20)
        assert 0 < written < LIMIT
    await engine.until(lambda: engine.disconnects == 1)


async def test_each_way_not_to_answer_has_its_error(engine: FakeEngine) -> None:
    request = UpstreamRequest("POST", "/v1/x", [], b"{}")
    async with session_to(engine.path) as session:
        base = Base(session, "http://engine")
        engine.script = fake.reset
        with pytest.raises(UpstreamBrokenError):
            await open_upstream(base, request, first_byte_s=5)
        engine.script = fake.stall
        with pytest.raises(UpstreamSilentError):
            await open_upstream(base, request, first_byte_s=0.05)
        await engine.until(lambda: engine.disconnects == 1)
        await engine.close()
        with pytest.raises(UpstreamRefusedError):
            await open_upstream(base, request, first_byte_s=5)


async def test_a_client_of_http_1_0_gets_a_plain_body_and_the_end(engine: FakeEngine, proxy: Proxy) -> None:
    engine.script = fake.reply(Reply(200, (), (b"one", b"two"), length=False))
    async with connect("127.0.0.1", proxy.port) as client:
        client.writer.write(b"GET /v1/x HTTP/1.0\r\n\r\n")
        data = await asyncio.wait_for(client.reader.read(), 60)
    head, _, body = data.partition(b"\r\n\r\n")
    assert body == b"onetwo" and b"chunked" not in head.lower()
