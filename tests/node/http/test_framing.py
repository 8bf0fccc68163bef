"""What is no HTTP, or only nearly: raw bytes of clients that attack, hurry, dawdle or are very old, against a node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.http.connection import MAX_HEAD, MAX_HEADER_LINE, MAX_HEADERS, MAX_PIPELINED, Connection
from node.http.errors import ApiError, ApiFailure
from node.http.router import Router
from node.http.server import HttpServer
from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat
from tests.waiting import PATIENCE_S

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: node\r\nContent-Type: application/json\r\n"
BODY = chat()
#: A second request that must never be seen as one.
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: node\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with cluster(1) as running:
        yield running


async def talk(port: int, raw: bytes) -> bytes:
    """Send bytes and return everything that comes until the node closes the connection."""
    async with connect("127.0.0.1", port) as client:
        client.writer.write(raw)
        async with asyncio.timeout(PATIENCE_S):
            return await client.reader.read()


def statuses(answered: bytes) -> list[int]:
    return [int(part[:3]) for part in answered.split(b"HTTP/1.1 ")[1:]]


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"Transfer-Encoding: chunked\r\n"
SMUGGLING = {
    "length and chunks": HEAD + LENGTH + CHUNKS + b"\r\n" + chunked(BODY) + SMUGGLED,
    "chunks and length": HEAD + CHUNKS + LENGTH + b"\r\n" + chunked(BODY) + SMUGGLED,
    "two lengths": HEAD + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY + SMUGGLED,
    "the same length twice": HEAD + LENGTH + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a list of lengths": HEAD + b"Content-Length: 5, 5\r\n\r\n" + BODY + SMUGGLED,
    "a length with a sign": HEAD + b"Content-Length: +5\r\n\r\n" + BODY + SMUGGLED,
    "a length in hex": HEAD + b"Content-Length: 0x5\r\n\r\n" + BODY + SMUGGLED,
    "a length beyond all numbers": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY + SMUGGLED,
    "chunks twice": HEAD + CHUNKS + CHUNKS + b"\r\n" + chunked(BODY) + SMUGGLED,
    "chunks, then identity": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + chunked(BODY) + SMUGGLED,
    "nearly chunks": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + chunked(BODY) + SMUGGLED,
    "gzip in chunks": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunked(BODY) + SMUGGLED,
    "a blank before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + chunked(BODY) + SMUGGLED,
    "a folded header": HEAD + b"X-A: b\r\n c\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a folded framing header": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + chunked(BODY) + SMUGGLED,
    "bare line feeds": (HEAD + LENGTH).replace(b"\r\n", b"\n") + b"\n" + BODY + SMUGGLED,
    "one bare line feed": HEAD + b"X-A: b\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a bare carriage return": HEAD + b"X-A: b\rX-B: c\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a zero byte in a header": HEAD + b"X-A: b\0c\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a header without a name": HEAD + b": b\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a header without a colon": HEAD + b"X-A\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "two hosts": HEAD + b"Host: other\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "no host": HEAD.replace(b"Host: node\r\n", b"") + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "chunks in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + CHUNKS + b"\r\n" + chunked(BODY) + SMUGGLED,
    "an unknown method": b"POSTX /v1/chat/completions HTTP/1.1\r\nHost: node\r\n\r\n" + SMUGGLED,
    "a blank in the target": b"GET /v1/mo dels HTTP/1.1\r\nHost: node\r\n\r\n" + SMUGGLED,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "HTTP/3.0": b"GET /v1/models HTTP/3.0\r\nHost: node\r\n\r\n" + SMUGGLED,
    "the greeting of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SMUGGLED,
}


@pytest.mark.parametrize("how", SMUGGLING)
async def test_what_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_seen(nodes: Cluster, how: str) -> None:
    answered = await talk(nodes[0].port, SMUGGLING[how])
    assert statuses(answered) in ([400], [505]), answered
    assert "error" in json.loads(answered.partition(b"\r\n\r\n")[2])
    assert not nodes[0].fake.received


BAD_CHUNKS = {
    "a negative size": b"-1\r\n",
    "a size in words": b"five\r\nhello\r\n",
    "a prefix": b"0x5\r\nhello\r\n",
    "a size beyond all numbers": b"fffffffffffffffff\r\nhello\r\n",
    "no size": b"\r\nhello\r\n",
    "a bare line feed": b"5\nhello\r\n",
    "data longer than its size": b"5\r\nhello!\r\n",
    "data shorter than its size": b"7\r\nhello\r\n0\r\n\r\n",
    "a blank in the size": b"5 5\r\nhello\r\n",
}


@pytest.mark.parametrize("how", BAD_CHUNKS)
async def test_chunks_that_are_none_are_refused(nodes: Cluster, how: str) -> None:
    raw = HEAD + CHUNKS + b"\r\n" + BAD_CHUNKS[how]
    if how == "data shorter than its size":
        raw += b"X" * 8
    answered = await talk(nodes[0].port, raw + SMUGGLED)
    assert statuses(answered) == [400], answered
    assert not nodes[0].fake.received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * MAX_HEADER_LINE + b" HTTP/1.1\r\nHost: node\r\n\r\n", 414),
        (HEAD + b"X-A: " + b"b" * MAX_HEADER_LINE + b"\r\n\r\n", 431),
        (HEAD + b"X" * MAX_HEADER_LINE + b": b\r\n\r\n", 431),
        (HEAD + b"X-A: b\r\n" * MAX_HEADERS + b"\r\n", 431),
        (HEAD + b"X-A: " + b"b" * MAX_HEAD, 431),
        (HEAD + (b"X-A: " + b"b" * (MAX_HEADER_LINE - 9) + b"\r\n") * 5 + b"\r\n", 431),
    ],
    ids=["target", "value", "name", "number", "endless", "whole"],
)
async def test_heads_are_bounded(nodes: Cluster, head: bytes, status: int) -> None:
    assert statuses(await talk(nodes[0].port, head)) == [status]


async def test_a_head_that_never_ends_is_bounded_by_its_bytes(nodes: Cluster) -> None:
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(HEAD)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2 * MAX_HEAD // 1000):
                client.writer.write(b"X-A: " + b"b" * 993 + b"\r\n")
                await asyncio.sleep(0)
            assert statuses(await client.reader.read()) == [431]


async def test_requests_that_come_at_once_are_answered_in_their_order(nodes: Cluster) -> None:
    one = HEAD + LENGTH + b"X-Request-Id: one\r\n\r\n" + BODY
    two = HEAD + CHUNKS + b"X-Request-Id: two\r\n\r\n" + chunked(BODY[:5], BODY[5:])
    three = b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
    answered = await talk(nodes[0].port, one + two + three)
    assert statuses(answered) == [200, 200, 200]
    assert answered.find(b"X-Request-Id: one") < answered.find(b"X-Request-Id: two") < answered.find(b'"ok"')
    assert [received.body for received in nodes[0].fake.received] == [BODY, BODY]


async def test_only_so_many_requests_wait_on_one_connection(nodes: Cluster) -> None:
    gate = Gate()
    nodes[0].fake.script = fake.hold(gate)
    health = b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n"
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(HEAD + LENGTH + b"\r\n" + BODY)
        await nodes[0].fake.until(lambda: bool(nodes[0].fake.received))
        client.writer.write(health * 1000)
        gate.open()
        async with asyncio.timeout(PATIENCE_S):
            answered = await client.reader.read()
    assert statuses(answered) == [200] * (MAX_PIPELINED + 1) + [400]


async def test_garbage_behind_a_request_does_not_spoil_its_answer(nodes: Cluster) -> None:
    answered = await talk(nodes[0].port, HEAD + LENGTH + b"\r\n" + BODY + b"\0\1garbage\r\n\r\n")
    assert statuses(answered) == [200, 400]
    assert len(nodes[0].fake.received) == 1


async def test_a_request_may_come_byte_by_byte(nodes: Cluster) -> None:
    async with connect("127.0.0.1", nodes[0].port) as client:
        for byte in HEAD + CHUNKS + b"\r\n" + chunked(BODY):
            client.writer.write(bytes([byte]))
            await client.writer.drain()
        assert (await client.answer("POST")).status == 200
    assert nodes[0].fake.received[0].body == BODY


async def test_chunks_may_have_extensions_and_trailers_and_neither_goes_on(nodes: Cluster) -> None:
    raw = b"%x;a=b\r\n%s\r\n0\r\nX-Trailer: c\r\n\r\n" % (len(BODY), BODY)
    async with connect("127.0.0.1", nodes[0].port) as client:
        for _ in range(2):
            client.writer.write(HEAD + CHUNKS + b"\r\n" + raw)
            assert (await client.answer("POST")).status == 200
    for received in nodes[0].fake.received:
        assert received.body == BODY and not received.header("x-trailer")


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_expectation_is_answered_where_it_is_known(nodes: Cluster, version: bytes) -> None:
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/" + version) + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n"
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(head)
        if version == b"1.1":
            assert (await client.head()).status == 100
        client.writer.write(BODY)
        assert (await client.answer("POST")).status == 200


async def test_another_expectation_is_refused(nodes: Cluster) -> None:
    assert statuses(await talk(nodes[0].port, HEAD + b"Expect: a miracle\r\n" + LENGTH + b"\r\n")) == [417]


@pytest.mark.parametrize("keep", [True, False])
async def test_a_client_of_http_1_0_keeps_its_connection_only_when_it_asks(nodes: Cluster, keep: bool) -> None:
    wish = b"Connection: keep-alive\r\n" if keep else b""
    raw = b"GET /healthz HTTP/1.0\r\n" + wish + b"\r\n"
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(raw)
        answer = await client.answer()
        assert answer.status == 200 and answer.one("connection") == ("keep-alive" if keep else None)
        if keep:
            client.writer.write(raw)
            assert (await client.answer()).status == 200
        else:
            async with asyncio.timeout(PATIENCE_S):
                assert await client.reader.read() == b""


async def test_a_stream_for_a_client_of_http_1_0_ends_with_its_connection(nodes: Cluster) -> None:
    body = chat(stream=True)
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    answered = await talk(nodes[0].port, head + body)
    assert b"transfer-encoding" not in answered.lower()
    assert answered.endswith(fake.sse("one") + fake.sse("two") + fake.DONE)


async def test_head_has_the_headers_and_no_body_and_the_connection_goes_on(nodes: Cluster) -> None:
    async with connect("127.0.0.1", nodes[0].port) as client:
        for path in ("/v1/models", "/healthz", "/nothing"):
            head = await client.ask("HEAD", path)
            got = await client.ask("GET", path)
            assert (head.status, head.body) == (got.status, b"")
            assert head.one("content-length") == got.one("content-length") == str(len(got.body))


async def test_an_offer_to_upgrade_is_ignored_with_its_body_whole(nodes: Cluster) -> None:
    """Clients of Java offer HTTP/2 with their first request, whatever it is."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    async with connect("127.0.0.1", nodes[0].port) as client:
        for framing, body in ((LENGTH, BODY), (CHUNKS, chunked(BODY))):
            client.writer.write(HEAD + offer + framing + b"\r\n" + body)
            assert (await client.answer("POST")).status == 200
    assert [received.body for received in nodes[0].fake.received] == [BODY, BODY]
    assert not nodes[0].fake.received[0].header("upgrade")


async def test_nothing_is_tunnelled(nodes: Cluster) -> None:
    answered = await talk(nodes[0].port, b"CONNECT node:1 HTTP/1.1\r\nHost: node\r\n\r\n" + SMUGGLED)
    assert len(statuses(answered)) == 1 and statuses(answered)[0] >= 400
    assert not nodes[0].fake.received


@pytest.mark.parametrize("sent", [b"", b"P", HEAD, HEAD + b"X-A: b"], ids=["nothing", "a byte", "lines", "half a line"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("node.http.connection.HEAD_S" if sent else "node.http.connection.KEEPALIVE_S", 0.05)
    assert await talk(nodes[0].port, sent) == b""


async def test_a_head_that_trickles_gets_no_more_time_with_each_byte(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.http.connection.HEAD_S", 0.2)
    async with connect("127.0.0.1", nodes[0].port) as client:
        async with asyncio.timeout(PATIENCE_S):
            client.writer.write(HEAD)
            while not client.reader.at_eof():
                client.writer.write(b"X")
                try:
                    async with asyncio.timeout(0.02):
                        await client.reader.read(1)
                except (TimeoutError, ConnectionError):
                    continue


async def test_a_body_that_stops_is_not_waited_for(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.http.intake.BODY_IDLE_S", 0.05)
    monkeypatch.setattr("node.http.connection.LINGER_S", 0.05)
    assert statuses(await talk(nodes[0].port, HEAD + LENGTH + b"\r\n" + BODY[:3])) == [408]


async def test_a_body_that_trickles_gets_no_more_time_with_each_byte(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.http.intake.BODY_MAX_S", 0.2)
    monkeypatch.setattr("node.http.connection.LINGER_S", 0.05)
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n")

        async def trickle() -> None:
            while not client.writer.is_closing():
                client.writer.write(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(trickle())
        try:
            assert (await client.head()).status == 408
        finally:
            dripping.cancel()
    assert not nodes[0].fake.received


async def test_nothing_of_a_body_is_read_from_who_has_no_key(nodes: Cluster) -> None:
    """A slow body costs its sender a key."""
    a = await nodes.add("keyed", api_key=("k" * 20,))
    async with connect("127.0.0.1", a.port) as client:
        client.writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n")
        assert (await client.head()).status == 401


async def test_an_idle_connection_is_closed(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.http.connection.KEEPALIVE_S", 0.05)
    assert statuses(await talk(nodes[0].port, b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n")) == [200]


async def test_a_client_that_closes_its_half_is_gone(nodes: Cluster) -> None:
    """The engine must not work for somebody who may be gone: closing the sending half counts as leaving."""
    member = nodes[0]
    member.fake.script = fake.stall
    async with connect("127.0.0.1", member.port) as client:
        client.writer.write(HEAD + LENGTH + b"\r\n" + BODY)
        await member.fake.until(lambda: bool(member.fake.received))
        client.writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.read() == b""
    await member.fake.until(lambda: member.fake.disconnects == 1)
    assert await member.node.admission.idle(PATIENCE_S)


async def test_a_request_that_is_cut_in_its_body_reaches_nobody(nodes: Cluster) -> None:
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(HEAD + LENGTH + b"\r\n" + BODY[:-1])
        client.writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            await client.reader.read()
    assert (await ask(nodes[0].port, "GET", "/healthz")).status == 200
    assert not nodes[0].fake.received


async def test_a_large_body_that_is_refused_is_answered_and_not_read(nodes: Cluster) -> None:
    size = nodes[0].node.settings.max_body_mib * 1024 * 1024 + 1
    async with connect("127.0.0.1", nodes[0].port) as client:
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        assert (await client.answer("POST")).status == 413


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch, nodes: Cluster) -> None:
    monkeypatch.setattr("node.http.server.MAX_CONNECTIONS", 1)
    a = nodes[0]
    a.fake.script = fake.stall
    async with connect("127.0.0.1", a.port) as first:
        await first.send("POST", CHAT, (), chat())
        await a.fake.until(lambda: a.fake.active == 1)
        async with connect("127.0.0.1", a.port) as second, asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                assert await second.reader.read() == b""
        assert a.fake.active == 1, "who is served stays"


@pytest.mark.parametrize("held", [b"", b"GET /healthz HTTP/1.1\r\nHost"], ids=["idle", "in its head"])
async def test_who_holds_connections_without_a_request_makes_room(
    monkeypatch: pytest.MonkeyPatch, nodes: Cluster, held: bytes
) -> None:
    monkeypatch.setattr("node.http.server.MAX_CONNECTIONS", 2)
    async with connect("127.0.0.1", nodes[0].port) as first, connect("127.0.0.1", nodes[0].port) as second:
        assert (await first.ask("GET", "/healthz")).status == 200
        first.writer.write(held)
        assert (await second.ask("GET", "/healthz")).status == 200
        assert (await ask(nodes[0].port, "GET", "/healthz")).status == 200
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                assert await first.reader.read() == b""
        assert (await second.ask("GET", "/healthz")).status == 200, "the oldest one went"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        return None

    resume_reading = pause_reading


_LINES = st.sampled_from(
    [
        HEAD,
        LENGTH,
        CHUNKS,
        b"\r\n",
        BODY,
        chunked(BODY),
        SMUGGLED,
        b"\n",
        b"\0",
        b"Upgrade: h2c\r\n",
        b"0\r\n\r\n",
        b"GET ",
    ]
)
_STREAM = st.lists(st.one_of(_LINES, st.binary(max_size=40)), max_size=12)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(pieces=_STREAM, cut=st.booleans())
def test_no_bytes_break_a_connection(pieces: list[bytes], cut: bool) -> None:
    """Whatever comes, whatever of it is a request: nothing is raised, and each answer is one of ours."""

    async def check() -> None:
        async def nothing(request: object) -> None:
            raise ApiFailure(ApiError(404, "not_found", "There is nothing here."))

        router, wire = Router(), Wire()
        router.add_prefix("/", nothing)  # type: ignore[arg-type]
        server = HttpServer(router)
        connection = Connection(server._handle, server, asyncio.get_running_loop())
        connection.connection_made(wire)  # type: ignore[arg-type]
        for piece in pieces:
            connection.data_received(piece)
        for _ in range(20):
            await asyncio.sleep(0)
        if cut:
            connection.connection_lost(None)
        for status in statuses(wire.written):
            assert 400 <= status < 600
        if not cut:
            connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(check())
