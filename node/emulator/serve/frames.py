"""Answers as vLLM writes them: one JSON body, or server-sent events."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from node.emulator.serve.asks import Ask
from node.emulator.serve.script import Script

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all prompts and answers of one request together."""

    prompt: int
    completion: int
    cached: int

    def as_dict(self) -> dict[str, object]:
        """The field `usage` of a stream, where vLLM leaves out what is null."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def whole(self) -> dict[str, object]:
        """The field `usage` of an answer in one piece."""
        details = {"cached_tokens": self.cached, "created_cache_tokens": None, "multimodal_tokens": None}
        return {**self.as_dict(), "prompt_tokens_details": details, "completion_tokens_details": None}


class Frames:
    """Makes the pieces of one answer. `created` in unix seconds."""

    def __init__(self, ask: Ask, answer_id: str, created: int) -> None:
        self._ask = ask
        self._base: dict[str, object] = {"id": answer_id, "created": created, "model": ask.model}
        self._kind = "chat.completion" if ask.chat else "text_completion"

    def body(self, scripts: Sequence[Script], usage: Usage) -> bytes:
        """The whole answer."""
        choices = [self._choice(index, script) for index, script in enumerate(scripts)]
        whole: dict[str, object] = {"id": self._base["id"], "object": self._kind, **self._base, "choices": choices}
        whole |= {"service_tier": None, "system_fingerprint": None, "usage": usage.whole()}
        if self._ask.chat:
            ids = unpack(self._ask.prompts[0]) if self._ask.return_token_ids else None
            whole |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        whole |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        return orjson.dumps(whole)

    def opening(self, index: int) -> bytes:
        """A chat's first event of a choice, before any token."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        ids = unpack(self._ask.prompts[0]) if self._ask.return_token_ids else None
        return self._event([choice], {"prompt_token_ids": ids, "prompt_text": None})

    def tokens(self, index: int, script: Script, start: int, stop: int) -> bytes:
        """The event of tokens `start` to `stop` of a choice; the last one says why it ends."""
        last = stop == len(script.tokens)
        text = "".join(script.pieces[start:stop])
        choice: dict[str, object] = {"index": index}
        choice |= {"delta": {"content": text}} if self._ask.chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": script.finish_reason if last else None}
        if last or not self._ask.chat:
            choice["stop_reason"] = script.stop_reason if last else None
        asked = self._ask.return_token_ids
        if not self._ask.chat:
            first = asked and start == 0
            choice["prompt_token_ids"] = unpack(self._ask.prompts[index // self._ask.choices]) if first else None
        choice["token_ids"] = list(script.tokens[start:stop]) if asked else None
        return self._event([choice], {})

    def usage(self, usage: Usage) -> bytes:
        """The event with the usage, without a choice."""
        return self._event([], {"usage": usage.as_dict()})

    def _event(self, choices: list[dict[str, object]], extra: dict[str, object]) -> bytes:
        kind = "chat.completion.chunk" if self._ask.chat else self._kind
        base = {"id": self._base["id"], "object": kind, **self._base}
        return b"data: " + orjson.dumps({**base, "choices": choices, **extra}) + b"\n\n"

    def _choice(self, index: int, script: Script) -> dict[str, object]:
        asked = self._ask.return_token_ids
        choice: dict[str, object] = {"index": index}
        choice |= {"message": _message(script.text)} if self._ask.chat else {"text": script.text}
        choice |= {"logprobs": None, "finish_reason": script.finish_reason, "stop_reason": script.stop_reason}
        choice["token_ids"] = list(script.tokens) if asked else None
        if not self._ask.chat:
            prompt = unpack(self._ask.prompts[index // self._ask.choices]) if asked else None
            choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt}
        return {**choice, "routed_experts": None}


def unpack(packed: bytes) -> list[int]:
    """The ids of packed tokens."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def _message(text: str) -> dict[str, object]:
    said: dict[str, object] = {"role": "assistant", "content": text, "refusal": None, "annotations": None}
    return {**said, "audio": None, "function_call": None, "reasoning": None}
