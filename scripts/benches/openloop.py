"""An open loop: requests come whether or not earlier ones are done, as the clients of a service do.

Each client that is refused waits as long as `Retry-After` says and comes back once, to the same node.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

from benches.emulated_cluster import MODEL

#: Seconds that a client gives one request; far above every answer that comes.
PATIENCE_S = 120.0
#: Words of a prompt, and tokens of an answer: from and to.
PROMPT_WORDS = 40
ANSWER_TOKENS = (16, 48)
TOO_MANY = 429


@dataclass(slots=True)
class Tried:
    """One attempt of one request, times in seconds of the monotonic clock."""

    began: float
    client: str
    status: int = 0
    first: float = 0.0
    ended: float = 0.0
    retry_after_s: int | None = None
    queued_ms: float = 0.0
    again: bool = False

    @property
    def ok(self) -> bool:
        """It was answered whole."""
        return self.status == 200 and self.ended > 0


@dataclass(slots=True)
class Load:
    """Sends requests to nodes in turn and keeps what came of them."""

    session: aiohttp.ClientSession
    urls: list[str]
    rng: random.Random
    tries: list[Tried] = field(default_factory=list)
    _sent: int = 0

    async def offer(self, client: str, rate: float, seconds: float, tasks: set[asyncio.Task[None]]) -> None:
        """Send requests of ``client``, ``rate`` per second at random times, for ``seconds``."""
        end = time.monotonic() + seconds
        at = time.monotonic()
        while (at := at + self.rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            task = asyncio.create_task(self.ask(client))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def ask(self, client: str) -> None:
        """One request; once more when it is refused."""
        self._sent += 1
        url, body = self.urls[self._sent % len(self.urls)], self._body()
        tried = await self._try(client, url, body, again=False)
        if tried.status == TOO_MANY and tried.retry_after_s is not None:
            await asyncio.sleep(tried.ended + tried.retry_after_s - time.monotonic() + self.rng.uniform(0.06, 0.3))
            await self._try(client, url, body, again=True)

    async def closed(self, client: str, seconds: float) -> None:
        """One request after the other for ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._sent += 1
            await self._try(client, self.urls[self._sent % len(self.urls)], self._body(), again=False)

    def _body(self) -> bytes:
        words = " ".join(f"{self.rng.randrange(10_000)}" for _ in range(PROMPT_WORDS))
        tokens = self.rng.randint(*ANSWER_TOKENS)
        return json.dumps(
            {"model": MODEL, "prompt": words, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        ).encode()

    async def _try(self, client: str, url: str, body: bytes, *, again: bool) -> Tried:
        tried = Tried(time.monotonic(), client, again=again)
        self.tries.append(tried)
        headers = {"Authorization": f"Bearer {client}", "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(PATIENCE_S):
                async with self.session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                    last = b""
                    async for piece in answer.content.iter_any():
                        tried.first = tried.first or time.monotonic()
                        last = (last + piece)[-64:]
                    whole = answer.status != 200 or last.endswith(b"data: [DONE]\n\n")
                    tried.status = answer.status if whole else -1
                    tried.queued_ms = float(answer.headers.get("x-grapevine-queued-ms", 0))
                    after = answer.headers.get("Retry-After")
                    tried.retry_after_s = int(after) if after is not None else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            tried.status = -1
        tried.ended = time.monotonic()
        return tried
