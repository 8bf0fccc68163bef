"""Going on by tokens and again: bodies, conversion, verification, on events made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import RemoteError
from node.plan import RouteOptions
from node.prompt import parse_request
from node.prompt.carriage import CHAT, COMPLETIONS
from node.relay.attempts import Attempts
from node.relay.call import Call
from node.relay.carry import continuation as go_on
from node.relay.carry.continuation import Asked, CannotCarryError, Strand, asked
from node.relay.carry.convert import Converter, DivergedError
from node.relay.carry.events import DONE, EventSplitter, read
from node.relay.carry.record import EngineError, Record
from node.relay.carry.replay import Replay
from tests.node.carry.building import chat, completion, delta, opening, told

PROMPT = [11, 12, 13]
#: Tokens of an answer whose third and fourth token are one character.
TOKENS: list[tuple[str, int]] = [(" The", 1), (" caf", 2), ("", 3), ("é", 4), (" is", 5), (" shut", 6), (".", 7)]
WHOLE = "".join(text for text, _ in TOKENS)


def ask(path: str = CHAT, **fields: Any) -> Asked:
    return asked(path, {"max_tokens": len(TOKENS), **fields})


def answer(**options: Any) -> list[bytes]:
    """A chat's events."""
    shown = [chat(text, [token]) for text, token in TOKENS[:-1]]
    text, token = TOKENS[-1]
    return [opening(prompt=PROMPT), *shown, chat(text, [token], finish="length"), told(3, len(TOKENS)), DONE]


def rest(keep: int) -> list[bytes]:
    """What the second engine says to prompt and the first `keep` tokens."""
    left = TOKENS[keep:]
    events = [completion(text, [token], prompt=[*PROMPT] if not i else None) for i, (text, token) in enumerate(left)]
    events[-1] = completion(left[-1][0], [left[-1][1]], finish="length")
    usage = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":9,"total_tokens":10,"completion_tokens":1}}\n\n'
    return [*events, usage, DONE]


def carried(record: Record, asks: Asked, *, own_ids: bool = False) -> tuple[Converter, int]:
    found = go_on.strands(record, asks)
    return Converter(record, asks, found, own_ids=own_ids, context=100), found[0].keep


@pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
@pytest.mark.parametrize("own_ids", [False, True])
def test_a_cut_anywhere_gives_the_same_events(cut: int, own_ids: bool) -> None:
    whole, record = Record(own_ids=own_ids), Record(own_ids=own_ids)
    events = answer()
    meant = [whole.take(event) for event in events]
    asks = ask(stream_options={"include_usage": True})
    seen = [record.take(event) for event in events[: 1 + min(cut, len(TOKENS) - 1)]]
    converter, keep = carried(record, asks, own_ids=own_ids)
    assert keep == (cut if cut not in (3, len(TOKENS)) else {3: 2, 7: 6}[cut])
    seen += [converter.take(event) for event in rest(keep)]
    assert converter.done
    if cut == 3 and not own_ids:  # half a character was dropped: its first token comes again, and shows nothing
        del meant[3]
        seen = [event for event in seen if b'"content":""},' not in event or b"role" in event]
        meant = [event for event in meant if b'"content":""},' not in event or b"role" in event]
    if own_ids and cut == 3:
        seen = [event for event in seen if event]
    assert b"".join(seen) == b"".join(meant)


def test_the_body_of_a_continuation() -> None:
    record = Record()
    for event in answer()[:5]:
        record.take(event)
    fields = {
        "model": "m", "messages": [], "max_tokens": 20, "min_tokens": 6, "temperature": 0.5, "top_p": 0.9, "stop": "x",
        "stream_options": {"include_usage": True}, "cache_salt": "s", "n": 1, "add_generation_prompt": True,
    }  # fmt: skip
    asks = asked(CHAT, fields)
    body = json.loads(go_on.body(record, asks, fields, [Strand(0, 4)], context=0))
    assert body == {
        "model": "m", "prompt": [*PROMPT, 1, 2, 3, 4], "max_tokens": 16, "min_tokens": 2, "temperature": 0.5,
        "top_p": 0.9, "stream_options": {"include_usage": True}, "cache_salt": "s", "stream": True,
    }  # fmt: skip


def test_the_limit_of_an_answer() -> None:
    record = Record()
    for event in answer()[:3]:
        record.take(event)
    strand = Strand(0, 2)
    assert go_on.left(record, asked(CHAT, {"max_completion_tokens": 5, "max_tokens": 9}), strand, context=0) == 3
    assert go_on.left(record, asked(COMPLETIONS, {}), strand, context=0) == 14
    assert go_on.left(record, asked(CHAT, {}), strand, context=50) == 50 - 3 - 2
    with pytest.raises(CannotCarryError):
        go_on.left(record, asked(CHAT, {}), strand, context=0)


def test_choices_go_on_with_their_own_numbers_and_limits() -> None:
    record = Record(choices=3)
    asks = ask(n=3, max_tokens=4, stream_options={"include_usage": True})
    for event in (
        opening(0, PROMPT), opening(1, PROMPT), opening(2, PROMPT),
        chat("a", [1], index=0), chat("b", [2], index=1), chat("bb", [3], index=1),
        chat("c", [4], index=2, finish="stop"),
    ):  # fmt: skip
        record.take(event)
    found = go_on.strands(record, asks)
    assert [(strand.index, strand.keep) for strand in found] == [(0, 1), (1, 2)]
    body = json.loads(go_on.body(record, asks, {}, found, context=0))
    assert body["prompt"] == [[*PROMPT, 1], [*PROMPT, 2, 3]] and body["max_tokens"] == 3
    converter = Converter(record, asks, found, own_ids=False, context=0)
    events = [converter.take(completion("x", [9], index=i)) for i in (1, 0, 1, 0, 1, 0)]
    shown = [read(event) for event in events[:4]]
    assert [event and event["choices"][0]["index"] for event in shown] == [1, 0, 1, 0]
    assert shown[2] is not None and shown[2]["choices"][0]["finish_reason"] == "length"
    assert events[4] == b""  # it had its four tokens; the engine goes on with it for the other's sake
    assert converter.done and events[5].endswith(DONE)
    usage = read(EventSplitter().feed(events[5])[1])
    assert usage is not None and usage["usage"]["completion_tokens"] == 4 + 4 + 1


def test_min_tokens_of_several_choices_cannot_be_told_to_one_engine() -> None:
    record = Record(choices=2)
    for index in (0, 1):
        record.take(opening(index, PROMPT))
        record.take(chat("a", [1], index=index))
    with pytest.raises(CannotCarryError, match="min_tokens"):
        go_on.strands(record, ask(n=2, min_tokens=2))
    assert len(go_on.strands(record, ask(n=2, min_tokens=1))) == 2


@pytest.mark.parametrize(
    "event",
    [chat("a", None), delta({"reasoning": "hm"}, [1]), delta({}, [1]), chat("a", [1], logprobs={"content": [{}]})],
)
def test_what_was_shown_beside_the_text_closes_the_way(event: bytes) -> None:
    record = Record()
    record.take(opening(prompt=PROMPT))
    record.take(event)
    with pytest.raises(CannotCarryError):
        go_on.strands(record, ask())
    with pytest.raises(CannotCarryError, match="no token ids"):
        go_on.strands(Record(), ask())


def detokenized(record: Record, asks: Asked, decode: dict[int, str], context: str = "<p>") -> Strand:
    """Settle a record's only strand with a tokenizer that is a table."""
    (strand,) = go_on.strands(record, asks)
    for need in go_on.needed(record, asks, [strand]):
        for _ in range(9):
            tokens = need.tokens[: strand.keep]
            if go_on.settle(strand, record.choices[0], asks, context, context + "".join(decode[t] for t in tokens)):
                break
    return strand


def test_text_that_stop_strings_held_back_is_told_once() -> None:
    asks = ask(stop=["never"])
    record = Record()
    for event in (opening(prompt=PROMPT), chat("", [1]), chat("on", [2]), chat("e t", [3])):
        record.take(event)
    strand = detokenized(record, asks, {1: "one", 2: " tw", 3: "o"[:0] + "o t"})
    assert (strand.keep, strand.held) == (3, "wo t")
    converter = Converter(record, asks, [strand], own_ids=False, context=0)
    shown = b"".join(converter.take(event) for event in (completion("hree", [4]), completion("", [5], finish="stop")))
    texts = [read(event) for event in EventSplitter().feed(shown)]
    assert "".join(e["choices"][0]["delta"]["content"] for e in texts if e and e["choices"]) == "wo three"


def test_a_token_that_ends_in_half_a_character_is_dropped_where_text_lags() -> None:
    asks = ask(stop=["zz"])
    record = Record()
    for event in (opening(prompt=PROMPT), chat("on", [1]), chat("", [2])):
        record.take(event)
    strand = detokenized(record, asks, {1: "one", 2: "\N{REPLACEMENT CHARACTER}"})
    assert (strand.keep, strand.held) == (1, "e")


def test_an_event_of_several_tokens_is_looked_into() -> None:
    record = Record()
    record.take(opening(prompt=PROMPT))
    record.take(chat("a", [1, 2]))
    strand = detokenized(record, ask(), {1: "a", 2: "\N{REPLACEMENT CHARACTER}"})
    assert strand.keep == 1
    with pytest.raises(CannotCarryError, match="text is missing"):
        detokenized(record, ask(), {1: "a", 2: "<special>"})
    with pytest.raises(CannotCarryError, match="another text"):
        detokenized(record, ask(), {1: "b", 2: "c"})


def test_other_ids_than_the_client_has_are_an_error() -> None:
    record = Record(own_ids=True)
    for event in answer()[:4]:  # its last token shows nothing
        record.take(event)
    converter, _ = carried(record, ask(), own_ids=True)
    with pytest.raises(DivergedError):
        converter.take(completion("x", [99]))


@pytest.mark.parametrize(
    "event",
    [b"data: {half\n\n", b'data: {"choices":7}\n\n', completion("a", [1], index=5), b'data: {"choices":[{}]}\n\n'],
)
def test_garbage_of_the_second_engine_is_its_loss(event: bytes) -> None:
    for make in (lambda record: carried(record, ask())[0], Replay):
        record = Record()
        for shown in answer()[:3]:
            record.take(shown)
        translator = make(record)
        with pytest.raises(RemoteError):
            translator.take(event)
            translator.take(DONE)
        with pytest.raises(EngineError):
            translator.take(b'data: {"error":{"message":"x"}}\n\n')


# --- again


def joined(events: list[bytes]) -> dict[str, Any]:
    """What a client has of a stream, however it was cut into events."""
    found: dict[str, Any] = {"text": "", "ids": [], "calls": {}, "logprobs": [], "finish": None, "roles": 0}
    for raw in EventSplitter().feed(b"".join(events)):
        event = read(raw)
        for choice in event["choices"] if event else []:
            said = choice["delta"]
            found["text"] += said.get("content") or ""
            found["roles"] += "role" in said
            found["ids"] += choice.get("token_ids") or []
            found["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            found["finish"] = choice["finish_reason"] or found["finish"]
            for call in said.get("tool_calls") or []:
                known = found["calls"].setdefault(call["index"], {"id": None, "name": "", "arguments": ""})
                known["id"] = call.get("id", known["id"])
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
    return found


def run(cuts: list[int], call_id: str) -> list[bytes]:
    """One run of an answer with text, logprobs and a tool call, cut into events as `cuts` says."""
    text = "Let me see what the weather is like there."
    pieces, start = [], 0
    for cut in [*sorted({cut % len(text) for cut in cuts}), len(text)]:
        pieces.append(text[start:cut])
        start = cut
    events = [opening(prompt=PROMPT)]
    for piece in pieces:
        tokens = [ord(letter) for letter in piece]
        events.append(chat(piece, tokens, logprobs={"content": [{"token": letter} for letter in piece]}))
    arguments = '{"city": "Oslo", "days": 3}'
    first = {"index": 0, "id": call_id, "type": "function", "function": {"name": "weather", "arguments": ""}}
    events.append(delta({"tool_calls": [first], "content": None}, [1]))
    start = 0
    for cut in [*sorted({cut % len(arguments) for cut in cuts}), len(arguments)]:
        part = {"index": 0, "function": {"arguments": arguments[start:cut]}}
        events.append(delta({"tool_calls": [part]}, [2 + start]))
        start = cut
    return [*events, delta({}, [3], finish="tool_calls"), told(3, 60), DONE]


CUTS = st.lists(st.integers(0, 60), max_size=6)


@given(CUTS, st.integers(0, 30))
def test_a_second_run_adds_what_is_missing(cuts: list[int], at: int) -> None:
    """Cut anywhere between two events; the second run draws another id for its tool call."""
    first, second = run(cuts, "one"), run(cuts, "two")
    at = min(at, len(first) - 1)
    record = Record(own_ids=True)
    seen = [record.take(event) for event in first[:at]]
    replay = Replay(record)
    seen += [replay.take(event) for event in second]
    assert replay.done
    called = any(b'"one"' in event for event in first[:at])
    meant = joined(run(cuts, "one" if called else "two"))
    assert joined(seen) == meant


@given(CUTS, CUTS, st.integers(0, 12))
def test_a_second_run_may_be_cut_otherwise(cuts: list[int], others: list[int], at: int) -> None:
    def plain(cuts: list[int]) -> list[bytes]:
        return [event for event in run(cuts, "one") if b'tool_calls":[' not in event]

    first, second = plain(cuts), plain(others)
    record = Record(own_ids=True)
    seen = [record.take(event) for event in first[: min(at, len(first) - 1)]]
    replay = Replay(record)
    seen += [replay.take(event) for event in second]
    assert joined(seen) == joined(first)


def test_a_second_run_that_says_less_or_else_is_an_error() -> None:
    for second in (
        [opening(prompt=PROMPT), chat("The", [1], finish="stop")],
        [opening(prompt=PROMPT), chat(" Them", [1])],
        [opening(prompt=PROMPT), chat(" The", [2])],
        [opening(prompt=PROMPT), chat(" The", [1]), DONE],
    ):
        record = Record()
        for event in answer()[:3]:
            record.take(event)
        replay = Replay(record)
        with pytest.raises(DivergedError):
            for event in second:
                replay.take(event)


def test_a_second_run_can_be_lost_in_its_turn() -> None:
    whole = Record()
    meant = [whole.take(event) for event in answer()]
    record = Record()
    seen = [record.take(event) for event in answer()[:4]]
    for count in (2, 6):
        replay = Replay(record)
        seen += [replay.take(event) for event in answer()[:count]]
    replay = Replay(record)
    seen += [replay.take(event) for event in answer()]
    assert b"".join(seen) == b"".join(meant)


def test_a_target_that_wants_to_be_rid_of_a_request_is_left_out_until_the_next_one_does() -> None:
    parsed = parse_request(CHAT, json.dumps({"model": "m", "messages": [], "stream": True}).encode())
    attempt = Attempts(Call("POST", CHAT, [], parsed, "r", RouteOptions(), 0.0))
    attempt.fail("a", "it broke", reached=True)
    attempt.leave_target("b")
    assert attempt.options(0.0).visited == ("a", "b")
    attempt.leave_target("c")
    assert attempt.options(0.0).visited == ("a", "c") and not attempt.exhausted
