"""Streams that lose what runs them, on real nodes over emulated engines: what the client sees is what it would have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from node.relay.carry import stream as carried_stream
from node.relay.handover import Running
from tests.node.fakes.client import RawAnswer, RawClient, ask, connect
from tests.node.fakes.cluster import Cluster
from tests.node.fakes.faulty import Fault, FaultyEngine
from tests.node.http.bodies import CHAT
from tests.node.http.breaking import KINDS, breakable, carried, normal

COMPLETIONS = "/v1/completions"
TOKENS = 12


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with breakable() as whole:
        yield whole


def body(path: str, **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "Tell me a story."}]} if path == CHAT else {"prompt": "A story:"}
    fixed = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**said, **fixed, "stream_options": {"include_usage": True}, **more}


async def send(nodes: Cluster, entry: str, target: str, path: str, sent: dict[str, Any]) -> RawAnswer:
    port = next(member.port for member in nodes.members if member.name == entry)
    headers = (("x-grapevine-force-target", target), ("X-Request-Id", "the-request"))
    answer = await ask(port, "POST", path, headers, json.dumps(sent).encode())
    assert answer.status == 200, answer.body
    assert answer.one("x-grapevine-target") == target
    return answer


@asynccontextmanager
async def begun(nodes: Cluster, entry: str, target: str, sent: dict[str, Any], count: int) -> AsyncIterator[Begun]:
    """A chat whose client has `count` events; leaves the connection open until its rest is read."""
    port = next(member.port for member in nodes.members if member.name == entry)
    headers = (("x-grapevine-force-target", target), ("X-Request-Id", "the-request"))
    async with connect("127.0.0.1", port) as client:
        await client.send("POST", CHAT, headers, json.dumps(sent).encode())
        assert (await client.head()).status == 200
        answer = Begun(client)
        while answer.body.count(b"\n\n") < count:
            answer.body += await client.chunk()
        yield answer


class Begun:
    def __init__(self, client: RawClient) -> None:
        self.body = b""
        self._client = client

    async def rest(self) -> bytes:
        while piece := await self._client.chunk():
            self.body += piece
        return self.body


def events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]


def error(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = events(raw)[-1]["error"]
    return found


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


# --- stop strings, limits, choices


async def test_a_stop_string_over_any_seam_ends_the_answer_where_it_would_have(nodes: Cluster) -> None:
    plain = await send(nodes, "a", "c", COMPLETIONS, body(COMPLETIONS, max_tokens=20))
    text = "".join(choice["text"] for event in events(plain.body) for choice in event["choices"])
    stop = text[33:41]  # of three tokens
    for include in (False, True):
        sent = body(COMPLETIONS, max_tokens=20, stop=[stop, "zz"], include_stop_str_in_output=include)
        whole = await send(nodes, "a", "c", COMPLETIONS, sent)
        shown = "".join(choice["text"] for event in events(whole.body) for choice in event["choices"])
        assert shown == text[: 41 if include else 33]
        for at in range(1, whole.body.count(b"\n\n")):
            nodes[1].faulty.faults = [Fault(at, "reset")]
            answer = await send(nodes, "a", "b", COMPLETIONS, sent)
            assert normal(answer.body) == normal(whole.body), (include, at)


async def test_min_tokens_is_counted_over_the_seam(nodes: Cluster) -> None:
    plain = await send(nodes, "a", "c", COMPLETIONS, body(COMPLETIONS, max_tokens=20))
    text = "".join(choice["text"] for event in events(plain.body) for choice in event["choices"])
    sent = body(COMPLETIONS, max_tokens=20, min_tokens=6, ignore_eos=False, stop=[text[40:44]])
    whole = await send(nodes, "a", "c", COMPLETIONS, sent)
    for at in (1, 3, 7):
        nodes[1].faulty.faults = [Fault(at, "reset")]
        assert normal((await send(nodes, "a", "b", COMPLETIONS, sent)).body) == normal(whole.body)


async def test_a_chat_without_a_limit_goes_on_to_its_own_end(nodes: Cluster) -> None:
    sent = body(CHAT, ignore_eos=False)
    del sent["max_tokens"]
    whole = await send(nodes, "a", "c", CHAT, sent)
    nodes[1].faulty.faults = [Fault(3, "reset")]
    assert normal((await send(nodes, "a", "b", CHAT, sent)).body) == normal(whole.body)


async def test_every_choice_goes_on_from_where_it_was(nodes: Cluster) -> None:
    sent = body(CHAT, n=3, temperature=0.7, stream_options={"include_usage": True})

    def by_choice(raw: bytes) -> dict[int, str]:
        found: dict[int, str] = {}
        for event in events(raw):
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                found[choice["index"]] = found.get(choice["index"], "") + text
        return found

    whole = await send(nodes, "a", "c", CHAT, sent)
    for at in (22, 28, 34):  # all have begun: a choice of the emulator is its own from its first token on
        nodes[1].faulty.faults = [Fault(at, "reset")]
        answer = await send(nodes, "a", "b", CHAT, sent)
        assert by_choice(answer.body) == by_choice(whole.body), at
        assert events(answer.body)[-1]["usage"]["completion_tokens"] == 3 * TOKENS


async def test_a_client_that_asks_for_token_ids_keeps_them_over_the_seam(nodes: Cluster) -> None:
    sent = body(CHAT, return_token_ids=True)
    whole = await send(nodes, "a", "c", CHAT, sent)
    assert b'"token_ids":[' in whole.body
    nodes[1].faulty.faults = [Fault(5, "reset")]
    assert normal((await send(nodes, "a", "b", CHAT, sent)).body) == normal(whole.body)


# --- again, and not at all


AGAIN: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 0.9, "seed": 7},
    "penalties": {"presence_penalty": 0.5},
    "json": {"response_format": {"type": "json_object"}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "future": {"a_field_of_tomorrow": 1},
}


@pytest.mark.parametrize("what", AGAIN)
async def test_a_second_run_that_says_the_same_goes_on(nodes: Cluster, what: str) -> None:
    sent = body(CHAT, **AGAIN[what])
    whole = await send(nodes, "a", "c", CHAT, sent)
    for at in (1, 4, 9):
        nodes[1].faulty.faults = [Fault(at, "half")]
        assert normal((await send(nodes, "a", "b", CHAT, sent)).body) == normal(whole.body)
    generated = [path for member in nodes.members for path, _ in member.faulty.bodies]
    assert set(generated) == {CHAT}  # nothing went on by tokens


@pytest.mark.parametrize("what", [name for name in AGAIN if name != "seed"])
async def test_what_is_drawn_by_chance_and_has_state_ends_with_an_error_that_says_why(
    nodes: Cluster, what: str
) -> None:
    nodes[1].faulty.faults = [Fault(4, "reset")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT, **(AGAIN[what] | {"temperature": 0.9})))
    told = error(answer.body)
    assert told["code"] == "upstream_failed" and "drawn by chance" in told["message"]
    assert next(iter(AGAIN[what])) in told["message"] and answer.complete
    assert carried(nodes) == 0


async def test_whatever_has_shown_nothing_yet_runs_again(nodes: Cluster) -> None:
    sent = body(CHAT, temperature=0.9, presence_penalty=0.5)
    whole = await send(nodes, "a", "c", CHAT, sent)
    nodes[1].faulty.faults = [Fault(0, "half")]
    assert normal((await send(nodes, "a", "b", CHAT, sent)).body) == normal(whole.body)


async def test_a_second_run_that_says_something_else_is_an_error(nodes: Cluster) -> None:
    def lie(event: bytes) -> bytes:
        return event.replace(b'"content":" ', b'"content":" x')

    for member in (nodes[0], nodes[2]):
        member.faulty.rewrite = lie
    nodes[1].faulty.faults = [Fault(4, "reset")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT, presence_penalty=0.5))
    assert error(answer.body)["code"] == "carry_diverged"


async def test_a_request_that_breaks_engines_does_not_walk_through_the_cluster(nodes: Cluster) -> None:
    await nodes.add("d", engine=FaultyEngine(nodes.folder / "d.fake", decodes=nodes[0].faulty.decodes))
    await nodes.agree()
    for member in nodes.members:
        member.faulty.faults = [Fault(2, "error"), Fault(2, "error")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT))
    assert "as many nodes as may be tried" in error(answer.body)["message"]
    assert sum(len(member.faulty.bodies) for member in nodes.members) == 3


async def test_several_legs_are_lost_one_after_the_other(nodes: Cluster) -> None:
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    nodes[1].faulty.faults = [Fault(4, "reset")]
    nodes[2].faulty.faults = [Fault(3, "half")]
    nodes[0].faulty.faults = [Fault(3, "half")]
    for member in (nodes[0], nodes[2]):
        member.faulty.faults = member.faulty.faults[:1]
    nodes[0].faulty.faults = []
    answer = await send(nodes, "a", "b", CHAT, body(CHAT))
    assert normal(answer.body) == normal(whole.body)


async def test_without_another_node_the_error_says_so(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes[0].supervisor.down()
    nodes[2].supervisor.down()
    await nodes[0].until(lambda: nodes[0].node.registry.serving() == ["b"])
    nodes[1].faulty.faults = [Fault(4, "reset")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT))
    assert error(answer.body)["code"] == "upstream_failed" and answer.complete


# --- silence


@pytest.mark.parametrize("target", ["a", "b"])
async def test_an_engine_that_hangs_is_left(nodes: Cluster, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.relay.carry.silence.PATIENCE_MIN_S", 0.3)
    monkeypatch.setattr("node.relay.carry.silence.PATIENCE_MAX_S", 0.3)
    monkeypatch.setattr("node.relay.carry.engine_watch.LOOK_AFTER_S", 0.0)
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(5, "stall")]
    answer = await send(nodes, "a", target, CHAT, body(CHAT))
    assert normal(answer.body) == normal(whole.body)
    assert len(member.supervisor.stalls) == 1
    assert not nodes[0].node.registry.circuits  # its node said so itself: it is in order


async def test_a_node_that_says_nothing_is_left(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine is not judged, its loop does not turn: as a stopped process."""
    monkeypatch.setattr("node.relay.carry.silence.NODE_S", 0.2)
    monkeypatch.setattr("node.relay.carry.silence.LINK_S", 0.4)
    monkeypatch.setattr("node.relay.answer.ALIVE_EVERY_S", 60.0)
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    nodes[1].faulty.faults = [Fault(5, "stall")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT))
    assert normal(answer.body) == normal(whole.body)
    assert nodes[0].node.registry.circuits


async def test_a_slow_engine_whose_node_lives_is_waited_for(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.relay.carry.silence.NODE_S", 0.3)
    monkeypatch.setattr("node.relay.carry.silence.LINK_S", 0.6)
    monkeypatch.setattr("node.relay.answer.ALIVE_EVERY_S", 0.02)
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    nodes[1].faulty.faults = [Fault(5, "slow")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT))
    assert normal(answer.body) == normal(whole.body)
    assert carried(nodes) == 0


# --- hand-over


@pytest.mark.parametrize("target", ["a", "b"])
async def test_a_stream_that_is_asked_to_move_goes_on_elsewhere(nodes: Cluster, target: str) -> None:
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(5, "stall")]
    async with begun(nodes, "a", target, body(CHAT), 5) as answer:
        assert member.node.handovers.running == Running(movable=1, unmovable=0)
        if target == "a":  # the other one is left out because it asked, whatever its rows say
            member.node.drain(60)
        assert member.node.handovers.move_all() == 1
        assert normal(await answer.rest()) == normal(whole.body)
    assert 'cause="moved",result="carried"} 1.0' in nodes[0].node.metrics.page().decode()
    assert not nodes[0].node.registry.circuits
    assert member.node.admission.active == 0


@pytest.mark.parametrize("target", ["a", "b"])
async def test_what_is_there_is_computed_elsewhere_before_a_stream_moves(nodes: Cluster, target: str) -> None:
    """Its old engine pauses, so that nothing is decoded meanwhile: the tokens are those of the continuation."""
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(8, "pause")]
    async with begun(nodes, "a", target, body(CHAT), 8) as answer:
        assert member.node.handovers.move_all() == 1
        assert b"error" not in await answer.rest()
    (others,) = (other.faulty.bodies for other in nodes.members if other.faulty.bodies and other is not member)
    first, second = (json.loads(sent) for _, sent in others)
    assert first["max_tokens"] == 1 and first["prompt"] == second["prompt"]
    assert events(answer.body)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_stream_is_not_moved_while_nobody_has_a_place_for_it(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.relay.carry.ahead.PLACE_S", 0.05)
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    nodes[1].faulty.faults = [Fault(5, "pause")]
    async with begun(nodes, "a", "b", body(CHAT), 5) as answer:
        for member in nodes.members:
            member.node.admission.max_running = 0 if member is not nodes[1] else 1
        assert nodes[1].node.handovers.move_all() == 1
        await nodes[0].until(lambda: 'denials_total{why="waited"}' in nodes[0].node.metrics.page().decode())
        nodes[1].faulty.resume()
        assert normal(await answer.rest()) == normal(whole.body)
    assert carried(nodes) == 0


@pytest.mark.parametrize("target", ["a", "b"])
async def test_what_is_not_over_when_its_entry_stops_ends_with_an_error_that_says_so(
    nodes: Cluster, target: str
) -> None:
    nodes["ab".index(target)].faulty.faults = [Fault(5, "stall")]
    sent = body(CHAT, temperature=0.9, presence_penalty=0.5)  # not to be moved
    async with begun(nodes, "a", target, sent, 5) as answer:
        stopping = asyncio.create_task(nodes[0].node.stop())
        nodes[0].node.hurry()
        told = error(await answer.rest())
        assert told["code"] == "upstream_failed" and "is stopping" in told["message"]
        await stopping


async def test_a_stream_that_looks_for_another_node_ends_when_its_entry_stops(nodes: Cluster) -> None:
    for member in nodes.members[1:]:
        member.node.admission.max_running = 0
    nodes[0].faulty.faults = [Fault(5, "reset")]
    async with begun(nodes, "a", "a", body(CHAT), 4) as answer:
        await nodes[0].until(lambda: len(nodes[0].node.room) == 1)
        stopping = asyncio.create_task(nodes[0].node.stop())
        nodes[0].node.hurry()
        assert "is stopping" in error(await answer.rest())["message"]
        await stopping


async def test_what_cannot_move_stays_and_ends_where_it_is(nodes: Cluster) -> None:
    sent = body(CHAT, temperature=0.9, presence_penalty=0.5)
    whole = await send(nodes, "a", "c", CHAT, sent)
    nodes[1].faulty.faults = [Fault(5, "pause")]
    async with begun(nodes, "a", "b", sent, 5) as answer:
        assert nodes[1].node.handovers.running == Running(movable=0, unmovable=1)
        assert nodes[1].node.handovers.move_all() == 0
        nodes[1].faulty.resume()
        assert normal(await answer.rest()) == normal(whole.body)


@pytest.mark.parametrize("target", ["a", "b"])
async def test_a_stream_is_not_moved_when_nobody_else_could_run_it(nodes: Cluster, target: str) -> None:
    member = nodes["ab".index(target)]
    for other in nodes.members:
        if other is not member:
            other.supervisor.down()
    await nodes[0].until(lambda: nodes[0].node.registry.serving() == [target])
    member.faulty.faults = [Fault(5, "pause")]
    async with begun(nodes, "a", target, body(CHAT), 5) as answer:
        assert member.node.handovers.move_all() == (target == "b")  # a peer asks, and its entry says nothing
        member.faulty.resume()
        assert "error" not in events(await answer.rest())[-1]
    assert carried(nodes) == 0


# --- clients


async def test_the_official_client_notices_nothing(nodes: Cluster) -> None:
    client = AsyncOpenAI(base_url=f"{nodes[0].url}/v1", api_key="-", max_retries=0)
    headers = {"x-grapevine-force-target": "b"}
    for path in (CHAT, COMPLETIONS):
        create: Any = client.chat.completions.create if path == CHAT else client.completions.create
        texts = []
        for fault in (None, Fault(6, "half")):
            nodes[1].faulty.faults = [fault]
            sent = body(path)
            extra = {"ignore_eos": sent.pop("ignore_eos")}
            stream = await create(**sent, extra_body=extra, extra_headers=headers)
            chunks = [chunk async for chunk in stream]
            assert len({chunk.id for chunk in chunks}) == 1 and chunks[-1].usage.completion_tokens == TOKENS
            choices = [choice for chunk in chunks for choice in chunk.choices]
            texts.append("".join((c.delta.content or "") if path == CHAT else c.text for c in choices))
        assert texts[0] == texts[1] and texts[0]
    await client.close()


async def test_a_client_that_goes_away_while_the_next_node_is_looked_for_leaves_nothing(nodes: Cluster) -> None:
    for member in (nodes[0], nodes[2]):
        member.faulty.faults = [Fault(0, "stall")]
    nodes[1].faulty.faults = [Fault(5, "reset")]
    async with connect("127.0.0.1", nodes[0].port) as client:
        headers = (("x-grapevine-force-target", "b"),)
        await client.send("POST", CHAT, headers, json.dumps(body(CHAT)).encode())
        head = await client.head()
        assert head.status == 200
        await asyncio.wait(
            [asyncio.ensure_future(member.faulty.until_stalled()) for member in (nodes[0], nodes[2])],
            return_when=asyncio.FIRST_COMPLETED,
        )
    for member in nodes.members:
        await asyncio.wait_for(member.node.admission.idle(10), 60)
        await member.faulty.until_quiet()


async def test_a_long_search_keeps_the_client_s_connection_alive(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried_stream, "COMMENT_EVERY_S", 0.02)
    whole = await send(nodes, "a", "c", CHAT, body(CHAT))
    for member in (nodes[0], nodes[2]):
        member.faulty.faults = [Fault(0, "slow")]
    nodes[1].faulty.faults = [Fault(5, "reset")]
    answer = await send(nodes, "a", "b", CHAT, body(CHAT))
    assert carried_stream.COMMENT in answer.body
    assert normal(answer.body.replace(carried_stream.COMMENT, b"")) == normal(whole.body)


# --- answers in one piece


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_in_one_piece_that_breaks_within_runs_again_elsewhere(nodes: Cluster, path: str) -> None:
    """Part of its body had come when its engine died: its client never saw it."""
    sent = {key: value for key, value in body(path).items() if key not in ("stream", "stream_options")}
    whole = await ask(nodes[2].port, "POST", path, (("X-Request-Id", "the-request"),), json.dumps(sent).encode())
    for member in nodes.members:
        member.faulty.cut_bodies = 1
    answer = await ask(nodes[0].port, "POST", path, (("X-Request-Id", "the-request"),), json.dumps(sent).encode())
    assert answer.status == 503 and b"no_node_answered" in answer.body  # each of them broke one
    for member in nodes.members[:2]:
        member.faulty.cut_bodies = 1
    for member in nodes.members:
        member.node.registry.circuits = type(member.node.registry.circuits)()
    answer = await ask(nodes[0].port, "POST", path, (("X-Request-Id", "the-request"),), json.dumps(sent).encode())
    assert answer.status == 200 and answer.complete
    assert normal(answer.body) == normal(whole.body)
