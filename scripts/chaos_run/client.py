"""The clients: a steady load through whichever nodes are ready, as a load balancer would send it, every answer checked.

Rules
1. Entries are chosen at random among the nodes whose `/readyz` answered 200 a moment ago. A connection that is refused,
   or cannot be made in time, is tried elsewhere: nothing was sent. Nothing else is ever tried again by the client,
   but for two cases.
2. 429 with Retry-After is obeyed, and the request is sent again after that time.
3. The entry was killed: a stream is lost with it, which is counted apart; what was not streamed is sent again, as the
   client cannot have seen a part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import aiohttp

from chaos_run.asks import Asked
from chaos_run.checks import Broken, StreamCheck, Wrong, check_body
from chaos_run.node import ChaosNode

READY_EVERY_S = 0.5
READY_TIMEOUT_S = 1.0
CONNECT_S = 2.0
#: A request that took so long is given up and is an error, seconds.
PATIENCE_S = 150.0
#: A process that was killed may still take a connection for so long, seconds.
DYING_S = 1.0
#: Between two looks for an entry when there is none.
NO_ENTRY_S = 0.2
#: Shorter gaps between two events are not kept, seconds; and the clocks of a journal and ours agree that well.
GAP_S = 0.03
SOON_S = 0.01
#: Sent again at most so often.
MAX_SENDS = 30


class End(enum.Enum):
    """How a request ended for its client."""

    RIGHT = "right"
    WRONG = "wrong"
    ERROR = "error"
    ENTRY_LOST = "entry_lost"


@dataclass(slots=True)
class Sent:
    """One request and what came of it. Times in monotonic seconds."""

    asked: Asked
    begun: float
    end: End = End.RIGHT
    why: str = ""
    entry: str = ""
    first_s: float | None = None
    #: Times between two events with text that were long: when they ended, and how long they were.
    gaps: list[tuple[float, float]] = field(default_factory=list)
    ended: float = 0.0
    sends: int = 0

    def note_gap(self, at: float, gap_s: float) -> None:
        """Two events came so far apart."""
        if gap_s >= GAP_S:
            self.gaps.append((at, gap_s))

    def pause_s(self, resumed: float) -> float:
        """The gap that ended when another engine had computed its first token, at `resumed`; 0 when none was long."""
        return next((gap for at, gap in self.gaps if at >= resumed - SOON_S), 0.0)


class Asks(Protocol):
    """Where requests come from."""

    def next(self) -> Asked:
        """The next one of the steady load."""
        ...

    def long(self) -> Asked:
        """One with a long prompt that shares nothing."""
        ...


@dataclass(slots=True)
class Clients:
    """The load on `nodes`."""

    nodes: Mapping[str, ChaosNode]
    asker: Asks
    rng: Random
    ready: set[str] = field(default_factory=set)
    sent: list[Sent] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def watch_ready(self, session: aiohttp.ClientSession) -> None:
        """Ask every node whether it is ready, for ever."""
        await asyncio.gather(*(self._watch(session, node) for node in self.nodes.values()))

    async def steady(self, session: aiohttp.ClientSession, rate: float, until: float) -> None:
        """Send `rate` requests a second, at random times, until then."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while (due := due + self.rng.expovariate(rate)) < until:
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.send(session, self.asker.next())

    async def closed_loop(self, session: aiohttp.ClientSession, width: int, until: float) -> None:
        """Always have `width` requests under way, until then (monotonic seconds)."""

        async def one_after_the_other() -> None:
            while time.monotonic() < until:
                await self._send(session, self.asker.next(), "")

        await asyncio.gather(*(one_after_the_other() for _ in range(width)))

    def send(self, session: aiohttp.ClientSession, asked: Asked, entry: str = "") -> None:
        """Send one request, first through `entry` when one is given."""
        task = asyncio.get_running_loop().create_task(self._send(session, asked, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self) -> None:
        """Wait for every answer."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _watch(self, session: aiohttp.ClientSession, node: ChaosNode) -> None:
        timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
        while True:
            up = False
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(node.url + "/readyz", timeout=timeout) as answer:
                    up = answer.status == 200
            (self.ready.add if up else self.ready.discard)(node.name)
            await asyncio.sleep(READY_EVERY_S)

    async def _send(self, session: aiohttp.ClientSession, asked: Asked, entry: str) -> None:
        sent = Sent(asked, time.monotonic())
        self.sent.append(sent)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self._once(session, sent, entry):
                    entry = ""
        except TimeoutError:
            sent.end, sent.why = End.ERROR, f"no answer within {PATIENCE_S:.0f} s"
        sent.ended = time.monotonic()

    async def _once(self, session: aiohttp.ClientSession, sent: Sent, entry: str) -> bool:
        """One try; False when another is allowed."""
        node = await self._entry(entry)
        sent.entry, sent.sends, began = node.name, sent.sends + 1, time.monotonic()
        headers = {"x-request-id": sent.asked.rid, "content-type": "application/json"}
        again = False
        try:
            async with session.post(node.url + sent.asked.path, data=sent.asked.body, headers=headers) as answer:
                again = await self._answer(sent, answer)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            self.ready.discard(node.name)
            self.counts["refused_connections"] += 1
            again = True
        except Wrong as error:
            sent.end, sent.why = End.WRONG, str(error)
        except (Broken, aiohttp.ClientError, OSError) as error:
            again = self._broke(sent, node, began, error)
        if again and sent.sends >= MAX_SENDS:
            sent.end, sent.why = End.ERROR, f"sent {MAX_SENDS} times"
            return True
        return not again

    async def _answer(self, sent: Sent, answer: aiohttp.ClientResponse) -> bool:
        if answer.status == 429 and "Retry-After" in answer.headers:
            await answer.read()
            self.counts["told_to_retry"] += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            return True
        if answer.status != 200:
            raise Broken(f"status {answer.status}: {(await answer.text())[:400]}")
        if not sent.asked.stream:
            check_body(sent.asked, await answer.read())
            return False
        check, last = StreamCheck(sent.asked), None
        async for piece in answer.content.iter_any():
            if check.feed(piece):
                now = time.monotonic()
                if last is None:
                    sent.first_s = now - sent.begun
                else:
                    sent.note_gap(now, now - last)
                last = now
        check.close()
        return False

    def _broke(self, sent: Sent, node: ChaosNode, began: float, error: Exception) -> bool:
        if any(death >= began - DYING_S for death in node.deaths):
            self.counts["entries_lost"] += 1
            if not sent.asked.stream:
                return True
            sent.end, sent.why = End.ENTRY_LOST, str(error)
            return False
        sent.end, sent.why = End.ERROR, f"{type(error).__name__}: {error}"
        return False

    async def _entry(self, wanted: str) -> ChaosNode:
        if wanted in self.ready:
            return self.nodes[wanted]
        while not self.ready:  # noqa: ASYNC110 - who becomes ready is asked for, not told
            await asyncio.sleep(NO_ENTRY_S)
        return self.nodes[self.rng.choice(sorted(self.ready))]


def open_session() -> aiohttp.ClientSession:
    """Connections that are used once: one that is idle may be closed by a node that ends, which is no fault of it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
