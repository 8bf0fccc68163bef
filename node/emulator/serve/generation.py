"""One HTTP request on the engine: its jobs, what has come of them, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from node.emulator.job import Action, Done, Job, Started, Tokens
from node.emulator.serve.asks import Ask
from node.emulator.serve.driver import Driver
from node.emulator.serve.figures import Figures
from node.emulator.serve.frames import Usage
from node.emulator.serve.journal import Journal
from node.emulator.serve.kv_events import KvEvents
from node.emulator.serve.link import EmulatedConnector
from node.emulator.serve.script import Script
from node.emulator.tokens import block_hashes, pack


class Generation:
    """Use as `async with`: leaving aborts what has not ended."""

    def __init__(
        self,
        ask: Ask,
        scripts: list[Script],
        *,
        driver: Driver,
        figures: Figures,
        name: str,
        connector: EmulatedConnector | None = None,
        journal: Journal | None = None,
        kv_events: KvEvents | None = None,
        client_id: str = "",
    ) -> None:
        self._connector = connector
        self._journal = journal
        self._kv_events = kv_events
        self._client_id = client_id
        self.ask = ask
        self.scripts = scripts
        self._driver = driver
        self._figures = figures
        self._rids = [f"{name}-{index}" for index in range(len(scripts))]
        self._begun = driver.now
        self._shown = [0] * len(scripts)
        self._last = self._begun
        self._open = len(scripts)
        self._cached = 0
        #: At most one entry for each token of the answers, whose number is bounded.
        self._events: asyncio.Queue[tuple[int, Action]] = asyncio.Queue()

    async def __aenter__(self) -> Generation:
        if self._journal is not None:
            self._journal.begin(self._client_id)
        size = self._driver.engine.config.block_size
        for index, (rid, script) in enumerate(zip(self._rids, self.scripts, strict=True)):
            prompt = self.ask.prompts[index // self.ask.choices]
            keys = block_hashes(prompt + pack(script.tokens), size, self.ask.cache_salt.encode())
            job = Job(rid, len(prompt) // 4, len(script.tokens), keys)
            if self._connector is not None:
                self._connector.begin(job)
            if self._kv_events is not None:
                self._kv_events.begin(job, prompt + pack(script.tokens))
            self._driver.submit(job, lambda action, index=index: self._events.put_nowait((index, action)))  # type: ignore[misc]
        return self

    async def __aexit__(self, *_: object) -> None:
        for rid in self._rids:
            if self._driver.abort(rid):
                self._figures.aborted += 1
            if self._connector is not None:
                self._connector.end(rid)
        if self._journal is not None:
            self._journal.end(self._client_id)

    async def pieces(self) -> AsyncIterator[tuple[int, int, int]]:
        """Choice, first and last token (exclusive) of what is there, as it comes."""
        while self._open:
            index, action = await self._events.get()
            match action:
                case Started():
                    self._cached += action.cached_tokens + action.external_tokens
                case Tokens():
                    start = self._shown[index]
                    self._shown[index] = start + action.count
                    self._note(action)
                    yield index, start, start + action.count
                case Done():
                    self._open -= 1
                    self._figures.finished[self.scripts[index].finish_reason] += 1
                    if not self._open:
                        self._figures.whole.observe(action.at - self._begun)
                case _:
                    pass

    def _note(self, action: Tokens) -> None:
        if self._journal is not None:
            self._journal.token(self._client_id, action.count)
        seconds = action.at - (self._begun if action.first else self._last)
        self._last = action.at
        (self._figures.ttft if action.first else self._figures.gap).observe(seconds)

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(sum(len(prompt) // 4 for prompt in self.ask.prompts), sum(self._shown), self._cached)
