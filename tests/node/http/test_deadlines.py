"""Times: the client's own, over all hops; the one for a first byte; and what is given back when somebody goes away."""

from __future__ import annotations

import asyncio
import json

import pytest

from node.http import peer
from node.peers import PLAN_HEADER, REFUSED_HEADER
from node.plan import Plan, decode_plan
from node.relay import forward
from node.relay.deadlines import Deadlines
from node.relay.patience import patience
from node.relay.upstream import UpstreamSilentError
from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Cluster, Member
from tests.node.fakes.engine import Gate, Reply
from tests.node.http.bodies import CHAT, chat

HOPS = pytest.mark.parametrize("target", ["a", "b"], ids=["0 hops", "1 hop"])
SOON = ("x-request-timeout", "0.2")


async def pair(nodes: Cluster, **settings: object) -> tuple[Member, Member]:
    a, b = await nodes.add("a", **settings), await nodes.add("b", **settings)
    await nodes.agree()
    return a, b


def to(target: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("x-grapevine-force-target", target), *more)


def error_of(answer: RawAnswer) -> dict[str, object]:
    return dict(json.loads(answer.body)["error"])


def silent_after(*chunks: bytes) -> fake.Script:
    """Answer 200, send ``chunks``, and then nothing for ever."""

    async def script(exchange: fake.Exchange) -> None:
        await exchange.start(Reply(headers=fake.SSE_HEADERS, chunks=(), length=False))
        for chunk in chunks:
            await exchange.write(chunk)
        await asyncio.Event().wait()

    return script


async def nothing_is_held(*members: Member) -> None:
    for member in members:
        node = member.node
        await member.fake.until(lambda member=member: member.fake.active == 0)  # type: ignore[misc]
        await node.admission.idle(10)
        assert node.admission.active == 0 and len(node.room) == 0 and node.meter.active == 0
        assert not node.registry.roster.sends._sends


# --- the client's deadline


@HOPS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_deadline_before_the_first_byte_is_a_504_and_ends_the_work(
    nodes: Cluster, target: str, stream: bool
) -> None:
    a, b = await pair(nodes)
    a.fake.script = b.fake.script = fake.stall
    answer = await ask(a.port, "POST", CHAT, to(target, SOON), chat(stream=stream))
    error = error_of(answer)
    assert answer.status == 504 and error["code"] == "deadline_exceeded" and "0.2 s" in str(error["message"])
    ran = a if target == "a" else b
    await ran.fake.until(lambda: ran.fake.disconnects == 1)
    await nothing_is_held(a, b)
    assert not a.node.registry.describe("b").avoided, "the client was in a hurry, nobody failed"


@HOPS
async def test_a_deadline_in_the_stream_is_an_error_event_and_ends_the_work(nodes: Cluster, target: str) -> None:
    a, b = await pair(nodes)
    a.fake.script = b.fake.script = silent_after(fake.sse("one"))
    answer = await ask(a.port, "POST", CHAT, to(target, SOON), chat(stream=True))
    assert answer.status == 200 and answer.complete and answer.body.startswith(fake.sse("one"))
    last = json.loads(answer.body.strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]
    assert last["code"] == "deadline_exceeded"
    await nothing_is_held(a, b)
    assert a.node.registry.describe("b").circuit is None


async def test_a_deadline_ends_a_stream_that_moves_all_the_time(nodes: Cluster) -> None:
    a = await nodes.add("a")

    async def chatter(exchange: fake.Exchange) -> None:
        await exchange.start(Reply(headers=fake.SSE_HEADERS, chunks=(), length=False))
        while True:
            await exchange.write(fake.sse("more"))
            await asyncio.sleep(0.01)

    a.fake.script = chatter
    async with asyncio.timeout(60):
        answer = await ask(a.port, "POST", CHAT, (SOON,), chat(stream=True))
    assert b"deadline_exceeded" in answer.body
    await nothing_is_held(a)


async def test_a_deadline_in_line_is_a_504(nodes: Cluster) -> None:
    a = await nodes.add("a", max_running=1)
    gate = Gate()
    a.fake.script = fake.hold(gate)
    held = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await a.fake.until(lambda: a.fake.active == 1)
    answer = await ask(a.port, "POST", CHAT, (SOON,), chat())
    assert answer.status == 504 and error_of(answer)["code"] == "deadline_exceeded"
    gate.open()
    assert (await held).status == 200
    await nothing_is_held(a)
    assert "grapevine_denials_total" in a.node.metrics.page().decode()


async def test_the_time_that_is_left_travels_with_the_plan(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = await pair(nodes)
    plans: list[Plan] = []
    call = a.node.client.call

    async def seen(*args: object, plan: str, **more: object) -> object:
        plans.append(decode_plan(plan))
        return await call(*args, plan=plan, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(a.node.client, "call", seen)
    assert (await ask(a.port, "POST", CHAT, to("b", ("x-request-timeout", "60")), chat())).status == 200
    assert (await ask(a.port, "POST", CHAT, to("b"), chat())).status == 200
    assert 59 < plans[0].deadline_s < 60 and plans[1].deadline_s == 0


@pytest.mark.parametrize("stream", [False, True], ids=["before", "after"])
async def test_a_target_ends_its_work_by_itself_when_the_time_is_over(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Its entry is cut off: nobody closes the connection."""
    monkeypatch.setattr(peer, "DEADLINE_SLACK_S", 0.0)
    b = await nodes.add("b")
    b.fake.script = silent_after(fake.sse("one")) if stream else fake.stall
    plan = Plan(rid="r", model="m", entry="a", target="b", hops=1, deadline_s=0.2).header()
    answer = await ask(b.port, "POST", "/peer" + CHAT, ((PLAN_HEADER, plan),), chat(stream=stream))
    if stream:
        assert b"deadline_exceeded" in answer.body
    else:
        assert answer.status == 504 and answer.one(REFUSED_HEADER)
    await nothing_is_held(b)


# --- the first byte


@pytest.mark.parametrize("how", ["never answers", "200 and then nothing"])
async def test_an_engine_that_says_nothing_is_left_and_the_next_one_answers(nodes: Cluster, how: str) -> None:
    a = await nodes.add("a", models=["other"], deadlines=Deadlines(cold_s=0.2))
    b, c = await nodes.add("b"), await nodes.add("c")
    await nodes.agree()
    for member in (b, c):
        member.fake.script = fake.stall if how == "never answers" else silent_after()
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat(stream=True)))
    first, second = await _receiver(b, c)
    second.fake.script = fake.answer_chat
    answer = await waiting
    assert answer.status == 200 and answer.one("x-grapevine-target") == second.name
    await first.fake.until(lambda: first.fake.disconnects == 1)
    await nothing_is_held(b, c)


async def _receiver(one: Member, other: Member) -> tuple[Member, Member]:
    """Who got the request, and who did not."""
    tasks = [asyncio.create_task(m.fake.until(lambda m=m: m.fake.active == 1)) for m in (one, other)]  # type: ignore[misc]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (one, other) if one.fake.active else (other, one)


async def test_the_own_engine_that_says_nothing_is_left_too(nodes: Cluster) -> None:
    a = await nodes.add("a", deadlines=Deadlines(cold_s=0.2))
    a.fake.script = fake.stall
    answer = await ask(a.port, "POST", CHAT, (), chat(stream=True))
    assert answer.status == 503 and "no first byte" in str(error_of(answer)["message"])
    await nothing_is_held(a)


async def test_slow_is_not_dead_a_target_that_shows_life_is_waited_for() -> None:
    """It moves four times and then no more: it is looked at once more and then left."""
    looks = 0

    def moves() -> int:
        nonlocal looks
        looks += 1
        return min(looks, 5)

    with pytest.raises(UpstreamSilentError):
        async with patience(0.01, 60.0, moves):
            await asyncio.Event().wait()
    assert looks == 6


async def test_a_target_of_which_nothing_is_heard_is_left_after_its_time() -> None:
    with pytest.raises(UpstreamSilentError):
        async with patience(0.01, 60.0, lambda: None):
            await asyncio.Event().wait()
    async with patience(60.0, 60.0, lambda: None):
        pass
    with pytest.raises(UpstreamSilentError):
        async with patience(60.0, 0.01, iter(range(10**6)).__next__):
            await asyncio.Event().wait()


async def test_others_that_get_tokens_from_the_same_engine_are_a_sign_of_life(nodes: Cluster) -> None:
    a, b = await nodes.add("a", models=["other"], deadlines=Deadlines(cold_s=0.3)), await nodes.add("b")
    await nodes.agree()
    before = a.node.registry.moves("b")
    assert before is not None
    for _ in range(3):
        assert (await ask(b.port, "POST", CHAT, to("b"), chat(stream=True))).status == 200
    await a.until(lambda: (a.node.registry.moves("b") or 0) > before)


async def test_an_engine_that_fails_its_health_while_it_answers_is_waited_for(nodes: Cluster) -> None:
    """The supervisor hears of every piece: see `test_bytes_of_an_answer_count_as_life` for what it does with it."""
    a, b = await pair(nodes)
    gate = Gate()
    b.fake.healthy = False
    b.fake.script = fake.gated(gate, [fake.sse("one"), fake.DONE])
    waiting = asyncio.create_task(ask(a.port, "POST", CHAT, to("b"), chat(stream=True)))
    await b.fake.until(lambda: b.fake.active == 1)
    load = b.node.vector()
    assert (load.ready, load.running) == (True, 1), "health never touches the counters of load"
    gate.open(2)
    assert (await waiting).body == fake.sse("one") + fake.DONE
    assert b.supervisor.notes >= 1


# --- whoever goes away


@HOPS
async def test_a_client_that_leaves_while_blocks_are_pulled_gives_everything_back(
    nodes: Cluster, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await pair(nodes)
    pulling, gone = asyncio.Event(), asyncio.Event()

    async def pull(*args: object) -> None:
        pulling.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    ran, source = (a, "b") if target == "a" else (b, "a")
    monkeypatch.setattr(ran.node.kv, "begin_pull", pull)
    async with connect("127.0.0.1", a.port) as client:
        await client.send("POST", CHAT, to(target, ("x-grapevine-force-source", source)), chat())
        await asyncio.wait_for(pulling.wait(), 60)
        assert ran.node.admission.active == 1
    await asyncio.wait_for(gone.wait(), 60)
    await nothing_is_held(a, b)
    assert not ran.fake.received


@HOPS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_while_its_prompt_is_computed_gives_everything_back(
    nodes: Cluster, target: str, stream: bool
) -> None:
    a, b = await pair(nodes)
    ran = a if target == "a" else b
    ran.fake.script = fake.stall
    async with connect("127.0.0.1", a.port) as client:
        await client.send("POST", CHAT, to(target), chat(stream=stream))
        await ran.fake.until(lambda: ran.fake.active == 1)
    await ran.fake.until(lambda: ran.fake.disconnects == 1)
    await nothing_is_held(a, b)


async def test_a_client_that_leaves_the_line_while_its_turn_is_tried_passes_the_turn_on(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "ADMITTED_S", 60.0)
    a, b = await nodes.add("a", models=["other"]), await nodes.add("b", max_running=1)
    await nodes.agree()
    gate = Gate()
    b.fake.script = fake.hold(gate)
    held = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
    await b.fake.until(lambda: b.fake.active == 1)
    async with connect("127.0.0.1", a.port) as client:
        await client.send("POST", CHAT, (("X-Request-Id", "leaves"),), chat())
        await a.until(lambda: len(a.node.room) == 1)
        stays = asyncio.create_task(ask(a.port, "POST", CHAT, (), chat()))
        await a.until(lambda: len(a.node.room) == 2)
        gate.open()
        assert (await held).status == 200
        await b.fake.until(lambda: b.fake.active == 1)
    gate.open(2)
    assert (await stays).status == 200
    await nothing_is_held(a, b)


# --- whoever is slow


@HOPS
async def test_a_reader_that_takes_nothing_slows_only_itself(nodes: Cluster, target: str) -> None:
    a, b = await pair(nodes)
    piece, limit, written = b"x" * 65536, 32 << 20, 0
    paused = asyncio.Event()

    async def flood(exchange: fake.Exchange) -> None:
        nonlocal written
        if b"usual" in exchange.received.body:
            await fake.answer_chat(exchange)
            return
        await exchange.start(Reply(headers=(), chunks=(), length=False))
        try:
            while written < limit:
                async with asyncio.timeout(0.5):  # a write that takes this long is one that waits for the reader
                    await exchange.write(piece)
                written += len(piece)
        except TimeoutError:
            paused.set()
        await asyncio.Event().wait()

    ran = a if target == "a" else b
    ran.fake.script = flood
    async with connect("127.0.0.1", a.port) as slow:
        slow.pause()
        await slow.send("POST", CHAT, to(target), chat(stream=True))
        await asyncio.wait_for(paused.wait(), 20)
        assert 0 < written < limit
        for _ in range(20):
            answer = await ask(a.port, "POST", CHAT, to(target), chat(stream=True, user="usual"))
            assert answer.status == 200 and answer.body.endswith(fake.DONE)
    await nothing_is_held(a, b)
