"""Streams that lose what runs them, on real nodes over emulated engines: what the client sees is what it would have."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import Cluster, cluster
from tests.node.fakes.faulty import Decodes, Fault, FaultyEngine
from tests.node.http.bodies import CHAT

COMPLETIONS = "/v1/completions"
KINDS = ("reset", "half", "garbage", "no answer", "error", "end")
TOKENS = 12


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    """Three nodes, each with an engine whose streams a test can break. Nothing runs twice, and nothing is left."""
    decodes = Decodes()
    async with cluster() as whole:
        for name in ("a", "b", "c"):
            await whole.add(name, engine=FaultyEngine(whole.folder / f"{name}.fake", decodes=decodes))
        await whole.agree()
        yield whole
        assert not decodes.doubled
        assert not decodes.open
        for member in whole.members:
            assert member.node.admission.active == 0
            assert member.node.handovers.running.movable == member.node.handovers.running.unmovable == 0


def body(path: str, **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "Tell me a story."}]} if path == CHAT else {"prompt": "A story:"}
    fixed = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**said, **fixed, "stream_options": {"include_usage": True}, **more}


def normal(raw: bytes) -> bytes:
    """Without what differs from request to request: the time, and how much was cached."""
    raw = re.sub(rb'"created":\d+', b'"created":0', raw)
    return re.sub(rb',"prompt_tokens_details":\{"cached_tokens":\d+\}', b"", raw)


async def send(
    nodes: Cluster, entry: str, target: str, path: str, sent: dict[str, Any], rid: str = "the-request"
) -> RawAnswer:
    port = next(member.port for member in nodes.members if member.name == entry)
    headers = (("x-grapevine-force-target", target), ("X-Request-Id", rid))
    answer = await ask(port, "POST", path, headers, json.dumps(sent).encode())
    assert answer.status == 200, answer.body
    assert answer.one("x-grapevine-target") == target
    return answer


def events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]


def error(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = events(raw)[-1]["error"]
    return found


def carried(nodes: Cluster, entry: str = "a") -> float:
    member = next(member for member in nodes.members if member.name == entry)
    page = member.node.metrics.page().decode()
    return sum(float(value) for value in re.findall(r'grapevine_carries_total\{[^}]*result="carried"\} (\S+)', page))


@pytest.mark.parametrize("entry", ["a", "b"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_breaks_at_any_event_goes_on_to_the_byte(nodes: Cluster, path: str, entry: str) -> None:
    """Every event of the answer, its opening, usage and end included, in every way that an engine can break."""
    sent = body(path)
    whole = await send(nodes, entry, "c", path, sent)
    assert b'token_ids":[' not in whole.body and whole.body.endswith(b"data: [DONE]\n\n")
    count = whole.body.count(b"\n\n")
    for at in range(1, count):
        kind = KINDS[at % len(KINDS)]
        nodes[1].faulty.faults = [Fault(at, kind)]
        answer = await send(nodes, entry, "b", path, sent)
        assert normal(answer.body) == normal(whole.body), (at, kind)
        assert answer.complete
    assert carried(nodes, entry) >= count - 4


@pytest.mark.parametrize("kind", KINDS)
async def test_every_way_to_break_is_survived(nodes: Cluster, kind: str) -> None:
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    for target in ("a", "b"):
        nodes["ab".index(target)].faulty.faults = [Fault(4, kind, share=0.9)]
        answer = await send(nodes, "a", target, CHAT, body(CHAT))
        assert normal(answer.body) == normal(whole.body)


async def test_pieces_may_split_anywhere(nodes: Cluster) -> None:
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    for size in (1, 7, 100, 251):
        nodes[1].faulty.piece = size
        nodes[1].faulty.faults = [Fault(5, "half")]
        answer = await send(nodes, "a", "b", CHAT, body(CHAT))
        assert normal(answer.body) == normal(whole.body), size
