"""The target's side of the transfer: gets the blocks of a chain from a peer into our pool.

Promises:
1. A block is committed only if its bytes have the digest that the source took when the block was stored.
2. What counts is the prefix that is here in the end. One source gives its blocks in chain order, and the first bad or
   missing one ends its part; several share the chain from the front on (`split`).
3. `pull` returns within its deadline, and never raises for anything that a peer or the network does.
4. The event loop only waits: all I/O is in a bounded number of threads, data goes from the socket to shared memory.
5. One source, however slow, leaves a thread to the others, and does not hold up a pull that others can end.

One pull is `pull`, and who is asked in it `crew`; this has the threads, what is shared between pulls, and the counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from . import messages
from .crew import Crew
from .dialer import Dialer
from .handshake import Secrets
from .neighbour import Neighbours
from .pool import BlockPool
from .pull import MAX_SOURCES, Means, Pull
from .pull_types import PullResult, Reason, Source
from .transport import Deadline
from .turns import Turns
from .warm import Warming, WarmResult

#: Deadline of the event loop's side beyond the thread's: for handing the result over.
_GRACE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of a puller; times in seconds."""

    threads: int = 4  #: pulls at a time
    per_source: int = 3  #: of them from one source; fewer than `threads`
    helpers: int = 8  #: further sources at a time, of all pulls together: each has a thread, and mostly waits
    waiting: int = 16  #: pulls at a time and in the queue
    connect_s: float = 1.0  #: dial and handshake
    lookup_s: float = 1.0
    stall_s: float = 2.0  #: no byte for that long
    window_bytes: int = 32 << 20  #: of one FETCH; two are under way, and as much is thrown away after a bad block


@dataclass(frozen=True, slots=True, kw_only=True)
class PullerStats:
    """Counters since the start; `by_reason` counts how pulls ended."""

    running: int
    blocks: int
    bytes: int
    corrupt: int
    joined: int  #: pulls that shared another one's work
    shared: int  #: pulls to which several sources gave blocks
    taken_over: int  #: blocks that one source was asked for after another one had not brought them
    by_reason: dict[str, int]


class Puller:
    """Pull blocks from peers into a pool.

    `secret` is the cluster key, or several of them, `label` the cluster's name, `name` our own. `describe` gives the
    readable fields of our fingerprint. `same_host` False: blocks of peers on this host come over TCP too. `encrypt`:
    over TLS or not at all (what is read on the same host crosses no network). Use it from one event loop.
    """

    def __init__(
        self,
        pool: BlockPool,
        secret: Secrets,
        label: str,
        *,
        name: str = "",
        limits: PullLimits | None = None,
        describe: Callable[[], dict[str, str | int]] = dict,
        same_host: bool = True,
        encrypt: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._limits = limits or PullLimits()
        self._clock = clock
        self._dialer = Dialer(label, name, secret, self._limits.connect_s, encrypt=encrypt)
        self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="kv-pull")
        self._helpers = ThreadPoolExecutor(self._limits.helpers, thread_name_prefix="kv-help")
        self._helping = 0
        self._describe = describe
        self._neighbours = Neighbours(pool.path) if same_host else None
        self._flights: dict[tuple[int, ...], asyncio.Task[PullResult]] = {}
        self._warming: set[asyncio.Future[WarmResult]] = set()
        self._turns = Turns(self._limits.per_source)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._closed = False

    def rekey(self, secret: Secrets) -> None:
        """Prove these keys on new connections; warm ones go on."""
        self._dialer.rekey(secret)

    async def pull(
        self, sources: str | Sequence[Source], chunks: Sequence[int], deadline_s: float, *, tag: str = ""
    ) -> PullResult:
        """Get the blocks of a chain of chunk hashes from a source, or from several at once where that pays (`crew`).

        The first one is asked first. A string is one source by its address ("host:port"). Returns within `deadline_s`
        seconds. A second pull of the same chain waits for the first one's result. Sources are told `tag`, at most
        `MAX_TAG` characters.
        """
        started = self._clock()
        asked = [Source(sources)] if isinstance(sources, str) else list(sources)
        if not asked:
            return self._ended(PullResult(0, 0, 0.0, Reason.NOTHING))
        chain = tuple(chunks[: messages.MAX_CHUNKS])
        flight = self._flights.get(chain)
        joined = flight is not None
        if flight is not None:
            with self._lock:
                self._counts["joined"] += 1
        elif self._closed or len(self._flights) >= self._limits.waiting:
            return self._ended(PullResult(0, 0, 0.0, Reason.BUSY))
        else:
            flight = self._launch(asked, chain, Deadline(self._clock, deadline_s, self._limits.stall_s), tag)
        try:
            # shielded: when this caller goes away, the blocks are still worth having
            result = await asyncio.wait_for(asyncio.shield(flight), deadline_s + _GRACE_S)
            return replace(result, joined=True) if joined else result
        except TimeoutError:
            return PullResult(0, 0, self._clock() - started, Reason.DEADLINE)  # counted when its thread is done

    async def warm(self, address: str, max_bytes: int, deadline_s: float) -> WarmResult:
        """Copy what is used most at `address`, at most `max_bytes`; returns within `deadline_s` seconds.

        One at a time, of these and of `take`: a second one is told that we are busy.
        """
        return await self._warm(lambda warming, deadline: warming.run(address, max_bytes, deadline), deadline_s)

    async def take(self, address: str, chains: Sequence[messages.Chain], shared: int, deadline_s: float) -> WarmResult:
        """Copy these chains from `address` as far as they fit (`Warming.take`); returns within `deadline_s` seconds."""
        return await self._warm(lambda warming, deadline: warming.take(address, chains, shared, deadline), deadline_s)

    async def _warm(self, copy: Callable[[Warming, Deadline], WarmResult], deadline_s: float) -> WarmResult:
        if self._closed or self._warming:
            return WarmResult(Reason.BUSY)
        deadline = Deadline(self._clock, deadline_s, self._limits.stall_s)
        warming = Warming(self._pool, self._dialer, lambda: Pull(self._means), self._begin_s)
        work = asyncio.get_running_loop().run_in_executor(self._threads, copy, warming, deadline)
        self._warming.add(work)
        work.add_done_callback(self._warming.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(work), deadline_s + _GRACE_S)
        except TimeoutError:
            return WarmResult(Reason.DEADLINE)

    def stats(self) -> PullerStats:
        """Return the counters as of now."""
        with self._lock:
            return PullerStats(
                running=len(self._flights),
                blocks=self._counts["blocks"],
                bytes=self._counts["bytes"],
                corrupt=self._counts["corrupt"],
                joined=self._counts["joined"],
                shared=self._counts["shared"],
                taken_over=self._counts["taken_over"],
                by_reason=dict(self._reasons),
            )

    async def close(self) -> None:
        """Break off all pulls and close all connections. Idempotent."""
        self._closed = True
        self._dialer.close()
        await asyncio.gather(*self._flights.values(), *self._warming, return_exceptions=True)
        for threads in (self._threads, self._helpers):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._neighbours is not None:
            self._neighbours.close()

    def _launch(
        self, sources: Sequence[Source], chain: tuple[int, ...], deadline: Deadline, tag: str
    ) -> asyncio.Task[PullResult]:
        flight = asyncio.create_task(self._in_turn(sources, chain, deadline, tag))
        self._flights[chain] = flight
        flight.add_done_callback(lambda _: self._flights.pop(chain, None))
        return flight

    async def _in_turn(
        self, sources: Sequence[Source], chain: tuple[int, ...], deadline: Deadline, tag: str
    ) -> PullResult:
        """Wait until the first source has a turn, then have the chain pulled."""
        started = self._clock()
        asked = sources[:MAX_SOURCES]
        try:
            async with asyncio.timeout(max(0.0, deadline.left())):
                await self._turns.take(asked[0].address)
        except TimeoutError:
            return self._ended(PullResult(0, 0, self._clock() - started, Reason.DEADLINE))
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # a thread that nobody waited for may outlive the loop
                loop.call_soon_threadsafe(news.set)

        pull = Pull(self._means, several=len(asked) > 1, on_news=wake)

        def start(number: int, source: Source) -> asyncio.Future[None] | None:
            return self._start(partial(pull.work, number, source, chain, deadline, tag), source, first=not number)

        crew = Crew(pull, asked, deadline, start=start, news=news, clock=self._clock)
        return self._ended(await crew.run())

    def _start(self, work: Callable[[], None], source: Source, *, first: bool) -> asyncio.Future[None] | None:
        """Begin to work on a source, whose turn the first one has already; None when there is no turn or no thread."""
        if self._closed and not first:
            return None
        if not first and (self._helping >= self._limits.helpers or not self._turns.try_take(source.address)):
            return None
        self._helping += not first
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads if first else self._helpers, work)

        def over(_: asyncio.Future[None]) -> None:
            self._helping -= not first
            self._turns.give_back(source.address)

        future.add_done_callback(over)
        return future

    def _ended(self, result: PullResult) -> PullResult:
        with self._lock:
            self._reasons[result.reason] += 1
            self._counts["blocks"] += result.blocks
            self._counts["bytes"] += result.bytes
            self._counts["corrupt"] += result.corrupt
            self._counts["taken_over"] += result.taken_over
            self._counts["shared"] += len({part.address for part in result.parts if part.blocks}) > 1
        return result

    @property
    def _means(self) -> Means:
        return Means(
            pool=self._pool,
            dialer=self._dialer,
            neighbours=self._neighbours,
            sharers=self._limits.per_source + 1,  # `warm` is none of them
            begin_s=self._begin_s,
            window_bytes=self._limits.window_bytes,
            describe=self._describe,
            clock=self._clock,
        )

    @property
    def _begin_s(self) -> float:
        return self._limits.connect_s + self._limits.lookup_s
