"""Connections to engines and peers: what is an answer, what is none, and when a connection is used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.relay.connection import HIGH_WATER, MAX_HEAD, Connection
from node.relay.session import Session, parse_address
from node.relay.upstream import (
    Base,
    UpstreamAnswer,
    UpstreamBrokenError,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamRequest,
    open_upstream,
)
from tests.waiting import PATIENCE_S

ASK = UpstreamRequest("POST", "/v1/x", [], b"{}")
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[Base]:
    """A server of raw bytes, and where to ask it."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with Session(connect_s=2, idle_s=60, limit=4) as session, asyncio.timeout(PATIENCE_S):
            yield Base(session, f"http://127.0.0.1:{port}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + (await reader.readexactly(2) if b"Content-Length: 2" in head else b"")


def always(answer: bytes, *, close: bool = False) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            writer.write(answer)
            if close:
                return

    return serve


async def ask(base: Base, sent: UpstreamRequest = ASK) -> tuple[UpstreamAnswer, bytes]:
    answer = await open_upstream(base, sent, first_byte_s=PATIENCE_S)
    return answer, await answer.read_all(1 << 20)


async def test_a_connection_is_used_again() -> None:
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await always(WHOLE)(reader, writer)

    async with server(serve) as base:
        for _ in range(3):
            assert (await ask(base))[1] == b"hello"
    assert seen == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n!",
    ],
    ids=["close", "HTTP/1.0", "an answer that nobody asked for"],
)
async def test_a_connection_is_not_used_again_when_it_may_not_be(answer: bytes) -> None:
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await always(answer)(reader, writer)

    async with server(serve) as base:
        for _ in range(2):
            assert (await ask(base))[1] == b"hello"
    assert seen == 2


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    first = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal first
        await request(reader)
        writer.write(WHOLE)
        if first:
            first = False
            await request(reader)  # the second request comes, and is not answered
            return
        await always(WHOLE)(reader, writer)

    async with server(serve) as base:
        assert (await ask(base))[1] == b"hello"
        assert (await ask(base))[1] == b"hello"


async def test_a_new_connection_that_breaks_is_not_tried_twice() -> None:
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await request(reader)

    async with server(serve) as base:
        with pytest.raises(UpstreamBrokenError):
            await ask(base)
    assert seen == 1


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with server(always(b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nall of it", close=True)) as base:
        assert (await ask(base))[1] == b"all of it"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\n\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * MAX_HEAD + b"\r\n\r\n",
        b"hello",
        b"",
    ],
)
async def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    async with server(always(answer, close=True)) as base:
        with pytest.raises(UpstreamBrokenError):
            await ask(base)


async def test_an_announcement_is_not_the_answer() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\nContent-Length: 0\r\n\r\n"
    async with server(always(early + WHOLE)) as base:
        answer, body = await ask(base)
    assert (answer.status, answer.reason, body) == (200, "OK", b"hello")
    assert answer.headers == [("Content-Length", "5")]


async def test_head_has_no_body_and_its_connection_is_not_used_again() -> None:
    async with server(always(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as base:
        answer = await open_upstream(base, UpstreamRequest("HEAD", "/v1/x", [], b""), first_byte_s=PATIENCE_S)
        answer.close()
        await asyncio.sleep(0)
        assert len(base.session) == 0 and answer.headers == [("Content-Length", "5")]


async def test_a_request_has_its_bytes_in_order_and_no_header_of_ours() -> None:
    seen: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(await request(reader))
        writer.write(WHOLE)

    async with server(serve) as base:
        await ask(base, UpstreamRequest("POST", "/v1/x?a=%20#part", [("X-B", "1"), ("x-a", "ü"), ("X-B", "2")], b"{}"))
    port = base.url.rpartition(":")[2]
    head = f"POST /v1/x?a=%20 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    head += "X-B: 1\r\nx-a: ü\r\nX-B: 2\r\nContent-Length: 2\r\n\r\n"
    assert await seen == head.encode() + b"{}"


@pytest.mark.parametrize("value", ["a\r\nX-Evil: b", "a\nb", "a\rb", "a\0b"])
async def test_no_header_can_hold_a_line_break(value: str) -> None:
    async with server(always(WHOLE)) as base:
        with pytest.raises(UpstreamRefusedError):
            await ask(base, UpstreamRequest("POST", "/v1/x", [("X-A", value)], b""))
        with pytest.raises(UpstreamRefusedError):
            await ask(base, UpstreamRequest("POST", f"/v1/x{value}", [], b""))


async def test_a_reader_that_is_slow_stops_the_socket() -> None:
    blocks = 64
    size = HIGH_WATER

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (blocks * size))
        for _ in range(blocks):
            writer.write(b"x" * size)
            await writer.drain()

    async with server(serve) as base:
        answer = await open_upstream(base, ASK, first_byte_s=PATIENCE_S)
        total = 0
        while piece := await answer.read():
            assert len(piece) < 4 * size
            total += len(piece)
            await asyncio.sleep(0)
        answer.close()
        assert total == blocks * size and len(base.session) == 1


async def test_connections_are_bounded_and_given_back() -> None:
    async with server(always(WHOLE)) as base:
        held = [await open_upstream(base, ASK, first_byte_s=PATIENCE_S) for _ in range(4)]
        with pytest.raises(UpstreamRefusedError):
            await ask(base)
        held[0].close()
        assert (await ask(base))[1] == b"hello"
        for answer in held:
            answer.close()


async def test_a_free_connection_is_not_kept_for_long() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(WHOLE)
        await reader.read()
        closed.set()

    async with server(serve) as base, Session(connect_s=2, idle_s=0.05, limit=4) as session:
        assert (await ask(Base(session, base.url)))[1] == b"hello"
        await closed.wait()
        assert len(session) == 0


async def test_nothing_listens() -> None:
    async with server(always(WHOLE)) as base:
        pass
    async with Session(connect_s=2, idle_s=60, limit=4) as session:
        with pytest.raises(UpstreamRefusedError):
            await ask(Base(session, base.url))
        for url in ("http://", "ftp://a", "http://a:0", "http://a:x", "http://[::1", "nonsense", "http://a:99999"):
            with pytest.raises(UpstreamRefusedError):
                await ask(Base(session, url))
        assert len(session) == 0


def test_an_address_is_read_as_it_is_written() -> None:
    address = parse_address("https://user@a.example:8443/gateway/")
    assert (address.host, address.port, address.tls) == ("a.example", 8443, True)
    assert (address.authority, address.prefix) == ("a.example:8443", "/gateway")
    assert parse_address("http://[::1]").port == 80


_PIECES = st.lists(
    st.one_of(
        st.sampled_from([WHOLE, b"HTTP/1.1 ", b"200 OK\r\n", b"\r\n", b"Content-Length: 3\r\n", b"0\r\n\r\n", b"abc"]),
        st.sampled_from([b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"3\r\nabc\r\n"]),
        st.binary(max_size=20),
    ),
    max_size=10,
)


class _Wire:
    def __init__(self) -> None:
        self.open = True

    def write(self, data: bytes) -> None:
        return None

    def is_closing(self) -> bool:
        return not self.open

    def abort(self) -> None:
        self.open = False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        return None

    resume_reading = pause_reading


@settings(max_examples=300, deadline=None)
@given(pieces=_PIECES)
def test_whatever_a_server_sends_is_an_answer_or_an_error_of_the_remote(pieces: list[bytes]) -> None:
    async def check() -> None:
        free: list[Connection] = []
        connection = Connection(asyncio.get_running_loop(), free.append, lambda connection: None)
        connection.connection_made(_Wire())  # type: ignore[arg-type]
        connection.send(b"", b"")
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        try:
            await connection.head(PATIENCE_S)
            answer = UpstreamAnswer(connection)
            await answer.read_all(1 << 20)
        except (OSError, UpstreamError):
            pass
        connection.close()
        assert not free

    asyncio.run(check())


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_an_answer_is_the_same_however_it_is_cut(data: st.DataObject) -> None:
    chunks = b"HTTP/1.1 207 Many\r\nX-A:  b \r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks += b"5\r\nhello\r\n1\r\n!\r\n0\r\nX-T: u\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(chunks)), max_size=8)))

    async def check() -> None:
        free: list[Connection] = []
        connection = Connection(asyncio.get_running_loop(), free.append, lambda connection: None)
        connection.connection_made(_Wire())  # type: ignore[arg-type]
        connection.send(b"", b"")
        for start, end in zip([0, *cuts], [*cuts, len(chunks)], strict=True):
            if start < end:
                connection.data_received(chunks[start:end])
        await connection.head(PATIENCE_S)
        answer = UpstreamAnswer(connection)
        assert (answer.status, answer.reason) == (207, "Many")
        assert answer.headers == [("X-A", "b"), ("Transfer-Encoding", "chunked")]
        assert await answer.read_all(100) == b"hello!"
        assert free == [connection]

    asyncio.run(check())


@pytest.mark.parametrize("reason", [b" OK", b""])
async def test_what_follows_a_whole_answer_in_the_same_bytes_is_no_part_of_it(reason: bytes) -> None:
    more = b"HTTP/1.1 200" + reason + b"\r\nContent-Length: 5\r\n\r\nWRONG"
    async with server(always(WHOLE + more)) as base:
        for _ in range(2):
            answer, body = await ask(base)
            assert body == b"hello" and answer.status == 200
