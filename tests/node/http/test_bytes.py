"""Property: whatever headers, status and body an engine answers, they come out the same through none and one hop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.engine import Reply
from tests.node.http.bodies import CHAT, chat

#: Headers that the node adds to, or takes from, what the engine answered.
OURS = ("x-grapevine-target", "x-grapevine-reason", "x-grapevine-hops", "x-request-id")


_TOKEN = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
_VALUE = st.text(st.characters(min_codepoint=0xA1, max_codepoint=0x17F), max_size=40).map(lambda text: "v" + text + "v")
_HEADERS = st.lists(st.tuples(_TOKEN.map(lambda name: "y-" + name), _VALUE), max_size=8).map(tuple)
_STATUS = st.sampled_from([200, 201, 202, 206, 226, 299, 400, 404, 418, 422, 429, 500, 503, 599])
_CHUNKS = st.lists(st.binary(min_size=1, max_size=3000), max_size=6).map(tuple)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sent=_HEADERS, status=_STATUS, answered=_HEADERS, chunks=_CHUNKS, length=st.booleans(), extra=st.text(max_size=300)
)
def test_bytes_are_identical_through_none_and_one_hop(
    loop_nodes: tuple[asyncio.AbstractEventLoop, Cluster],
    *,
    sent: fake.Headers,
    status: int,
    answered: fake.Headers,
    chunks: tuple[bytes, ...],
    length: bool,
    extra: str,
) -> None:
    loop, nodes = loop_nodes

    async def check() -> None:
        body = chat(extra=extra)
        seen: list[tuple[RawAnswer, fake.Received]] = []
        for target in "ab":
            engine = nodes["ab".index(target)].fake
            engine.script = fake.reply(Reply(status, answered, chunks, length))
            answer = await ask(nodes[0].port, "POST", CHAT, (("x-grapevine-force-target", target), *sent), body)
            seen.append((answer, engine.received.pop()))
        for answer, received in seen:
            assert (answer.status, answer.body, answer.complete) == (status, b"".join(chunks), True)
            assert received.body == body
            assert _ours_apart(answer.headers) == _stripped(answered)
            for name in {name for name, _ in sent}:
                assert received.header(name) == [value for key, value in sent if key == name]
        assert seen[0][1].headers == seen[1][1].headers or _order_free(seen)

    loop.run_until_complete(check())


def _ours_apart(headers: fake.Headers) -> list[tuple[str, str]]:
    framing = (*OURS, "content-length", "transfer-encoding")
    return [(name.lower(), value) for name, value in headers if name.lower() not in framing]


def _stripped(headers: fake.Headers) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers]


def _order_free(seen: list[tuple[RawAnswer, fake.Received]]) -> bool:
    first, second = (
        sorted((k.lower(), v) for k, v in received.headers if k.lower() != "x-request-id") for _, received in seen
    )
    return first == second


@pytest.fixture
def loop_nodes() -> Iterator[tuple[asyncio.AbstractEventLoop, Cluster]]:
    """One cluster for all examples of the property test."""
    loop = asyncio.new_event_loop()
    running = cluster(2)
    nodes = loop.run_until_complete(running.__aenter__())
    yield loop, nodes
    loop.run_until_complete(running.__aexit__(None, None, None))
    loop.close()
