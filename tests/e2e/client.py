"""What the end-to-end tests ask of the cluster, in their words."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from localcluster import LocalCluster

from tests.waiting import PATIENCE_S

ADMIN_TOKEN = "end-to-end"
#: Who names a source of KV blocks has to be an operator.
OPERATOR = {"x-grapevine-admin-token": ADMIN_TOKEN}
NAMES = ("red", "green", "blue")
MODEL = "SmolLM2-135M-Instruct"
WORDS = [
    "anchor",
    "barley",
    "candle",
    "dune",
    "ember",
    "ferry",
    "garden",
    "harbour",
    "island",
    "juniper",
    "kettle",
    "lantern",
    "meadow",
    "needle",
    "orchard",
    "pepper",
    "quarry",
    "river",
    "saddle",
    "timber",
    "umbrella",
    "valley",
    "willow",
    "yarrow",
    "zephyr",
]


@dataclass(slots=True)
class Reply:
    """A finished streamed request; times in seconds since it was sent."""

    status: int
    headers: dict[str, str]
    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def target(self) -> str:
        return self.headers.get("x-grapevine-target", "")

    @property
    def pulled(self) -> int:
        return int(self.headers.get("x-grapevine-pulled-blocks", "0"))

    @property
    def first_token_s(self) -> float:
        return self.times[0]


def prose(seed: int, words: int) -> str:
    """Text that no other test sends; about 1.3 tokens a word."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


class Client:
    """Sends requests to named nodes and reads their state."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession, model: str = MODEL) -> None:
        self.cluster = cluster
        self.session = session
        self.model = model

    async def complete(
        self, entry: str, prompt: str, *, headers: dict[str, str] | None = None, max_tokens: int = 16, **more: object
    ) -> Reply:
        """A greedy streamed completion."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= more
        sent = time.monotonic()
        url = self.cluster[entry].url + "/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            reply = Reply(response.status, {k.lower(): v for k, v in response.headers.items()})
            if response.status != 200:
                reply.error = await response.text()
                return reply
            async for event in events(response):
                if "error" in event:
                    reply.error = json.dumps(event["error"])
                for choice in event.get("choices", []):
                    if choice["text"]:
                        reply.times.append(time.monotonic() - sent)
                        reply.text += choice["text"]
        return reply

    async def get(self, name: str, path: str) -> Any:
        async with self.session.get(self.cluster[name].url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def state(self, name: str) -> dict[str, Any]:
        state = await self.cluster.state(self.session, name)
        assert state is not None, f"{name} does not answer"
        return state

    async def member(self, seen_by: str, name: str) -> dict[str, Any] | None:
        """A member as another node sees it, None when it is not in the view."""
        state = await self.cluster.state(self.session, seen_by)
        members: list[dict[str, Any]] = (state or {}).get("members", [])
        return next((member for member in members if member["name"] == name), None)

    async def metric(self, name: str, metric: str) -> float:
        """Sum over all label sets of a metric at a node, its engine's metrics included.

        A busy engine may miss the deadline that its node gives it, so an answer without the metric is asked again.
        """
        pattern = re.compile(rf"^{re.escape(metric)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", re.MULTILINE)
        values: list[str] = []

        async def shown() -> bool:
            async with self.session.get(self.cluster[name].url + "/metrics") as response:
                values[:] = pattern.findall(await response.text())
            return bool(values)

        await until(shown, PATIENCE_S, f"{name} shows the metric {metric}")
        return sum(float(value) for value in values)

    async def explain(self, entry: str, prompt: str) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
        async with self.session.post(self.cluster[entry].url + "/route/explain", json=body) as response:
            assert response.status == 200, await response.text()
            plan: dict[str, Any] = await response.json()
            return plan

    async def knows_holder(self, entry: str, prompt: str, holder: str) -> None:
        """Until gossip has told `entry` that `holder` has the prompt's prefix, and no longer only promises it."""

        async def told() -> bool:
            explained = await self.explain(entry, prompt)
            return bool(explained["matched_chunks"].get(holder)) and holder not in explained["promised_chunks"]

        await until(told, PATIENCE_S, f"{entry} hears of the prefix on {holder}")

    async def would_pull(self, entry: str, prompt: str, target: str, source: str) -> None:
        """Until `entry` holds a pull from `source` for cheaper than computing the prompt again at `target`."""

        async def cheaper() -> bool:
            candidates = (await self.explain(entry, prompt))["candidates"]
            return any(cost["node"] == target and cost["source"] == source for cost in candidates)

        await until(cheaper, PATIENCE_S, f"{entry} would have {target} pull it from {source}")

    async def would_send(self, entry: str, prompt: str, target: str) -> None:
        """Until `entry` would send the prompt to `target`: prefix heard of, and the last request's load forgotten."""

        async def decided() -> bool:
            return bool((await self.explain(entry, prompt))["plan"]["target"] == target)

        await until(decided, PATIENCE_S, f"{entry} would send it to {target}")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of an event stream."""
    async for raw in response.content:
        line = raw.decode().strip()
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line[5:])


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float, what: str) -> float:
    """Await a condition of a real system by asking again; returns how long it took. Fails with `what` at the limit."""
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > limit_s:
            raise AssertionError(f"not within {limit_s} s: {what}")
        await asyncio.sleep(0.1)
    return time.monotonic() - began
