"""An answer that was gathered is the one that the engine would have given in one piece, byte for byte."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from node.relay.carry.events import DONE, EventSplitter, cut, write
from node.relay.carry.record import Record
from node.relay.carry.whole import UnlikeError, whole
from tests.node.carry.building import HEAD, TEXT_HEAD, chat, completion, delta, opening, told

CASES = 300
ALPHABET = 'ab "\\/\n\t\r\x00\x1b\x7f\u00e9\u2028\u4e16\U0001f600<&'
ENDS = (("stop", None), ("stop", "</s>"), ("stop", 2), ("length", None), ("abort", None))


def a_case(rng: Random) -> dict[str, Any]:
    """An answer that any engine could give, and the steps in which it is streamed."""
    choices, steps = [], []
    for index in range(rng.choice((1, 1, 1, 2, 3))):
        pieces = [
            ("".join(rng.choices(ALPHABET, k=rng.randint(0, 6))), [rng.randrange(1 << 17)] * rng.choice((1, 1, 1, 2)))
            for _ in range(rng.randint(1, 12))
        ]
        pieces.insert(rng.randrange(len(pieces)), ("x", [7]))  # not without any text
        finish, stop = rng.choice(ENDS)
        text = "".join(piece for piece, _ in pieces)
        ids = [token for _, tokens in pieces for token in tokens]
        choices.append({"text": text, "ids": ids, "finish_reason": finish, "stop_reason": stop})
        steps.append([[index, piece, tokens, False] for piece, tokens in pieces])
        steps[-1][-1][3] = True
    order = [index for index, own in enumerate(steps) for _ in own]
    rng.shuffle(order)
    metrics = {"time_to_first_token_ms": 1e-05, "tokens_per_second": 12.5, "mean_itl_ms": 1e20, "queue_time_ms": None}
    return {
        "chat": rng.random() < 0.5,
        "id": "cmpl-1",
        "created": rng.randrange(1 << 31),
        "model": rng.choice(("m", "org/m\u00fc")),
        "role": rng.choice(("assistant", "user")),
        "prompt_ids": [rng.randrange(1 << 17) for _ in range(rng.randint(1, 5))],
        "own_ids": rng.random() < 0.3,
        "cached": rng.choice((None, 0, 16)),
        "fingerprint": rng.choice((None, "vllm-0.32.0-tp1")),
        "metrics": rng.choice((None, None, metrics)) if len(choices) == 1 else None,
        "choices": choices,
        "steps": [steps[index].pop(0) for index in order],
    }


def read(events: list[bytes], choices: int, pieces: Random | None = None) -> Record:
    """The record of a stream that comes in any pieces, read as `CarriedStream` does."""
    record, splitter, raw = Record(own_ids=True, choices=choices), EventSplitter(), b"".join(events)
    while raw:
        size = len(raw) if pieces is None else pieces.choice((1, 40, 300, 2000))
        piece, raw = raw[:size], raw[size:]
        run = splitter.run(piece)
        if run is not None:
            run = record.take_usual(run, [])
        for event in splitter.feed(piece) if run is None else cut(run):
            record.take(event)
    return record


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_whatever_is_streamed_gives_what_vllm_s_own_classes_write() -> None:
    rng = Random(5)
    cases = [a_case(rng) for _ in range(CASES)]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.node.carry.vllm_forms"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for case, (events, body) in zip(cases, json.loads(ran.stdout), strict=True):
        stream = [b"data: " + event.encode() + b"\n\n" for event in events] + [DONE]
        record = read(stream, len(case["choices"]), rng)
        assert record.done
        assert whole(record, chat=case["chat"], own_ids=case["own_ids"]).decode() == body


def a_chat(*events: bytes, usage: bytes | None = None) -> Record:
    """The record of a chat with one choice."""
    return read([opening(prompt=[1]), *events, usage or told(1, 1), DONE], 1)


def test_what_a_parser_in_the_engine_has_touched_is_not_put_together() -> None:
    for strange in (
        delta({"reasoning": "hm"}, [3]),
        delta({}, [3]),
        delta({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, [3]),
        delta({"content": "a", "a_member_of_tomorrow": 1}, [3]),
        chat("a", [3], logprobs={"content": []}),
    ):
        with pytest.raises(UnlikeError):
            whole(a_chat(strange, chat("a", [4], finish="stop")), chat=True, own_ids=False)


def test_what_an_answer_lacks_is_not_made_up() -> None:
    ended = chat("a", [4], finish="stop")
    usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
    for record in (
        a_chat(chat("a", [4])),  # without an end
        read([ended, told(1, 1), DONE], 1),  # without a role
        read([opening(), ended, DONE], 1),  # without a usage
        a_chat(chat("", [4], finish="stop")),  # without text
        a_chat(ended, usage=write({**HEAD, "choices": [], "usage": {"prompt_tokens": 1}})),
        a_chat(ended, usage=write({**HEAD, "choices": [], "usage": usage, "a_member_of_tomorrow": 1})),
        a_chat(ended, usage=write({**HEAD, "choices": [], "usage": {**usage, "completion_tokens_details": {"r": 1}}})),
        a_chat(ended, usage=write({**HEAD, "choices": [], "usage": {**usage, "prompt_tokens_details": {"new": 1}}})),
        a_chat(ended, usage=write({**HEAD, "choices": [], "usage": usage, "metrics": 3})),
    ):
        with pytest.raises(UnlikeError):
            whole(record, chat=True, own_ids=False)
    assert whole(a_chat(ended), chat=True, own_ids=False)


def test_a_completion_may_be_empty() -> None:
    usage = write(
        {**TEXT_HEAD, "choices": [], "usage": {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}}
    )
    record = read([completion("", [4], finish="stop", stop="x", prompt=[1]), usage, DONE], 1)
    (choice,) = json.loads(whole(record, chat=False, own_ids=False))["choices"]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("", "x", None)
