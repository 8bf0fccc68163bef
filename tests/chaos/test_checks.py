"""The checkers of answers bite: one byte, one event, one field that is wrong, and they say so."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest
from chaos_run.asks import MODEL, Asked, Asker
from chaos_run.checks import Broken, StreamCheck, Wrong, check_body

from node.emulator.config import preset
from node.emulator.serve.asks import read
from node.emulator.serve.frames import DONE, Frames, Usage
from node.emulator.tokens import Tokenizer

CONFIG = preset("smollm2-cpu")


def asked(fits: Callable[[Asked], bool]) -> Asked:
    """The first request of some seed that fits."""
    asker = Asker(5, CONFIG)
    return next(one for one in (asker.next() for _ in range(500)) if fits(one))


def frames(one: Asked) -> Frames:
    ask = read(one.body, chat=one.chat, config=CONFIG, models=(MODEL,), tokenizer=Tokenizer())
    return Frames(ask, "cmpl-1", 1000)


def events(one: Asked) -> list[bytes]:
    """The stream of an engine that is right."""
    made, sent = frames(one), []
    for index, script in enumerate(one.scripts):
        sent += [made.opening(index)] if one.chat else []
        sent += [made.tokens(index, script, at, at + 1) for at in range(len(script.tokens))]
    if one.include_usage:
        sent.append(made.usage(Usage(one.prompt_tokens, one.completion_tokens, 0)))
    return [*sent, DONE]


def check(one: Asked, sent: list[bytes]) -> None:
    stream = StreamCheck(one)
    for event in sent:
        stream.feed(event)
    stream.close()


KINDS = {
    "completion": lambda one: one.stream and not one.chat and len(one.scripts) == 1,
    "chat with usage": lambda one: one.stream and one.chat and one.include_usage,
    "two choices": lambda one: one.stream and len(one.scripts) == 2,
    "token ids": lambda one: one.stream and one.token_ids,
    "stop string": lambda one: one.stream and any(script.stop_reason for script in one.scripts),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_stream_passes_however_it_is_cut(kind: str) -> None:
    one = asked(KINDS[kind])
    check(one, events(one))
    whole = b"".join(events(one))
    check(one, [whole[at : at + 7] for at in range(0, len(whole), 7)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_a_doubled_and_a_swapped_event_are_noticed(kind: str) -> None:
    one = asked(KINDS[kind])
    sent = events(one)
    middle = len(sent) // 3
    for wrong in (
        sent[:middle] + sent[middle + 1 :],
        [*sent[:middle], sent[middle], *sent[middle:]],
        [*sent[:middle], sent[middle + 1], sent[middle], *sent[middle + 2 :]],
    ):
        with pytest.raises(Wrong):
            check(one, wrong)


def changed(event: bytes, name: str, value: object) -> bytes:
    return b"data: " + orjson.dumps({**orjson.loads(event[6:]), name: value}) + b"\n\n"


def test_one_wrong_letter_is_noticed() -> None:
    one = asked(KINDS["completion"])
    sent = events(one)
    text = one.scripts[0].pieces[3].encode()
    sent[3] = sent[3].replace(text, text[:-1] + (b"x" if text[-1:] != b"x" else b"y"))
    with pytest.raises(Wrong, match="text of choice 0"):
        check(one, sent)


@pytest.mark.parametrize(("name", "value"), [("id", "cmpl-2"), ("created", 1001), ("model", "other")])
def test_a_stream_that_becomes_another_one_is_noticed(name: str, value: object) -> None:
    one = asked(KINDS["completion"])
    sent = events(one)
    sent[5] = changed(sent[5], name, value)
    with pytest.raises(Wrong, match="id, created"):
        check(one, sent)


def test_wrong_usage_is_noticed() -> None:
    one = asked(KINDS["chat with usage"])
    sent = events(one)
    sent[-2] = frames(one).usage(Usage(one.prompt_tokens, one.completion_tokens + 1, 0))
    with pytest.raises(Wrong, match="usage"):
        check(one, sent)


def test_comments_are_passed_over() -> None:
    one = asked(KINDS["completion"])
    sent = events(one)
    check(one, [*sent[:2], b": wait\n\n", *sent[2:]])


def test_a_stream_that_ends_early_or_with_an_error_is_broken_and_not_wrong() -> None:
    one = asked(KINDS["completion"])
    with pytest.raises(Broken, match="without"):
        check(one, events(one)[:-1])
    with pytest.raises(Broken, match="it died"):
        check(one, [*events(one)[:3], b'data: {"error": {"message": "it died"}}\n\n'])


def test_a_body_is_checked_in_all_that_it_says() -> None:
    one = asked(lambda one: not one.stream and not one.chat)
    usage = Usage(one.prompt_tokens, one.completion_tokens, 0)
    right = frames(one).body(one.scripts, usage)
    check_body(one, right)
    for field, value in (("text", "x"), ("finish_reason", "error")):
        answer = orjson.loads(right)
        answer["choices"][0][field] = value
        with pytest.raises(Wrong, match=field):
            check_body(one, orjson.dumps(answer))
    answer = orjson.loads(right)
    answer["usage"]["completion_tokens"] += 1
    with pytest.raises(Wrong, match="completion_tokens"):
        check_body(one, orjson.dumps(answer))
    with pytest.raises(Broken):
        check_body(one, b"<html>")
