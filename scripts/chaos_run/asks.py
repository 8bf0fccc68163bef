"""The requests of a run and the one right answer to each: text, ends and usage, worked out before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import orjson

from node.emulator.config import EngineConfig
from node.emulator.serve.asks import read
from node.emulator.serve.script import Script, write
from node.emulator.tokens import Tokenizer

MODEL = "demo"
#: Texts that many prompts begin with: their KV is worth moving.
DOCUMENTS = 8
DOCUMENT_WORDS = 220
LEAST_TOKENS, MOST_TOKENS = 16, 120
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `rid` is its X-Request-Id."""

    rid: str
    path: str
    body: bytes
    chat: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    scripts: tuple[Script, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Of all choices together."""
        return sum(len(script.tokens) for script in self.scripts)


class Asker:
    """Makes the requests of a seed, one after the other."""

    def __init__(self, seed: int, config: EngineConfig) -> None:
        self._rng = Random(seed)
        self._seed = seed
        self._config = config
        self._tokenizer = Tokenizer()
        self._documents = [self._words(DOCUMENT_WORDS) for _ in range(DOCUMENTS)]
        self._count = 0

    def next(self) -> Asked:
        """The next request of the steady load."""
        rng = self._rng
        chat, stream = rng.random() < 0.4, rng.random() < 0.7
        prompt = rng.choice(self._documents) + self._words(rng.randint(10, 50))
        fields: dict[str, object] = {"max_tokens": rng.randint(LEAST_TOKENS, MOST_TOKENS), "ignore_eos": True}
        if rng.random() < 0.05:
            fields["n"] = 2
        if rng.random() < 0.1:
            fields |= {"temperature": 0.8, "seed": rng.randint(0, 1000)}
        if rng.random() < 0.1:
            fields["return_token_ids"] = True
        if rng.random() < 0.1:
            fields["stop"] = [self._a_stop(prompt, fields, chat=chat)]
        return self._asked(prompt, fields, chat=chat, stream=stream)

    def long(self) -> Asked:
        """A long prompt that shares nothing with any other, and a short answer: it fills caches and pools."""
        return self._asked(self._words(700), {"max_tokens": 4, "ignore_eos": True}, chat=False, stream=False)

    def _asked(self, prompt: str, fields: dict[str, object], *, chat: bool, stream: bool) -> Asked:
        self._count += 1
        usage = stream and self._rng.random() < 0.5
        body = self._body(prompt, fields, chat=chat, stream=stream)
        if usage:
            body["stream_options"] = {"include_usage": True}
        sent = orjson.dumps(body)
        ask = read(sent, chat=chat, config=self._config, models=(MODEL,), tokenizer=self._tokenizer)
        return Asked(
            rid=f"chaos-{self._seed}-{self._count:06d}",
            path="/v1/chat/completions" if chat else "/v1/completions",
            body=sent,
            chat=chat,
            stream=stream,
            include_usage=usage,
            token_ids=ask.return_token_ids,
            scripts=self._scripts(sent, chat=chat),
            prompt_tokens=len(ask.prompts[0]) // 4,
        )

    def _body(self, prompt: str, fields: dict[str, object], *, chat: bool, stream: bool) -> dict[str, object]:
        said: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return {"model": MODEL, **said, **fields, "stream": stream}

    def _scripts(self, body: bytes, *, chat: bool) -> tuple[Script, ...]:
        ask = read(body, chat=chat, config=self._config, models=(MODEL,), tokenizer=self._tokenizer)
        longest = self._config.max_model_len
        return tuple(
            write(ask, ask.prompts[0], choice, max_model_len=longest, tokenizer=self._tokenizer)
            for choice in range(ask.choices)
        )

    def _a_stop(self, prompt: str, fields: dict[str, object], *, chat: bool) -> str:
        """A text across two words somewhere in the answer."""
        body = orjson.dumps(self._body(prompt, fields, chat=chat, stream=False))
        text = self._scripts(body, chat=chat)[0].text
        start = self._rng.randrange(max(1, len(text) - 8))
        return text[start : start + 6] or "never"

    def _words(self, count: int) -> str:
        return "".join(" " + "".join(self._rng.choices(_LETTERS, k=self._rng.randint(2, 8))) for _ in range(count))
