"""Answers in one piece that lose what runs them, on real nodes over emulated engines: nothing of it is to be seen."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from node.plan import RouteOptions
from node.prompt import parse_request
from node.prompt.carriage import GATHER_TOKENS
from node.relay.answer import Relay
from node.relay.call import Call
from node.relay.handover import PeerStream, Running
from tests.node.fakes import faulty
from tests.node.fakes.client import RawAnswer, ask, connect
from tests.node.fakes.cluster import Cluster, Member
from tests.node.fakes.faulty import Fault
from tests.node.http.bodies import CHAT
from tests.node.http.breaking import KINDS, breakable, carried, normal

COMPLETIONS = "/v1/completions"
TOKENS = GATHER_TOKENS
Headers = tuple[tuple[str, str], ...]


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with breakable() as whole:
        yield whole


def body(path: str = CHAT, **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "Tell me a story."}]} if path == CHAT else {"prompt": "A story:"}
    return {"model": "m", **said, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}


async def send(
    nodes: Cluster, target: str, path: str, sent: dict[str, Any], *, entry: str = "a", headers: Headers = ()
) -> RawAnswer:
    port = next(member.port for member in nodes.members if member.name == entry)
    given = (("x-grapevine-force-target", target), ("X-Request-Id", "the-request"), *headers)
    return await ask(port, "POST", path, given, json.dumps(sent).encode())


async def direct(nodes: Cluster, path: str, sent: dict[str, Any]) -> RawAnswer:
    """The answer that the engine gives in one piece."""
    nodes[2].supervisor.form_is_known = False
    answer = await send(nodes, "c", path, sent)
    nodes[2].supervisor.form_is_known = True
    assert answer.status == 200 and not streamed(nodes[2])[-1], answer.body
    return answer


def streamed(member: Member) -> list[bool]:
    """Of each body that its engine was asked with, whether it asks for a stream."""
    return [json.loads(sent).get("stream") is True for _, sent in member.faulty.bodies]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "completion": (COMPLETIONS, {}),
    "said not to be a stream": (CHAT, {"stream": False}),
    "nulls": (CHAT, {"stream": None, "stream_options": None, "return_token_ids": None}),
    "ids not wanted": (COMPLETIONS, {"return_token_ids": False}),
    "two choices": (CHAT, {"n": 2}),
    "three texts": (COMPLETIONS, {"n": 3}),
    "token ids": (CHAT, {"return_token_ids": True}),
    "token ids of texts": (COMPLETIONS, {"return_token_ids": True, "n": 2}),
    "a prompt of ids": (COMPLETIONS, {"prompt": [5, 6, 7, 8]}),
    "min_tokens": (COMPLETIONS, {"min_tokens": 20, "ignore_eos": False, "max_tokens": 200}),
    "its own end": (CHAT, {"max_tokens": None, "ignore_eos": False}),
    "drawn": (CHAT, {"temperature": 0.7}),
    "the other name": (CHAT, {"max_tokens": 3, "max_completion_tokens": TOKENS + 1}),
}


@pytest.mark.parametrize("what", FORMS)
async def test_what_is_gathered_is_what_the_engine_says_in_one_piece(nodes: Cluster, what: str) -> None:
    path, more = FORMS[what]
    whole = await direct(nodes, path, body(path, **more))
    for entry in ("a", "b"):
        answer = await send(nodes, "b", path, body(path, **more), entry=entry)
        assert (answer.status, answer.one("content-type")) == (200, "application/json"), answer.body
        assert normal(answer.body) == normal(whole.body)
        assert answer.one("content-length") == str(len(answer.body)) and answer.one("x-grapevine-target") == "b"
    assert streamed(nodes[1]) == [True, True]
    for member in nodes.members[:2]:
        assert 'grapevine_gathered_answers_total{result="whole"} 1.0' in member.node.metrics.page().decode()
    (noted, *_) = nodes[1].node.metrics.log.recent(0.0)["decisions"]  # type: ignore[misc]
    assert (noted["status"], noted["stream"], noted["rid"]) == (200, False, "the-request")


async def test_a_stop_string_ends_it_where_it_would_have(nodes: Cluster) -> None:
    plain = json.loads((await direct(nodes, COMPLETIONS, body(COMPLETIONS))).body)["choices"][0]["text"]
    for include in (False, True):
        sent = body(COMPLETIONS, stop=[plain[33:41], "zz"], include_stop_str_in_output=include)
        whole = await direct(nodes, COMPLETIONS, sent)
        assert json.loads(whole.body)["choices"][0]["stop_reason"] == plain[33:41]
        for at in (None, 3, 8, 9):
            nodes[1].faulty.faults = [] if at is None else [Fault(at, "reset")]
            assert normal((await send(nodes, "b", COMPLETIONS, sent)).body) == normal(whole.body), (include, at)


@pytest.mark.parametrize("entry", ["a", "b"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_breaks_at_any_event_is_whole_to_the_byte(nodes: Cluster, path: str, entry: str) -> None:
    whole = await direct(nodes, path, body(path))
    events = TOKENS + 2 + (path == CHAT)
    for at in range(1, events):
        kind = KINDS[at % len(KINDS)]
        nodes[1].faulty.faults = [Fault(at, kind)]
        answer = await send(nodes, "b", path, body(path), entry=entry)
        assert answer.status == 200 and normal(answer.body) == normal(whole.body), (at, kind, answer.body)
    assert carried(nodes, entry) == events - 3  # behind the last token nothing is left to be carried


async def test_it_goes_on_with_the_tokens_that_are_there(nodes: Cluster) -> None:
    nodes[1].faulty.faults = [Fault(20, "reset")]
    answer = await send(nodes, "b", CHAT, body())
    assert json.loads(answer.body)["usage"]["completion_tokens"] == TOKENS
    ((path, raw),) = [sent for member in (nodes[0], nodes[2]) for sent in member.faulty.bodies]
    sent = json.loads(raw)
    assert path == COMPLETIONS and sent["max_tokens"] == TOKENS - 19  # 19 of them had come
    assert carried(nodes) == 1


async def test_every_choice_goes_on_from_where_it_was(nodes: Cluster) -> None:
    sent = body(n=2, return_token_ids=True)
    whole = json.loads((await direct(nodes, CHAT, sent)).body)
    nodes[1].faulty.faults = [Fault(40, "reset")]
    answer = json.loads((await send(nodes, "b", CHAT, sent)).body)
    assert [choice["message"] for choice in answer["choices"]] == [choice["message"] for choice in whole["choices"]]
    assert [choice["token_ids"] for choice in answer["choices"]] == [choice["token_ids"] for choice in whole["choices"]]
    assert answer["prompt_token_ids"] == whole["prompt_token_ids"]
    assert nodes[0].faulty.bodies or nodes[2].faulty.bodies[1:]


LEFT: dict[str, tuple[str, dict[str, Any], Headers]] = {
    "short": (CHAT, {"max_tokens": GATHER_TOKENS - 1}, ()),
    "a completion without a limit": (COMPLETIONS, {"max_tokens": None}, ()),
    "logprobs": (CHAT, {"logprobs": True}, ()),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, ()),
    "a seed": (CHAT, {"temperature": 0.5, "seed": 1}, ()),
    "several prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, ()),
    "echo": (COMPLETIONS, {"echo": True}, ()),
    "its rendered prompt": (CHAT, {"return_prompt_text": True}, ()),
    "too many choices": (CHAT, {"n": 65}, ()),
    "a field of tomorrow": (CHAT, {"a_field_of_tomorrow": 1}, ()),
    "the engine's load": (CHAT, {}, (("endpoint-load-metrics-format", "json"),)),
}


@pytest.mark.parametrize("what", LEFT)
async def test_what_is_not_known_to_the_byte_or_short_is_asked_for_as_ever(nodes: Cluster, what: str) -> None:
    path, more, headers = LEFT[what]
    nodes[1].faulty.max_model_len = 4096
    assert (await send(nodes, "b", path, body(path, **more), headers=headers)).status in (200, 400)
    assert streamed(nodes[1]) == [False]
    assert b"return_token_ids" not in nodes[1].faulty.bodies[0][1]


async def test_an_engine_of_another_kind_is_asked_as_ever_and_runs_it_from_its_beginning(nodes: Cluster) -> None:
    """It is the only one left: what was gathered is thrown away, its whole answer is the client's."""
    whole = await direct(nodes, CHAT, body())
    for member in (nodes[0], nodes[2]):
        member.supervisor.form_is_known = False
    nodes[1].faulty.faults = [Fault(1, "reset")]  # before its first token
    answer = await send(nodes, "b", CHAT, body())
    assert normal(answer.body) == normal(whole.body) and answer.status == 200
    assert streamed(nodes[1]) == [True]
    assert [asked for member in (nodes[0], nodes[2]) for asked in streamed(member)][1:] == [False]
    assert carried(nodes) == 1


# --- what fails


def says(monkeypatch: pytest.MonkeyPatch, code: object) -> None:
    """What an engine's error event says from now on."""
    said = {"error": {"message": "no such thing", "type": "BadRequestError", "param": "x", "code": code}}
    monkeypatch.setattr(faulty, "ENGINE_DEAD", b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("at", [0, 1, 9])
async def test_an_engine_s_error_has_its_status_and_its_words(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    says(monkeypatch, 422)
    nodes[1].faulty.faults = [Fault(at, "error")]
    answer = await send(nodes, "b", CHAT, body())
    assert answer.status == 422 and answer.one("content-type") == "application/json"
    assert json.loads(answer.body)["error"]["message"] == "no such thing"
    assert not nodes[0].faulty.bodies and not nodes[2].faulty.bodies  # nobody else would take it


async def test_a_fault_of_the_engine_is_tried_elsewhere_and_keeps_its_status_in_the_end(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, 500)
    for member in nodes.members:
        member.faulty.faults = [Fault(2, "error"), Fault(2, "error")]
    answer = await send(nodes, "b", CHAT, body())
    assert answer.status == 500 and json.loads(answer.body)["error"]["message"] == "no such thing"
    assert [len(member.faulty.bodies) for member in nodes.members] == [1, 1, 1]
    says(monkeypatch, "odd")
    answer = await send(nodes, "b", CHAT, body())
    assert answer.status == 503 and json.loads(answer.body)["error"]["code"] == "no_node_answered"


async def test_without_another_node_it_is_refused_with_the_reason(nodes: Cluster) -> None:
    nodes[0].supervisor.down()
    nodes[2].supervisor.down()
    await nodes[0].until(lambda: nodes[0].node.registry.serving() == ["b"])
    nodes[1].faulty.faults = [Fault(9, "reset")]
    answer = await send(nodes, "b", CHAT, body())
    assert answer.status == 503 and b"no_node_answered" in answer.body and answer.complete


@pytest.mark.parametrize("target", ["a", "b"])
async def test_a_deadline_that_passes_in_the_middle_is_a_504(nodes: Cluster, target: str) -> None:
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(9, "pause")]
    answer = await send(nodes, target, CHAT, body(), headers=(("x-request-timeout", "0.5"),))
    assert answer.status == 504 and json.loads(answer.body)["error"]["code"] == "deadline_exceeded"
    assert json.loads(answer.body)["error"]["param"] == "x-request-timeout"
    await member.faulty.until_quiet()
    page = nodes[0].node.metrics.page().decode()
    assert re.search(r'grapevine_denials_total\{why="deadline"\} 1.0', page)
    assert 'grapevine_requests_total{place="refused",status="504"} 1.0' in page


@pytest.mark.parametrize("target", ["a", "b"])
async def test_a_client_that_goes_away_ends_the_work(nodes: Cluster, target: str) -> None:
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(9, "pause")]
    async with connect("127.0.0.1", nodes[0].port) as client:
        await client.send("POST", CHAT, (("x-grapevine-force-target", target),), json.dumps(body()).encode())
        await member.faulty.until_stalled()
    await member.faulty.until_quiet()
    await asyncio.wait_for(member.node.admission.idle(10), 60)


async def test_what_a_parser_has_touched_is_asked_for_in_one_piece_and_stays_so(nodes: Cluster) -> None:
    whole = await direct(nodes, CHAT, body())
    nodes[1].faulty.rewrite = lambda event: event.replace(b'"delta":{"content"', b'"delta":{"reasoning"')
    nodes[1].faulty.faults = [Fault(20, "pause")]  # it is left as soon as that is seen
    for _ in range(2):
        answer = await send(nodes, "b", CHAT, body())
        assert answer.status == 200 and normal(answer.body) == normal(whole.body)
    assert streamed(nodes[1]) == [True, False, False]
    assert 'grapevine_gathered_answers_total{result="unlike"} 1.0' in nodes[0].node.metrics.page().decode()


# --- silence and hand-over


@pytest.mark.parametrize("target", ["a", "b"])
async def test_an_engine_that_hangs_is_left(nodes: Cluster, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.relay.carry.silence.PATIENCE_MIN_S", 0.3)
    monkeypatch.setattr("node.relay.carry.silence.PATIENCE_MAX_S", 0.3)
    monkeypatch.setattr("node.relay.carry.engine_watch.LOOK_AFTER_S", 0.0)
    whole = await direct(nodes, CHAT, body())
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(9, "stall")]
    answer = await send(nodes, target, CHAT, body())
    assert normal(answer.body) == normal(whole.body)
    assert len(member.supervisor.stalls) == 1 and carried(nodes) == 1


async def test_a_node_that_says_nothing_is_left(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.relay.carry.silence.NODE_S", 0.2)
    monkeypatch.setattr("node.relay.carry.silence.LINK_S", 0.4)
    monkeypatch.setattr("node.relay.answer.ALIVE_EVERY_S", 60.0)
    whole = await direct(nodes, CHAT, body())
    nodes[1].faulty.faults = [Fault(9, "stall")]
    assert normal((await send(nodes, "b", CHAT, body())).body) == normal(whole.body)
    assert nodes[0].node.registry.circuits


@pytest.mark.parametrize("target", ["a", "b"])
async def test_an_answer_that_is_asked_to_move_goes_on_elsewhere(nodes: Cluster, target: str) -> None:
    whole = await direct(nodes, CHAT, body())
    member = nodes["ab".index(target)]
    member.faulty.faults = [Fault(9, "pause")]
    asking = asyncio.create_task(send(nodes, target, CHAT, body()))
    await member.faulty.until_stalled()
    await member.until(lambda: member.node.handovers.running == Running(movable=1, unmovable=0))
    if target == "a":
        member.node.drain(60)
    assert member.node.handovers.move_all() == 1
    answer = await asking
    assert normal(answer.body) == normal(whole.body)
    assert 'cause="moved",result="carried"} 1.0' in nodes[0].node.metrics.page().decode()


def test_what_an_engine_says_in_one_piece_does_not_move() -> None:
    """A peer is asked for what it may gather, and its engine is of another kind: there is nothing to say marks in."""
    call = Call(
        "POST", CHAT, [], parse_request(CHAT, json.dumps(body()).encode()), "r", RouteOptions(), 0.0, carries=True
    )
    for kind, movable in (("application/json", False), ("text/event-stream", True)):
        unused: Any = None
        relay = Relay(unused, unused, [("content-type", kind)], idle_s=1.0, on_piece=len, marked=True)
        assert PeerStream(call, relay).movable is movable


@pytest.mark.parametrize("target", ["a", "b"])
async def test_what_is_not_over_when_its_entry_stops_is_refused_with_the_reason(nodes: Cluster, target: str) -> None:
    member = nodes["ab".index(target)]
    for other in nodes.members:
        if other is not member:
            other.node.admission.max_running = 0
    member.faulty.faults = [Fault(9, "pause")]
    asking = asyncio.create_task(send(nodes, target, CHAT, body()))
    await member.faulty.until_stalled()
    await member.until(lambda: member.node.handovers.running.movable == 1)
    stopping = asyncio.create_task(nodes[0].node.stop())
    nodes[0].node.hurry()
    answer = await asking
    assert answer.status == 503 and "is stopping" in json.loads(answer.body)["error"]["message"]
    await stopping


# --- what it is to the node that runs it


async def test_its_target_measures_it_as_the_stream_that_it_is_there(nodes: Cluster) -> None:
    assert nodes[1].node.reporter.vector().ttft_p95_ms == 0
    await send(nodes, "b", CHAT, body())
    vector = nodes[1].node.reporter.vector()
    assert vector.ttft_p95_ms > 0 and vector.itl_p95_ms > 0


async def test_the_official_client_notices_nothing(nodes: Cluster) -> None:
    client = AsyncOpenAI(base_url=f"{nodes[0].url}/v1", api_key="-", max_retries=0)
    nodes[1].faulty.faults = [Fault(9, "half")]
    sent = body()
    extra = {"ignore_eos": sent.pop("ignore_eos")}
    answer = await client.chat.completions.create(
        **sent, extra_body=extra, extra_headers={"x-grapevine-force-target": "b"}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == TOKENS
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert carried(nodes) == 1
    await client.close()
