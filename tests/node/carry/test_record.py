"""What is noted of an answer, and what its client sees of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import RemoteError
from node.relay.carry import record as module
from node.relay.carry.events import DONE, read, write
from node.relay.carry.record import EngineError, Record
from tests.node.carry.building import HEAD, chat, completion, delta, opening, told

IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=4)
TEXT = st.text(max_size=8) | st.sampled_from(['"token_ids":[1]', '\\"token_ids\\":[1]', '"prompt_token_ids":[', "]}"])


@given(st.lists(st.tuples(TEXT, IDS), max_size=8), st.booleans(), IDS)
def test_the_client_sees_what_it_would_without_our_ids(
    pieces: list[tuple[str, list[int]]], chats: bool, prompt: list[int]
) -> None:
    record, plain = Record(), Record()
    make = chat if chats else completion
    seen = record.take(opening(prompt=prompt)) if chats else b""
    meant = opening(prompt=None) if chats else b""
    for text, ids in pieces:
        seen += record.take(make(text, ids))
        meant += make(text, None)
        plain.take(make(text, None))
    assert seen == meant
    if pieces:
        choice = record.choices[0]
        assert choice.text.getvalue() == "".join(text for text, _ in pieces)
        assert list(choice.ids) == [token for _, ids in pieces for token in ids]


def test_a_client_that_asked_itself_keeps_its_ids() -> None:
    record = Record(own_ids=True)
    event = chat("a", [1])
    assert record.take(event) is event and record.take(opening(prompt=[1, 2])) == opening(prompt=[1, 2])
    assert list(record.prompt_ids or ()) == [1, 2]


def test_ids_that_are_spelt_with_blanks_are_hidden_as_well() -> None:
    record = Record()
    fields = read(chat("a", [1, 2]))
    spaced = b"data: " + json.dumps(fields).encode() + b"\n\n"
    assert record.take(spaced) == chat("a", None)
    fields = read(opening(prompt=[7]))
    assert b"7" not in record.take(b"data: " + json.dumps(fields).encode() + b"\n\n")


def test_events_that_exist_only_for_the_ids_are_not_shown() -> None:
    record = Record()
    assert record.take(delta({}, [5])) == b""
    assert record.take(delta({}, [6], finish="stop")) == delta({}, None, finish="stop")
    assert list(record.choices[0].ids) == [5, 6]


def test_what_the_client_has_is_what_counts_as_begun() -> None:
    record, own = Record(), Record(own_ids=True)
    for event in (opening(prompt=[1]), chat("", [2]), delta({}, [3])):
        record.take(event)
        own.take(event)
    assert not record.begun and own.begun and record.choices[0].parsed
    record.forget()
    assert not record.choices[0].ids and not record.choices[0].parsed
    record.take(chat("a", [4]))
    assert record.begun


def test_streams_beside_the_text_are_noted_by_name() -> None:
    record = Record()
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}
    record.take(delta({"role": "assistant", "content": ""}, None))
    record.take(delta({"reasoning": "hm", "content": None}, [1]))
    record.take(delta({"tool_calls": [call], "content": None}, [2]))
    record.take(delta({"content": None, "tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, [3]))
    others = {name: stream.getvalue() for name, stream in record.choices[0].others.items()}
    assert others == {"reasoning": "hm", "name 0": "f", "arguments 0": '{"a"'}
    assert not record.blind and record.begun


@pytest.mark.parametrize("field", ["annotations", "audio"])
def test_fields_that_are_not_known_make_it_blind(field: str) -> None:
    record = Record()
    event = delta({"content": "a", field: [1]}, None)
    assert record.take(event) == event and record.blind


def test_the_safe_point_is_behind_the_last_token_whose_text_was_shown() -> None:
    record = Record()
    for text, ids in (("a", [1]), ("", [2]), ("é", [3]), ("", [4]), ("", [5])):
        record.take(chat(text, ids))
    assert (record.choices[0].safe, record.choices[0].width, len(record.choices[0].ids)) == (3, 1, 5)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 3)
    record = Record()
    for token in range(5):
        assert record.take(chat("a", [token])) == chat("a", None)
    assert record.blind and not record.choices[0].ids
    monkeypatch.setattr(module, "MAX_CHOICES", 2)
    with pytest.raises(RemoteError):
        Record().note(read(chat("a", [1], index=2)) or {})


def test_the_end_is_known() -> None:
    record = Record(choices=2)
    record.take(chat("a", [1], finish="stop"))
    assert not record.complete
    record.take(chat("a", [1], index=1, finish="length"))
    assert record.complete and not record.done and not record.usage
    record.take(told(3, 2))
    assert record.take(DONE) == DONE and record.done and record.usage


def test_an_error_event_is_an_error() -> None:
    with pytest.raises(EngineError) as caught:
        Record().take(write({"error": {"message": "it died", "code": "upstream_stalled"}}))
    assert (str(caught.value), caught.value.code) == ("it died", "upstream_stalled")
    with pytest.raises(EngineError):
        Record().take(write({"error": "it died"}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["index", "delta", "text", "content", "token_ids", "logprobs", "tool_calls", "function"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["choices", "error", "usage", "prompt_token_ids", "id"]), JSON, max_size=4))
def test_garbage_is_a_remote_error_and_nothing_else(fields: dict[str, Any]) -> None:
    for first in (b"", chat("a", [1])):
        record = Record()
        if first:
            record.take(first)
        try:
            record.take(write({**HEAD, **fields}))
        except RemoteError:
            continue
