"""Streams and answers that move to another node, through workers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from node.relay.carry.lost import CAUSES
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.faulty import Decodes, Fault, FaultyEngine
from tests.node.http.bodies import CHAT
from tests.node.workers.nodes import FORCE, complete, front_of, metric, worked
from tests.waiting import until

STORY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@asynccontextmanager
async def carrying() -> AsyncIterator[Cluster]:
    """Three nodes with workers over engines whose streams can be broken. Nothing runs twice, and nothing is left."""
    decodes = Decodes()
    async with worked(0) as nodes:
        for name in "abc":
            engine = FaultyEngine(nodes.folder / f"{name}.fake", decodes=decodes)
            await complete(await nodes.add(name, engine=engine))
        await nodes.agree()
        yield nodes
        for member in nodes.members:
            await until(lambda member=member: not member.node.admission.active)  # type: ignore[misc]
        await until(lambda: not decodes.open)
        assert not decodes.doubled


async def tell(nodes: Cluster, target: str) -> bytes:
    """The story as it comes through the first node from another one."""
    answer = await ask(nodes[0].port, "POST", CHAT, ((FORCE, target),), json.dumps(STORY).encode())
    assert answer.status == 200 and answer.complete
    return without_time(answer.body)


def without_time(raw: bytes) -> bytes:
    return re.sub(rb'"created":\d+|"id":"[^"]*"', b"", raw)


async def test_a_stream_that_breaks_goes_on_elsewhere_to_the_byte() -> None:
    async with carrying() as nodes:
        whole, broken = await tell(nodes, "c"), 0
        for target in "ab":  # the entry's own engine, and a peer's
            for kind in ("reset", "garbage", "error"):
                nodes["abc".index(target)].faulty.faults = [Fault(5, kind)]
                assert await tell(nodes, target) == whole, (target, kind)
                broken += 1
        page = (await ask(nodes[0].port, "GET", "/metrics")).body.decode()
        carried = re.findall(r'grapevine_carries_total\{[^}]*result="carried"\} (\S+)', page)
        assert sum(map(float, carried)) == broken


async def test_an_answer_in_one_piece_is_gathered_carried_and_counted_once() -> None:
    sent = json.dumps({name: value for name, value in STORY.items() if name != "stream"} | {"max_tokens": 40}).encode()
    async with carrying() as nodes:
        answers = []
        for target in "cab":
            if target != "c":
                nodes["abc".index(target)].faulty.faults = [Fault(5, "reset")]
            answer = await ask(nodes[0].port, "POST", CHAT, ((FORCE, target),), sent)
            assert answer.status == 200 and answer.one("x-grapevine-target") == target
            answers.append(re.sub(rb',"prompt_tokens_details":\{[^}]*\}', b"", without_time(answer.body)))
        assert answers[0] == answers[1] == answers[2]
        assert await metric(nodes[0].port, 'grapevine_gathered_answers_total{result="whole"}') == 3
        page = (await ask(nodes[0].port, "GET", "/metrics")).body.decode()
        counted = re.findall(r'grapevine_requests_total\{[^}]*status="200"\} (\S+)', page)
        assert sum(map(float, counted)) == 3


async def test_a_drained_node_moves_the_streams_of_its_workers() -> None:
    """Also those of which the entry's worker does not know yet whether they may."""
    async with carrying() as nodes:
        whole = await tell(nodes, "c")
        for target in "ab":
            member = nodes["abc".index(target)]
            member.faulty.faults = [Fault(5, "stall")]
            telling = asyncio.create_task(tell(nodes, target))
            await member.faulty.until_stalled()
            await until(lambda member=member: member.node.handovers.running.movable == 1)  # type: ignore[misc]
            member.node.drain(60)
            assert await telling == whole
            await until(lambda member=member: member.node.drain_status()["phase"] == "drained")  # type: ignore[misc]
            await member.node.resume()
        page = (await ask(nodes[0].port, "GET", "/metrics")).body
        assert b'cause="moved",result="carried"} 2.0' in page


async def test_only_those_streams_move_that_are_asked_to_and_once_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has to ask first whether a stream may move remembers which one, wherever that runs."""
    for limit in ("PATIENCE_MIN_S", "PATIENCE_MAX_S"):  # else a stream that pauses is carried as one that hangs
        monkeypatch.setattr(f"node.relay.carry.silence.{limit}", 600.0)
    async with carrying() as nodes:
        a, b, _ = nodes.members
        whole = await tell(nodes, "c")
        stay: list[asyncio.Task[bytes]] = []
        go: list[asyncio.Task[bytes]] = []
        for member, telling in ((a, stay), (b, go)):  # of each, one for each worker of their entry
            member.faulty.faults = [Fault(5, "pause"), Fault(5, "pause")]
            for number in (1, 2):
                await front_of(a).settle()
                telling.append(asyncio.create_task(tell(nodes, member.name)))
                await until(lambda: member.node.handovers.running.movable == number)  # noqa: B023
        assert [len(worker.desk) for worker in front_of(a).workers] == [2, 2]
        assert b.node.handovers.move_all() == 2
        assert await asyncio.gather(*go) == [whole] * 2
        a.faulty.resume()
        assert await asyncio.gather(*stay) == [whole] * 2
        assert await metric(a.port, 'grapevine_carries_total{cause="moved",result="carried"}') == 2
        assert (await ask(a.port, "GET", "/metrics")).body.count(b'result="carried"} 0.0') == len(CAUSES) - 1
