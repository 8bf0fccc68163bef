"""Two nodes in one process: what a client sees is the same whether its request is run here or one hop away."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.node.fakes import engine as fake
from tests.node.fakes.client import ask, connect
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.engine import Gate, Reply
from tests.node.http.bodies import CHAT, chat
from tests.waiting import until

HOPS = pytest.mark.parametrize("target", ["a", "b"], ids=["0 hops", "1 hop"])

#: Headers that the node adds to, or takes from, what the engine answered.
OURS = ("x-grapevine-target", "x-grapevine-reason", "x-grapevine-hops", "x-request-id")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    """Two nodes for the whole file: what a test changes is set back by `nodes`."""
    async with cluster(2) as running:
        yield running


@pytest.fixture
def nodes(shared: Cluster) -> Cluster:
    for member in shared.members:
        member.fake.script = fake.answer_chat
        member.fake.received.clear()
        member.fake.disconnects = 0
    return shared


def to(target: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("x-grapevine-force-target", target), *more)


def at(nodes: Cluster, name: str) -> fake.FakeEngine:
    return next(member.fake for member in nodes.members if member.name == name)


@HOPS
async def test_a_completion_says_who_ran_it_and_why(nodes: Cluster, target: str) -> None:
    answer = await ask(nodes[0].port, "POST", CHAT, to(target, ("X-Request-Id", "mine-1")), chat())
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["choices"][0]["message"]["content"] == target
    assert answer.one("x-grapevine-target") == target
    assert answer.one("x-grapevine-hops") == ("0" if target == "a" else "1")
    assert answer.one("x-grapevine-reason")
    assert answer.one("x-request-id") == "mine-1"
    received = at(nodes, target).received[-1]
    assert received.header("x-request-id") == ["mine-1"]
    assert received.target == CHAT


@HOPS
async def test_an_invalid_request_id_is_replaced(nodes: Cluster, target: str) -> None:
    answer = await ask(nodes[0].port, "POST", CHAT, to(target, ("X-Request-Id", "a b;c")), chat())
    made = answer.one("x-request-id")
    assert made is not None and len(made) == 32
    assert at(nodes, target).received[-1].header("x-request-id") == [made]


@HOPS
async def test_hostile_headers_never_reach_the_engine(nodes: Cluster, target: str) -> None:
    hostile = (
        ("x-grapevine-plan", "AAAA"),
        ("x-grapevine-peer", "b"),
        ("X-Grapevine-Auth", "0.0"),
        ("x-grapevine-anything", "1"),
        ("Connection", "X-Listed"),
        ("X-Listed", "1"),
        ("Proxy-Authorization", "secret"),
    )
    answer = await ask(nodes[0].port, "POST", CHAT, to(target, *hostile, ("X-Fine", "1")), chat())
    assert answer.status == 200
    received = at(nodes, target).received[-1]
    names = {name.lower() for name, _ in received.headers}
    assert not {name for name in names if name.startswith("x-grapevine") or name == "x-listed"}
    assert "proxy-authorization" not in names and "x-fine" in names


@HOPS
async def test_transfer_parameters_of_a_client_are_removed(nodes: Cluster, target: str) -> None:
    body = chat(kv_transfer_params={"remote_kv_source": {"remote_host": "evil"}})
    answer = await ask(nodes[0].port, "POST", CHAT, to(target), body)
    assert answer.status == 200
    received = at(nodes, target).received[-1]
    assert "kv_transfer_params" not in received.json and b"evil" not in received.body
    assert received.json["messages"] == [{"role": "user", "content": "hi"}]


@HOPS
async def test_the_first_chunk_arrives_while_the_engine_holds_the_second(nodes: Cluster, target: str) -> None:
    gate = Gate()
    engine = at(nodes, target)
    engine.script = fake.gated(gate, [fake.sse("one"), fake.sse("two"), fake.DONE])
    async with connect("127.0.0.1", nodes[0].port) as client:
        await client.send("POST", CHAT, to(target), chat(stream=True))
        gate.open()
        head = await client.head()
        assert head.status == 200
        assert await client.chunk() == fake.sse("one")
        assert engine.active == 1
        gate.open(2)
        rest = b""
        while piece := await client.chunk():
            rest += piece
        assert rest == fake.sse("two") + fake.DONE


@HOPS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_aborts_the_engine(nodes: Cluster, target: str, stream: bool) -> None:
    gate = Gate()
    engine = at(nodes, target)
    engine.script = fake.gated(gate, [fake.sse("one"), fake.sse("two")]) if stream else fake.stall
    async with connect("127.0.0.1", nodes[0].port) as client:
        await client.send("POST", CHAT, to(target), chat(stream=stream))
        await engine.until(lambda: engine.active == 1)
        if stream:
            gate.open()
            await client.head()
            await client.chunk()
    await engine.until(lambda: engine.disconnects == 1 and engine.active == 0)


@HOPS
async def test_a_stream_whose_engine_dies_ends_with_an_error_event(nodes: Cluster, target: str) -> None:
    at(nodes, target).script = fake.reset_after([fake.sse("one")])
    answer = await ask(nodes[0].port, "POST", CHAT, to(target), chat(stream=True))
    assert answer.status == 200 and answer.complete
    first, last = answer.body.strip().split(b"\n\n")
    assert first + b"\n\n" == fake.sse("one")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error" and error["code"] == "upstream_failed"


@HOPS
async def test_a_body_of_megabytes_arrives_as_it_was_sent(nodes: Cluster, target: str) -> None:
    body = chat(filler="x" * (5 << 20))
    answer = await ask(nodes[0].port, "POST", CHAT, to(target), body)
    assert answer.status == 200
    received = at(nodes, target).received[0]
    assert received.body == body and received.header("content-length") == [str(len(body))]
    assert not received.header("transfer-encoding")


@HOPS
async def test_a_broken_stream_is_learnt_from_as_a_failure(nodes: Cluster, target: str) -> None:
    at(nodes, target).script = fake.reset_after([fake.sse("one")])
    counts = next(member for member in nodes.members if member.name == target).node.meter.counts
    failed, finished = counts.failed, counts.finished
    await ask(nodes[0].port, "POST", CHAT, to(target), chat(stream=True))
    await until(lambda: (counts.failed, counts.finished) == (failed + 1, finished))  # workers tell it afterwards


@HOPS
async def test_a_whole_answer_whose_engine_dies_is_cut(nodes: Cluster, target: str) -> None:
    at(nodes, target).script = fake.reset_after([b"x" * 10], length=20)
    answer = await ask(nodes[0].port, "POST", CHAT, to(target), chat())
    assert not answer.complete


@HOPS
@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_an_error_of_the_engine_is_its_own(nodes: Cluster, target: str, status: int) -> None:
    engine = at(nodes, target)
    body = b'{"error":{"message":"no","type":"x","param":null,"code":1}}'
    engine.script = fake.reply(Reply(status, (("Content-Type", "application/json"), ("Retry-After", "7")), (body,)))
    answer = await ask(nodes[0].port, "POST", CHAT, to(target), chat())
    assert (answer.status, answer.body, answer.one("Retry-After")) == (status, body, "7")
    assert len(engine.received) == 1


@HOPS
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
async def test_every_method_goes_through(nodes: Cluster, target: str, method: str) -> None:
    engine = at(nodes, target)
    engine.script = fake.reply(
        Reply(200, (("Allow", "x"),), (b"" if method == "HEAD" else b"ok",), length=method != "HEAD")
    )
    answer = await ask(nodes[0].port, method, "/v1/responses/resp_1?a=%2F", to(target))
    assert answer.status == 200 and answer.one("Allow") == "x"
    received = engine.received[-1]
    assert (received.method, received.target) == (method, "/v1/responses/resp_1?a=%2F")


async def test_requests_on_one_connection_follow_each_other(nodes: Cluster) -> None:
    async with connect("127.0.0.1", nodes[0].port) as client:
        for target in "abab":
            answer = await client.ask("POST", CHAT, to(target), chat())
            assert answer.one("x-grapevine-target") == target


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokenize_is_routed_too(nodes: Cluster, path: str) -> None:
    answer = await ask(nodes[0].port, "POST", path, to("b"), json.dumps({"model": "m", "prompt": "x"}).encode())
    assert answer.status == 200 and at(nodes, "b").received[-1].target == path


async def test_expect_continue_is_answered_before_the_body(nodes: Cluster) -> None:
    body = chat()
    headers = (("Expect", "100-continue"), ("Content-Length", str(len(body))))
    async with connect("127.0.0.1", nodes[0].port) as client:
        await client.send("POST", CHAT, headers)
        assert (await client.head()).status == 100
        client.writer.write(body)
        assert (await client.answer()).status == 200
    assert (await ask(nodes[0].port, "POST", CHAT, (("Expect", "magic"),), body)).status == 417
