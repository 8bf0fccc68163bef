"""What main process and workers say: every message comes out as it went in, and nothing else comes out of any bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
import types
from contextlib import suppress
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import RemoteError
from node.plan import Plan, RouteOptions
from node.prompt.parse import parse_request
from node.workers import told
from node.workers.channel import Channel
from node.workers.down import TO_WORKER, Fail
from node.workers.packing import MAX_MESSAGE, decode, encode
from node.workers.up import FROM_WORKER, Begin, End, Ready
from tests.node.http.bodies import CHAT, chat

KINDS = (*FROM_WORKER, *TO_WORKER)
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    # Headers hold what was on the wire: bytes that are no text become surrogates.
    str: st.text(st.characters(exclude_categories=["Cs"]) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)),
    bytes: st.binary(max_size=64),
    bool: st.booleans(),
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(allow_nan=False),
}


def drawn(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that a message may have."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*(st.none() if item is type(None) else drawn(item) for item in get_args(hint)))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            return st.lists(drawn(inner[0]), max_size=3).map(tuple)
        return st.tuples(*(drawn(item) for item in inner))
    hints = get_type_hints(hint)
    return st.tuples(*(drawn(hints[name]) for name in hint._fields)).map(hint._make)


@given(st.sampled_from(KINDS).flatmap(drawn))
def test_every_message_comes_out_as_it_went_in(message: Any) -> None:
    again = decode(encode(message))
    assert type(again) is type(message) and again == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_the_remote_kind_of_error(data: bytes) -> None:
    with suppress(RemoteError):
        decode(data)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@given(st.integers(0, len(KINDS)), st.lists(_JSON, max_size=20))
def test_fields_of_any_kind_are_a_message_or_the_remote_kind_of_error(number: int, fields: list[Any]) -> None:
    try:
        message = decode(msgpack.packb([number, *fields]))
    except RemoteError:
        return
    assert len(message) == len(fields)


@given(st.sampled_from(KINDS).flatmap(drawn), st.data())
def test_a_message_that_was_cut_or_changed_is_another_one_or_the_remote_kind_of_error(
    message: Any, data: st.DataObject
) -> None:
    packed = bytearray(encode(message))
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        packed[at] ^= data.draw(st.integers(1, 255))
    else:
        del packed[at:]
    with suppress(RemoteError):
        decode(packed)


def test_what_cannot_be_told_is_the_remote_kind_of_error() -> None:
    with pytest.raises(RemoteError, match="cannot be told"):
        encode(Ready(1 << 80))
    with pytest.raises(RemoteError, match="bytes"):
        encode(Fail(1, "broken", "x" * MAX_MESSAGE))


@pytest.mark.parametrize(
    "body", [chat(), chat(stream=True, n=3, max_tokens=7, seed=1), chat(None, kv_transfer_params={}), b"no json"]
)
def test_a_request_is_told_whole_but_for_its_body(body: bytes) -> None:
    path = CHAT if body.startswith(b"{") else "/v1/audio/transcriptions"
    parsed = parse_request(
        path, body, "application/json" if body.startswith(b"{") else "multipart/form-data; boundary=x"
    )
    again = told.request_of(decode(encode(_begin(told.read_of(parsed)))).read)
    for name in (item for item in parsed.__slots__ if item not in ("body", "priority")):
        assert getattr(again, name) == getattr(parsed, name), name


def _begin(read: Any) -> Any:
    return Begin(1, "rid", CHAT, "POST", False, "", read)


def test_a_request_that_cannot_be_one_is_the_remote_kind_of_error() -> None:
    read = told.read_of(parse_request(CHAT, chat(), "application/json"))
    for wrong in (read._replace(chunks=b"1234567"), read._replace(prompts=0), read._replace(answers=-1)):
        with pytest.raises(RemoteError):
            told.request_of(wrong)


def test_plans_and_options_are_told_whole() -> None:
    plan = Plan("r", "m", "a", "b", "c", 1, 2, 3, "why", "cost", 1, ("x", "y"), 2.5, 3.5)
    assert told.plan_of(told.told_plan(plan)) == plan
    options = RouteOptions("r", 1, ("x",), 2, 0.5, "a", "b", True)
    assert told.options_of(told.told_options(options)) == options


class _Pair:
    """A channel, and a bare socket at its other end."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.lost = asyncio.Event()
        self.came = asyncio.Event()
        self.channel = Channel(self._take, self.lost.set)

    def _take(self, message: Any) -> None:
        self.taken.append(message)
        self.came.set()

    async def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=ours)
        theirs.setblocking(False)
        return theirs


async def test_messages_come_whole_however_they_are_cut() -> None:
    pair, loop = _Pair(), asyncio.get_running_loop()
    with await pair.open() as other:
        messages = [End(1, True, 2, 3.5), Ready(4), Fail(5, "broken", "why " * 100)]
        sent = b"".join(struct.pack(">I", len(packed)) + packed for packed in map(encode, messages))
        for at in range(len(sent)):
            await loop.sock_sendall(other, sent[at : at + 1])
        async with asyncio.timeout(60):
            while len(pair.taken) < len(messages):
                pair.came.clear()
                await pair.came.wait()
        assert pair.taken == messages
        pair.channel.abort()
        await pair.lost.wait()


@pytest.mark.parametrize("sent", [struct.pack(">I", MAX_MESSAGE + 1), struct.pack(">I", 3) + b"abc"])
async def test_a_channel_ends_when_what_comes_makes_no_sense(sent: bytes) -> None:
    pair = _Pair()
    with await pair.open() as other:
        await asyncio.get_running_loop().sock_sendall(other, sent)
        async with asyncio.timeout(60):
            await pair.lost.wait()
        assert pair.taken == [] and not pair.channel.open
        pair.channel.send(Ready(1))  # nobody hears it


async def test_what_is_said_in_one_turn_of_the_loop_goes_out_in_one_write() -> None:
    pair, loop = _Pair(), asyncio.get_running_loop()
    with await pair.open() as other:
        for number in range(3):
            pair.channel.send(Ready(number))
        with pytest.raises(BlockingIOError):
            other.recv(1)
        await asyncio.sleep(0)
        assert len(await loop.sock_recv(other, 1000)) == 3 * len(encode(Ready(1))) + 12
        pair.channel.close()
        async with asyncio.timeout(60):
            await pair.lost.wait()
