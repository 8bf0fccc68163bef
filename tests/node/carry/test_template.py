"""Runs of usual events, noted late: the client and the record see what they would event by event."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import RemoteError
from node.relay.carry import record as module
from node.relay.carry.events import cut, read, write
from node.relay.carry.record import Choice, Record
from node.relay.carry.template import learnt, said
from tests.node.carry.building import chat, completion, delta, opening, told

IDS = st.lists(st.integers(0, 99) | st.integers(0, (1 << 32) - 1), max_size=3)
TEXT = st.text(max_size=6) | st.sampled_from(
    ['"token_ids":[1]', '\\"token_ids\\":[1]', "\ud800", '"}},', "\x00\x01\x02", "é"]
)
EVENTS = st.lists(st.tuples(TEXT, IDS), max_size=8)


def taken(record: Record, run: bytes) -> bytes:
    """What the client sees of a run, as a stream's entry takes it."""
    told: list[bytes] = []
    told += map(record.take, cut(record.take_usual(run, told)))
    return b"".join(told)


def outcome(take: Callable[[], bytes]) -> bytes | type[RemoteError]:
    try:
        return take()
    except RemoteError as error:
        return type(error)


def usual(record: Record, run: bytes) -> bytes | None:
    """What the client sees of a run that is taken in one, None of any other."""
    told: list[bytes] = []
    return None if record.take_usual(run, told) else b"".join(told)


def seen(record: Record) -> tuple[Any, ...]:
    def of(choice: Choice) -> tuple[Any, ...]:
        return choice.text.getvalue(), list(choice.ids), choice.length, choice.safe, choice.width, choice.finish_reason

    return record.blind, {index: of(choice) for index, choice in record.choices.items()}, record.tokens, record.begun


@given(EVENTS, EVENTS, st.booleans(), st.booleans(), st.booleans())
def test_a_run_is_noted_as_its_events_are(
    first: list[tuple[str, list[int]]],
    second: list[tuple[str, list[int]]],
    chats: bool,
    own_ids: bool,
    with_ids: bool,
) -> None:
    late, plain = Record(own_ids=own_ids), Record(own_ids=own_ids)
    make = chat if chats else completion
    shown, meant = b"", b""
    for pieces in ([("a", [1])], first, [("b", [2])], second):
        events = [make(text, ids if with_ids else None) for text, ids in pieces]
        shown += taken(late, b"".join(events))
        meant += b"".join(map(plain.take, events))
    assert shown == meant
    assert seen(late) == seen(plain)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("ids", [[5], None])
def test_usual_events_are_taken_in_one(make: Any, ids: list[int] | None) -> None:
    record = Record()
    if make is chat:
        record.take(opening(prompt=[1, 2]))
    record.take(make("a", ids))
    run = b"".join(make(text, ids) for text in ("b", "", 'c"\\', "d\n"))
    assert usual(record, run) == b"".join(make(text, None) for text in ("b", "", 'c"\\', "d\n"))
    assert record.choices[0].text.getvalue() == 'abc"\\d\n'
    assert list(record.choices[0].ids) == ([5] * 5 if ids else [])
    assert record.take(make("e", ids, finish="stop")) == make("e", None, finish="stop")
    assert record.complete and record.choices[0].text.getvalue() == 'abc"\\d\ne'


def test_tokens_that_show_nothing_are_not_safe_to_go_on_behind() -> None:
    record = Record()
    record.take(chat("a", [1]))
    assert usual(record, chat("b", [2, 3]) + chat("", [4]) + chat("", [5, 6])) is not None
    choice = record.choices[0]
    assert (choice.safe, choice.width, len(choice.ids)) == (3, 2, 6)


def test_members_without_a_value_belong_to_the_form() -> None:
    def event(text: str) -> bytes:  # as SGLang writes them
        return delta({"role": None, "content": text, "reasoning_content": None, "tool_calls": None}, None)

    late, plain = Record(), Record()
    late.take(event("a"))
    assert usual(late, event("b") + event("c")) == event("b") + event("c")
    for text in "abc":
        plain.take(event(text))
    assert seen(late) == seen(plain)


USUAL = chat("a", [1])


@pytest.mark.parametrize(
    "event",
    [
        chat("b", [1], finish="stop"),
        chat("b", [1], index=1),
        chat("b", [1], logprobs={"content": [{}]}),
        delta({"content": "b", "role": "assistant"}, [1]),
        USUAL.replace(b"[1]", b"[01]"),
        USUAL.replace(b"[1]", b"[1,]"),
        USUAL.replace(b"[1]", b"[]"),
        USUAL.replace(b"[1]", b"[4294967296]"),
        USUAL.replace(b'"a"', b'"\xff"'),
        USUAL.replace(b'"a"', b'"\\q"'),
        USUAL.replace(b'"a"', b'"a\x01b"'),
        USUAL.replace(b'"a"', b'"a"b"'),
        USUAL.replace(b'"id"', b'"ID"'),
        USUAL[:-1],
        USUAL[1:],
        b": grapevine-move\n\n",
        b"\x00a\x011\x02",
        b"data: [DONE]\n\n",
        told(1, 1),
    ],
)
def test_events_of_any_other_form_are_read_one_by_one(event: bytes) -> None:
    record = Record()
    record.take(USUAL)
    before = seen(record)
    told: list[bytes] = []
    assert record.take_usual(event, told) == event and not told and seen(record) == before
    one_by_one, late = Record(), Record()
    run = USUAL + USUAL + event + USUAL
    assert outcome(lambda: b"".join(map(one_by_one.take, cut(run)))) == outcome(lambda: taken(late, run))
    assert seen(one_by_one) == seen(late)


@pytest.mark.parametrize(
    "event",
    [
        opening(prompt=[1]),
        opening(),
        chat("a", [1], index=1),
        chat("a", [1], finish="length"),
        completion("a", [1], prompt=[1]),
        chat("a", [1], logprobs={"content": []}),
        delta({"reasoning": "a"}, [1]),
        delta({}, [1]),
        told(1, 1),
        write({"content": "a", **(read(chat("a", [1])) or {})}),
        chat("a", [1]).replace(b'"content":"a"', b'"content":"b","content":"a"'),
        b"data: " + json.dumps(read(chat("a", [1]))).encode() + b"\n\n",
    ],
)
def test_nothing_is_learnt_from_an_event_that_says_more(event: bytes) -> None:
    assert learnt(event, read(event) or {}) is None


def test_a_text_that_looks_like_a_form_is_not_taken_for_one() -> None:
    fields = read(chat("a", [1])) or {}
    odd = write({**fields, "system_fingerprint": '"content":"x"', "model": 'm","content":"'})
    form = learnt(odd, read(odd) or {})
    assert form is not None and [list(pair) for pair in said(form.rest(odd) or b"")] == [["a", [1]]]


def test_what_is_kept_unread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LATE", 20)
    record = Record()
    record.take(USUAL)
    for _ in range(50):
        assert usual(record, USUAL) == chat("a", None)
        assert record._late_size <= 20
    assert record.choices[0].text.getvalue() == "a" * 51
    monkeypatch.setattr(module, "MAX_CHARS", 60)
    for _ in range(50):
        usual(record, USUAL)
    assert record.blind and not record._late
    assert usual(record, USUAL) == chat("a", None) and not record._late


def test_nothing_is_noted_behind_the_end() -> None:
    record = Record()
    record.take(USUAL)
    record.take(b"data: [DONE]\n\n")
    assert record.take_usual(USUAL, []) == USUAL and record.choices[0].text.getvalue() == "a"
