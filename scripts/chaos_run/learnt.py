"""Requests to real engines, whose right answers are learnt from a run that nobody disturbs. Greedy."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import aiohttp
import orjson

from chaos_run.asks import MODEL, Asked
from node.emulator.serve.script import Script

#: Prompts that are learnt, each asked as a completion and as a chat.
PROMPTS = 8
TOKENS = 48
WORDS = ("anchor", "barley", "candle", "dune", "ember", "ferry", "garden", "harbour", "island", "kettle", "lantern")


class Learner:
    """An `Asker` after `learn`."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._seed = seed
        self._known: list[Asked] = []
        self._count = 0

    async def learn(self, session: aiohttp.ClientSession, url: str) -> None:
        """Ask everything once. Raises `aiohttp.ClientError` when the cluster does not answer."""
        for number in range(PROMPTS):
            prompt = " ".join(self._rng.choices(WORDS, k=40 + 20 * number))
            for chat in (False, True):
                self._known.append(await self._ask(session, url, prompt, chat=chat))

    def next(self) -> Asked:
        """One of them again, streamed or not."""
        self._count += 1
        known, stream = self._rng.choice(self._known), self._rng.random() < 0.7
        body = orjson.loads(known.body) | {"stream": stream}
        return replace(known, rid=f"chaos-{self._seed}-{self._count:06d}", body=orjson.dumps(body), stream=stream)

    def long(self) -> Asked:
        """There is none whose answer is known."""
        return self.next()

    async def _ask(self, session: aiohttp.ClientSession, url: str, prompt: str, *, chat: bool) -> Asked:
        said: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = orjson.dumps({"model": MODEL, **said, "max_tokens": TOKENS, "temperature": 0})
        path = "/v1/chat/completions" if chat else "/v1/completions"
        async with session.post(url + path, data=body, headers={"content-type": "application/json"}) as answer:
            answer.raise_for_status()
            told = orjson.loads(await answer.read())
        (choice,), usage = told["choices"], told["usage"]
        text = choice["message"]["content"] if chat else choice["text"]
        # The tokens themselves are not known, and never asked for: only how many there are.
        script = Script((0,) * usage["completion_tokens"], (text,), choice["finish_reason"])
        return Asked("", path, body, chat, False, False, False, (script,), usage["prompt_tokens"])
