"""Sends the requests of a replay when they are due, whatever became of those before, and notes what came back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benches.trace_scale import Shot

#: Seconds after the last arrival that unanswered requests are waited for.
PATIENCE_S = 30.0
_END = b"data: [DONE]\n\n"
#: Seconds for an engine to end what was aborted.
IDLE_LIMIT_S = 10.0
POLL_S = 0.1
_SAMPLE = re.compile(r"^vllm:([a-z_]+)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(slots=True)
class Seen:
    """What became of one request. Seconds of the monotonic clock; `due` is when the trace says that it comes."""

    due: float
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    status: int = 0
    whole: bool = False
    #: The id that the answer has, where whoever answered gives one.
    rid: str = ""

    @property
    def failed(self) -> bool:
        """An error came, or an answer that was not whole. Who was still waiting at the end has not failed."""
        return self.ended > 0 and not self.whole


async def replay(urls: Sequence[str], shots: Sequence[Shot]) -> tuple[list[Seen], float]:
    """Send them to the entries in turn. Ends at the latest `PATIENCE_S` after the last one was due: the time then."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.monotonic() + 0.5
        seen = [Seen(start + shot.at) for shot in shots]
        tasks: list[asyncio.Task[None]] = []
        for number, shot in enumerate(shots):
            await asyncio.sleep(seen[number].due - time.monotonic())
            url = urls[number % len(urls)]
            tasks.append(asyncio.create_task(_send(session, url, shot, seen[number])))
        _, late = await asyncio.wait(tasks, timeout=PATIENCE_S)
        end = time.monotonic()
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen, end


async def _send(session: aiohttp.ClientSession, url: str, shot: Shot, seen: Seen) -> None:
    seen.sent = time.monotonic()
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(f"{url}/v1/completions", data=shot.body, headers=headers) as answer:
            seen.status = answer.status
            seen.rid = answer.headers.get("x-request-id", "")
            last = b""
            async for piece in answer.content.iter_any():
                seen.first = seen.first or time.monotonic()
                last = (last + piece)[-len(_END) :]
            seen.whole = answer.status == 200 and last == _END
    except (aiohttp.ClientError, OSError):
        seen.status = seen.status or -1
    seen.ended = time.monotonic()


async def forget(engines: Sequence[str]) -> None:
    """Empty the prefix caches of the engines, once nothing runs there: every contestant begins with cold ones."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(IDLE_LIMIT_S):
        for url in engines:
            await _idle(session, url)
            async with session.post(f"{url}/reset_prefix_cache") as answer:
                answer.raise_for_status()


async def _idle(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        found = await _sampled(session, url)
        if not found["num_requests_running"] and not found["num_requests_waiting"]:
            return
        await asyncio.sleep(POLL_S)


async def looked_up(engines: Sequence[str]) -> tuple[float, float]:
    """Prompt tokens that the engines have looked for in their caches so far, and found there or in a pool."""
    async with aiohttp.ClientSession() as session:
        found = [await _sampled(session, url) for url in engines]
    asked = sum(one["prefix_cache_queries_total"] for one in found)
    return asked, sum(one["prefix_cache_hits_total"] + one["external_prefix_cache_hits_total"] for one in found)


async def _sampled(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        return {name: float(value) for name, value in _SAMPLE.findall(await answer.text())}


async def decided(nodes: Sequence[str]) -> dict[str, dict[str, object]]:
    """What these nodes say of the requests that came to them, by the id of each: `GET /route/recent`."""
    found: dict[str, dict[str, object]] = {}
    async with aiohttp.ClientSession() as session:
        for url in nodes:
            async with session.get(f"{url}/route/recent") as answer:
                told = await answer.json()
            found.update({decision["rid"]: {"entry": url, **decision} for decision in told["decisions"]})
    return found


async def pulls(nodes: Sequence[str]) -> tuple[float, float]:
    """Bytes of KV that these nodes have pulled, and the seconds of their pulls together."""
    async with aiohttp.ClientSession() as session:
        found = [peer for url in nodes for peer in await _pulled_from(session, url)]
    moved = [peer for peer in found if peer["bytes_s"]]
    return sum(peer["bytes"] for peer in moved), sum(peer["bytes"] / peer["bytes_s"] for peer in moved)


async def _pulled_from(session: aiohttp.ClientSession, url: str) -> list[dict[str, float]]:
    async with session.get(f"{url}/gossip/state") as answer:
        return list((await answer.json())["kv"]["peers"].values())
