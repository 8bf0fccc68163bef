"""Events as vLLM writes them, by hand."""

from __future__ import annotations

from typing import Any

from node.relay.carry.events import write

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
TEXT_HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}


def opening(index: int = 0, prompt: list[int] | None = None) -> bytes:
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return write({**HEAD, "choices": [choice], "prompt_token_ids": prompt})


def chat(
    text: str, ids: list[int] | None, *, index: int = 0, finish: str | None = None, stop: object = None, **more: Any
) -> bytes:
    return delta({"content": text}, ids, index=index, finish=finish, stop=stop, **more)


def delta(
    said: dict[str, Any],
    ids: list[int] | None,
    *,
    index: int = 0,
    finish: str | None = None,
    stop: object = None,
    **more: Any,
) -> bytes:
    choice: dict[str, Any] = {"index": index, "delta": said, "logprobs": None, "finish_reason": finish}
    if finish is not None:
        choice["stop_reason"] = stop
    return write({**HEAD, "choices": [{**choice, "token_ids": ids, **more}]})


def completion(
    text: str,
    ids: list[int] | None,
    *,
    index: int = 0,
    finish: str | None = None,
    stop: object = None,
    prompt: list[int] | None = None,
) -> bytes:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    return write({**TEXT_HEAD, "choices": [{**choice, "prompt_token_ids": prompt, "token_ids": ids}]})


def told(prompt: int, completed: int) -> bytes:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completed, "completion_tokens": completed}
    return write({**HEAD, "choices": [], "usage": usage})
