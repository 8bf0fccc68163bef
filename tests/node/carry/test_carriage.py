"""Which requests can be carried, and how: the table of docs/http.md, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from node.prompt.carriage import CHAT, COMPLETIONS, GATHER_TOKENS, MAX_GATHERED, Carriage, carriage

GREEDY = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.7}


def of(path: str = CHAT, **fields: Any) -> Carriage:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    found = carriage(path, {"model": "m", "stream": True, **said, **fields})
    assert found is not None
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        GREEDY,
        {"temperature": None, "seed": None, "stop": ["a"], "n": 3, "min_tokens": 4, "top_p": 0.9, "top_k": 5},
        {"repetition_penalty": 1.1, "logit_bias": {"5": 1}, "ignore_eos": True, "stop_token_ids": [2]},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "user": "u", "stream_options": {"include_usage": True}},
        {"temperature": 0, "seed": 5},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_by_tokens(fields: dict[str, Any]) -> None:
    assert of(**fields).tokens == ""


STATE: list[dict[str, Any]] = [
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "auto"},
    {"logprobs": True},
    {"logprobs": 0},
    {"top_logprobs": 1},
    {"prompt_logprobs": 1},
    {"echo": True},
    {"use_beam_search": True},
    {"bad_words": ["x"]},
    {"repetition_detection": {}},
    {"thinking_token_budget": 5},
    {"vllm_xargs": {"a": 1}},
    {"watermarking": True},
    {"ec_transfer_params": {"a": 1}},
    {"a_field_of_tomorrow": False},
    {"best_of": 2},
]


@pytest.mark.parametrize("fields", STATE, ids=lambda fields: next(iter(fields)))
def test_whatever_keeps_state_in_the_engine_is_not_carried_by_tokens(fields: dict[str, Any]) -> None:
    assert next(iter(fields)) in of(**DRAWN, **fields).tokens
    assert not of(**DRAWN, **fields).possible
    assert of(**GREEDY, **fields).again == "" and of(**GREEDY, **fields).possible


def test_a_seed_is_run_again_and_never_gone_on_with() -> None:
    assert "seed" in of(**DRAWN, seed=1).tokens and of(**DRAWN, seed=1).again == ""
    assert "seed" in of(seed=1).tokens  # the engine's default temperature is its own affair
    assert "drawn by chance" in of(**DRAWN).again and "drawn by chance" in of().again
    assert "drawn by chance" in of(temperature=False).again


@pytest.mark.parametrize("prompt", [["a", "b"], ["a"], [[1, 2], [3]], [], None, {"a": 1}])
def test_several_prompts_are_not_carried_by_tokens(prompt: object) -> None:
    assert "prompts" in of(COMPLETIONS, prompt=prompt).tokens


def test_a_prompt_of_ids_and_a_suffix() -> None:
    assert of(COMPLETIONS, prompt=[1, 2]).tokens == "" and of(COMPLETIONS, suffix="").tokens == ""
    assert "suffix" in of(COMPLETIONS, suffix="end").tokens


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "input_audio"}]])
def test_pictures_are_not_carried_by_tokens(content: object) -> None:
    assert "more than text" in of(messages=[{"role": "user", "content": content}]).tokens
    assert "more than text" in of(messages="hi").tokens


def test_only_streams_of_events_that_we_understand() -> None:
    assert carriage(CHAT, {"stream": 1}) is None and carriage(CHAT, {"stream": "true"}) is None
    assert carriage("/v1/responses", {"stream": True}) is None and carriage("/v1/embeddings", {"stream": True}) is None
    assert carriage(CHAT + "/", {"stream": True}) is not None


def test_ids_are_asked_for_unless_the_client_does_or_they_would_change_the_answer() -> None:
    assert of().ask_ids and not of().own_ids
    own = of(return_token_ids=True)
    assert own.own_ids and not own.ask_ids
    assert not of(COMPLETIONS, echo=True).ask_ids
    refused = of(return_token_ids=False)
    assert refused.ask_ids and refused.strip and not of().strip


# --- answers in one piece


def gathered(path: str = CHAT, **fields: Any) -> Carriage | None:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return carriage(path, {"model": "m", **said, **fields})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"max_tokens": None, "stream": None}),
        (CHAT, {"max_tokens": GATHER_TOKENS, "stream": False}),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": GATHER_TOKENS}),
        (COMPLETIONS, {"max_tokens": GATHER_TOKENS, "n": MAX_GATHERED, "stop": ["a"]}),
        (COMPLETIONS, {"max_tokens": GATHER_TOKENS, "prompt": [1, 2], "return_token_ids": True}),
    ],
)
def test_an_answer_that_may_be_long_is_gathered(path: str, fields: dict[str, Any]) -> None:
    found = gathered(path, **fields)
    assert found is not None and found.gathers and found.tokens == ""


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": GATHER_TOKENS - 1}),
        (CHAT, {"max_tokens": 1000, "max_completion_tokens": GATHER_TOKENS - 1}),
        (COMPLETIONS, {}),  # 16
        (COMPLETIONS, {"max_completion_tokens": 1000}),  # a chat's word
        (CHAT, {"stream_options": {"include_usage": True}}),  # the engine refuses it
        (CHAT, {"return_prompt_text": True}),
        (CHAT, {"n": MAX_GATHERED + 1}),
        (CHAT, {"stream": 0}),
        (COMPLETIONS, {"max_tokens": 100, "prompt": ["a", "b"]}),
        (CHAT, {"temperature": 0.5, "seed": 1}),
        *[(CHAT, fields) for fields in STATE],
    ],
)
def test_what_is_short_or_could_not_go_on_is_left_as_it_is(path: str, fields: dict[str, Any]) -> None:
    assert gathered(path, **fields) is None


def test_what_makes_no_stream_must_go_where_a_stream_is_made_of_it() -> None:
    for fields in ({"stream": False}, {"stream": None}, {"stream_options": None}, {"return_token_ids": False}):
        found = gathered(**fields)
        assert found is not None and found.strip
    for fields in ({}, {"return_token_ids": True}):
        found = gathered(**fields)
        assert found is not None and not found.strip
