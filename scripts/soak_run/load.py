"""Clients that keep asking for beginnings of the same documents, at any node, some of them impatient."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from localcluster import LocalCluster

WORDS = ("amber", "birch", "copper", "delta", "elm", "fjord", "granite", "heron", "iris", "jade", "kelp", "larch")
DOCUMENTS = 24
"""More than the pools hold together: blocks are evicted all the time."""
DOCUMENT_WORDS = 900
STEP_WORDS = 90
"""A prompt is a document up to some multiple of this: prefixes of prefixes."""
MOST_TOKENS = 8
FORCED = 0.4
"""Share of requests that must run at a node of their own choice: what makes blocks move."""
CUT = 0.05
"""Share of clients that leave after the first piece of their answer, or before it."""
CUT_AFTER_S = (0.0, 1.0)
AFTER_FAILURE_S = 0.1
"""Pause of a client that was refused: some failures take no time at all, and it would do nothing but fail."""


@dataclass(slots=True)
class Tally:
    """What came of the requests."""

    requests: int = 0
    cut: int = 0
    pulled_blocks: int = 0
    pulls: int = 0
    differ: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Load:
    """`run` asks until it is told to stop. The same prompt must be answered the same, wherever its blocks came from."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession, model: str, rng: random.Random) -> None:
        self._cluster = cluster
        self._session = session
        self._model = model
        self._rng = rng
        self._names = list(cluster.nodes)
        self._answers: dict[tuple[int, int], str] = {}
        self.tally = Tally()

    async def run(self, clients: int, over: Callable[[], bool]) -> None:
        """Ask with so many clients at a time."""

        async def client() -> None:
            while not over():
                await self._ask()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _ask(self) -> None:
        rng = self._rng
        document = min(int(rng.paretovariate(0.8)) - 1, DOCUMENTS - 1)
        steps = rng.randint(1, DOCUMENT_WORDS // STEP_WORDS)
        headers = {"x-grapevine-force-target": rng.choice(self._names)} if rng.random() < FORCED else {}
        patience_s = rng.uniform(*CUT_AFTER_S) if rng.random() < CUT else None
        self.tally.requests += 1
        try:
            async with asyncio.timeout(patience_s):
                text, told = await self._complete(rng.choice(self._names), prompt(document, steps), headers)
        except TimeoutError:
            if patience_s is None:
                self.tally.failures["no answer in time"] += 1
            self.tally.cut += 1
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            self.tally.failures[str(error)[:120] or type(error).__name__] += 1
            await asyncio.sleep(AFTER_FAILURE_S)
        else:
            self._note(document, steps, text, told)

    async def _complete(self, entry: str, text: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        body = {"model": self._model, "prompt": text, "max_tokens": MOST_TOKENS, "temperature": 0}
        url = self._cluster[entry].url + "/v1/completions"
        async with self._session.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:100]}")
            return json.loads(await answer.read())["choices"][0]["text"], answer.headers

    def _note(self, document: int, steps: int, text: str, told: Mapping[str, str]) -> None:
        blocks = int(told.get("x-grapevine-pulled-blocks", "0"))
        self.tally.pulled_blocks += blocks
        self.tally.pulls += blocks > 0
        self.tally.differ += self._answers.setdefault((document, steps), text) != text


def prompt(document: int, steps: int) -> str:
    """The beginning of a document."""
    rng = random.Random(document)
    return " ".join(rng.choice(WORDS) for _ in range(steps * STEP_WORDS))
