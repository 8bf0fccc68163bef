"""Who waits, in which order, how that is seen, and what it is told: through real nodes and sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from node import turns
from node.http.options import MAX_PRIORITY, client_of
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import Cluster, Member, cluster
from tests.node.fakes.engine import Gate
from tests.node.http.bodies import CHAT, chat

Header = tuple[str, str]


def error_of(answer: RawAnswer) -> dict[str, object]:
    return dict(json.loads(answer.body)["error"])


class Full:
    """A node whose only place is taken until the gate opens."""

    def __init__(self, member: Member, *headers: Header) -> None:
        self.member = member
        self.gate = Gate()
        self.headers = headers
        self.tasks: list[asyncio.Task[RawAnswer]] = []

    async def fill(self) -> Full:
        self.member.fake.script = fake.hold(self.gate)
        self.send("holder", *self.headers)
        await self.member.fake.until(lambda: self.member.fake.active == 1)
        return self

    def send(self, rid: str, *headers: Header, at: Member | None = None, body: bytes = b"") -> asyncio.Task[RawAnswer]:
        entry = at or self.member
        sent = (("X-Request-Id", rid), *headers)
        self.tasks.append(asyncio.create_task(ask(entry.port, "POST", CHAT, sent, body or chat())))
        return self.tasks[-1]

    async def wait(self, rid: str, *headers: Header, at: Member | None = None, body: bytes = b"") -> None:
        """Send one more and see it in line."""
        entry = at or self.member
        count = len(entry.node.room)
        self.send(rid, *headers, at=at, body=body)
        await entry.until(lambda: len(entry.node.room) == count + 1)

    async def order(self) -> list[str]:
        """Let everything through; returns the ids in the order in which the engine got them."""
        self.gate.open(len(self.tasks))
        assert [(await task).status for task in self.tasks] == [200] * len(self.tasks)
        return [received.header("x-request-id")[0] for received in self.member.fake.received[1:]]


async def test_the_more_important_is_served_first(nodes: Cluster) -> None:
    full = await Full(await nodes.add("a", max_running=1)).fill()
    await full.wait("usual")
    await full.wait("low", ("x-request-priority", "7"))
    await full.wait("body", body=chat(priority=-2))
    await full.wait("header wins", ("x-request-priority", "-3"), body=chat(priority=99))
    await full.wait("vllm", ("X-Vllm-Priority", "3"))
    received = await full.order()
    assert [name for name in received if len(name) < 32] == ["body", "usual", "vllm", "low"]
    assert len(received[0]) == 32, "an id with a blank is replaced: it was the first"


@pytest.mark.parametrize("target", ["a", "b"])
async def test_the_engine_hears_the_priority_that_counts(nodes: Cluster, target: str) -> None:
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    sent = (("x-request-priority", "-5"), ("X-Vllm-Priority", "9"), ("x-grapevine-force-target", target))
    body = chat(priority=4)
    assert (await ask(a.port, "POST", CHAT, sent, body)).status == 200
    received = (a if target == "a" else b).fake.received[-1]
    assert received.header("X-Vllm-Priority") == ["-5"] and received.body == body
    assert (await ask(a.port, "POST", CHAT, sent[2:], chat())).status == 200
    assert not (a if target == "a" else b).fake.received[-1].header("X-Vllm-Priority")


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (("x-request-priority", "high"), chat()),
        (("x-request-priority", "1.5"), chat()),
        (("x-request-priority", str(MAX_PRIORITY + 1)), chat()),
        (("X-Vllm-Priority", "-101"), chat()),
        (("x-fine", "1"), chat(priority=10**6)),
        (("x-request-timeout", "soon"), chat()),
        (("x-request-timeout", "0"), chat()),
        (("x-request-timeout", "-1"), chat()),
        (("x-request-timeout", "5s"), chat()),
        (("x-request-timeout", "1e9"), chat()),
        (("x-request-timeout", "86401"), chat()),
    ],
)
async def test_a_value_that_makes_no_sense_is_refused_with_what_is_right(header: Header, body: bytes) -> None:
    async with cluster(1) as nodes:
        answer = await ask(nodes[0].port, "POST", CHAT, (header,), body)
        message = str(error_of(answer)["message"])
        assert answer.status == 400 and "must be a" in message and ("-100" in message or "seconds" in message)
        assert not nodes[0].fake.received


async def test_clients_take_turns_however_many_requests_one_sends(nodes: Cluster) -> None:
    mine, theirs = ("Authorization", "Bearer mine"), ("Authorization", "Bearer theirs")
    a = await nodes.add("a", max_running=1, api_key=("mine", "theirs"))
    full = await Full(a, mine).fill()
    for number in range(4):
        await full.wait(f"mine-{number}", mine)
    await full.wait("theirs", theirs)
    state = json.loads((await ask(a.port, "GET", "/gossip/state")).body)
    (line,) = state["queue"]["lines"]
    assert (line["model"], line["waiting"], line["clients"]) == ("m", 5, 2) and line["oldest_s"] >= 0
    assert "mine" not in json.dumps(state["queue"])
    assert await full.order() == ["mine-0", "theirs", "mine-1", "mine-2", "mine-3"]


def test_clients_without_keys_are_told_apart_by_their_addresses() -> None:
    assert client_of("10.0.0.1") == "10.0.0.1" != client_of("10.0.0.2")
    assert client_of("2001:db8::1") == client_of("2001:db8::2") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == "fe80::/64" and client_of(None) == ""


async def test_the_time_in_line_is_told_and_counted(nodes: Cluster) -> None:
    a, b = await nodes.add("a", max_running=1), await nodes.add("b", models=["other"])
    await nodes.agree()
    full = await Full(a).fill()
    await full.wait("local")
    await full.wait("forwarded", at=b)
    full.gate.open(3)
    holder, local, forwarded = [await task for task in full.tasks]
    assert holder.one("x-grapevine-queued-ms") is None
    for answer in (local, forwarded):
        assert int(answer.one("x-grapevine-queued-ms") or -1) >= 0
    metrics = (await ask(b.port, "GET", "/metrics")).body.decode()
    assert "grapevine_wait_seconds_count 1.0" in metrics


async def test_a_full_queue_gives_way_to_the_more_important(nodes: Cluster) -> None:
    full = await Full(await nodes.add("a", max_running=1, max_queue=1)).fill()
    await full.wait("low", ("x-request-priority", "1"))
    low = full.tasks.pop()
    full.send("high")
    answer = await low
    error = error_of(answer)
    assert answer.status == 429 and error["code"] == "cluster_busy" and "needed for another" in str(error["message"])
    assert int(answer.one("Retry-After") or 0) >= 1
    assert await full.order() == ["high"]


async def test_only_a_full_cluster_says_429(nodes: Cluster) -> None:
    a, b = await nodes.add("a", max_running=1, max_queue=0), await nodes.add("b", max_running=1, max_queue=0)
    await nodes.agree()
    gate = Gate()
    a.fake.script = b.fake.script = fake.hold(gate)
    first = asyncio.create_task(ask(a.port, "POST", CHAT, (("x-grapevine-force-target", "a"),), chat()))
    await a.fake.until(lambda: a.fake.active == 1)
    second = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await b.fake.until(lambda: b.fake.active == 1)
    refused = await ask(a.port, "POST", CHAT, (), chat())
    assert refused.status == 429 and int(refused.one("Retry-After") or 0) >= 1
    gate.open(2)
    assert [(await task).status for task in (first, second)] == [200, 200]


async def test_a_peer_that_seems_full_is_not_asked_and_tried_in_the_end(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row says full and nothing more comes: what is known may be wrong."""
    monkeypatch.setattr(turns, "RETRY_S", 0.05)
    a, b = await nodes.add("a", models=["other"]), await nodes.add("b", max_running=1)
    await nodes.agree()
    full = await Full(b).fill()
    await a.until(lambda: a.node.registry.load("b").active >= 1)
    await full.wait("waits", at=a)
    assert a.node.metrics.retries.labels("busy")._value.get() <= 1
    frozen = a.node.registry.load("b")
    a.node.registry.roster.row = lambda *args, **kwargs: False  # type: ignore[method-assign]
    full.gate.open(2)
    assert (await full.tasks[1]).status == 200
    assert frozen.active >= 1


async def test_one_whose_target_fails_in_its_turn_tries_the_next_at_once(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "RETRY_S", 60.0)
    a = await nodes.add("a", models=["other"])
    b, c = await nodes.add("b", max_running=1), await nodes.add("c", max_running=1)
    await nodes.agree()
    gate = Gate()
    b.fake.script = c.fake.script = fake.hold(gate)
    held = [asyncio.create_task(ask(a.port, "POST", CHAT, (), chat())) for _ in range(2)]
    await b.fake.until(lambda: b.fake.active == 1)
    await c.fake.until(lambda: c.fake.active == 1)
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.until(lambda: len(a.node.room) == 1)
    b.fake.script = fake.reset
    a.node.registry.roster.row = lambda *args, **kwargs: False  # type: ignore[method-assign]
    gate.open(2)
    assert [(await task).status for task in held] == [200, 200]
    c.fake.script = fake.answer_chat
    answer = await waiting
    assert answer.status == 200 and answer.one("x-grapevine-target") == "c"


# --- requests that fit nowhere


async def test_what_fits_no_engine_is_refused_at_once_with_the_numbers(nodes: Cluster) -> None:
    a, b = await nodes.add("a", models=["other"]), await nodes.add("b")
    await nodes.agree()
    cases = {
        "max_tokens": (CHAT, {"messages": [], "max_tokens": 5000}),
        "ids": ("/v1/completions", {"prompt": [1] * 5000}),
        "one of several": ("/v1/completions", {"prompt": [[1], [1] * 5000]}),
        "text": ("/v1/completions", {"prompt": "x" * (4096 * 512 + 512)}),
        "chat": (CHAT, {"messages": [{"role": "user", "content": "x" * (4096 * 512 + 512)}]}),
    }
    for name, (path, fields) in cases.items():
        answer = await ask(a.port, "POST", path, (), json.dumps({"model": "m", **fields}).encode())
        error = error_of(answer)
        assert answer.status == 400 and error["code"] == "context_length_exceeded", name
        assert "4096" in str(error["message"]), name
    assert not b.fake.received


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1] * 4096, "max_tokens": 4096},
        {"prompt": "x" * 400_000},
        {"prompt": [1] * 5000, "truncate_prompt_tokens": 100},
        {"prompt": "hi", "max_tokens": "many"},
    ],
)
async def test_what_might_fit_is_left_to_the_engine(fields: dict[str, object]) -> None:
    async with cluster(1) as nodes:
        body = json.dumps({"model": "m", **fields}).encode()
        assert (await ask(nodes[0].port, "POST", "/v1/completions", (), body)).status == 200
        assert nodes[0].fake.received[-1].body == body
