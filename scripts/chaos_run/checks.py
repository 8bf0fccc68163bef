"""Is this the right answer, to the byte? For bodies and for streams, that are checked as they come."""

from __future__ import annotations

from typing import Any

import orjson

from chaos_run.asks import Asked


class Wrong(Exception):
    """The answer differs from the right one; the message says where."""


class Broken(Exception):
    """The answer ended early, or with an error: the message says how."""


def check_body(asked: Asked, body: bytes) -> None:
    """Check an answer that was not streamed. Raises `Wrong` or `Broken`."""
    try:
        answer = orjson.loads(body)
        choices = answer["choices"]
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(f"no answer: {body[:200]!r}") from error
    _same("choices", len(choices), len(asked.scripts))
    for choice in choices:
        script = asked.scripts[choice["index"]]
        text = choice["message"]["content"] if asked.chat else choice["text"]
        _same("text", text, script.text)
        _same("finish_reason", choice["finish_reason"], script.finish_reason)
        if asked.token_ids:
            _same("token_ids", choice.get("token_ids"), list(script.tokens))
    _check_usage(asked, answer.get("usage"))


def _check_usage(asked: Asked, usage: Any) -> None:
    told = usage if isinstance(usage, dict) else {}
    _same("usage.prompt_tokens", told.get("prompt_tokens"), asked.prompt_tokens)
    _same("usage.completion_tokens", told.get("completion_tokens"), asked.completion_tokens)
    _same("usage.total_tokens", told.get("total_tokens"), asked.prompt_tokens + asked.completion_tokens)


class StreamCheck:
    """Checks one stream, piece by piece."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._rest = b""
        self._texts = [""] * len(asked.scripts)
        self._tokens: list[list[int]] = [[] for _ in asked.scripts]
        self._ends: list[str | None] = [None] * len(asked.scripts)
        self._roles = [0] * len(asked.scripts)
        self._base: tuple[object, ...] | None = None
        self._usage: Any = None
        self._done = False

    def feed(self, piece: bytes) -> int:
        """Take some bytes; returns the events in them that held text. Raises `Wrong` or `Broken`."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        return sum(self._event(event) for event in events if event)

    def close(self) -> None:
        """The stream is over. Raises `Wrong` or `Broken`."""
        if self._rest:
            raise Broken(f"it ends within an event: {self._rest[:100]!r}")
        if not self._done:
            raise Broken("it ends without [DONE]")
        for index, script in enumerate(self._asked.scripts):
            _same("text", self._texts[index], script.text)
            _same("finish_reason", self._ends[index], script.finish_reason)
            _same("role events", self._roles[index], int(self._asked.chat))
            if self._asked.token_ids:
                _same("token_ids", self._tokens[index], list(script.tokens))
        if self._asked.include_usage:
            _check_usage(self._asked, self._usage)

    def _event(self, event: bytes) -> bool:
        if event.startswith(b":"):
            return False  # a comment: clients pass over it
        if not event.startswith(b"data: ") or self._done:
            raise Wrong(f"not an event, or one after the end: {event[:100]!r}")
        if event == b"data: [DONE]":
            self._done = True
            return False
        try:
            told = orjson.loads(event[6:])
        except ValueError as error:
            raise Wrong(f"an event is no JSON: {event[:100]!r}") from error
        if "error" in told:
            raise Broken(f"error event: {told['error'].get('message')}")
        base = (told["id"], told["created"], told["model"], told["object"])
        self._base = self._base or base
        _same("id, created, model, object", base, self._base)
        if told.get("usage") is not None:
            self._usage = told["usage"]
        return sum(self._choice(choice) for choice in told["choices"]) > 0

    def _choice(self, choice: dict[str, Any]) -> bool:
        index = choice["index"]
        delta = choice["delta"] if self._asked.chat else choice
        text = (delta.get("content") if self._asked.chat else delta.get("text")) or ""
        if "role" in delta:
            self._roles[index] += 1
        if self._ends[index] is not None:
            raise Wrong(f"choice {index} goes on after its end: {text!r}")
        self._texts[index] += text
        self._tokens[index] += choice.get("token_ids") or []
        self._ends[index] = choice["finish_reason"]
        right = self._asked.scripts[index].text
        if not right.startswith(self._texts[index]):
            at = len(self._texts[index]) - len(text)
            raise Wrong(f"text of choice {index} from {at} on: {text!r} instead of {right[at : at + len(text)]!r}")
        return bool(text)


def _same(what: str, got: object, right: object) -> None:
    if got != right:
        raise Wrong(f"{what}: {got!r:.200} instead of {right!r:.200}")
