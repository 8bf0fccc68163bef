"""The node's side of KV: what the engine's connector reports, what is pulled for a request, what peers may have.

Rules
1. Every report of the engine feeds the load meter and the prefix digest; a report about a request that is not
   known here changes nothing.
2. The digest says what can be had here. It grows with blocks that the engine filled, and shrinks when the pool
   evicts one. Without a connector in the engine it is a guess, from the prompts that were served.
3. A pull ends within its deadline, which is never longer than computing the same tokens would take; its result
   only changes how fast the answer comes.
4. Transfer threads ask for blocks and the pool evicts from any thread: the digest is behind one lock, everything
   else happens in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvmigrate.link import messages as link
from kvmigrate.link.server import EngineLink, Gone, LinkEvent
from kvmigrate.planner import RateBook
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Cleared, Evicted, PoolEvent
from kvmigrate.puller import Puller, PullResult
from kvmigrate.server import TransferServer
from node.digest import Changes, PrefixDigest
from node.flights import MAX_FLIGHTS, Flight, Flights
from node.meter import LoadMeter
from node.metrics import Metrics
from node.plan import Plan
from node.relay.call import Call
from node.settings import Settings

#: Evicted blocks that wait for the event loop; beyond it the digest is emptied.
MAX_EVICTIONS = 1 << 16
#: Least and longest time of a pull, seconds.
PULL_MIN_S = 1.0
PULL_MAX_S = 15.0

_log = logging.getLogger("grapevine.kv")


class KvSide:
    """Everything about KV in one node. Without a pool (``--no-kv``) only the guessed digest is left."""

    def __init__(
        self,
        settings: Settings,
        *,
        secrets: Callable[[], tuple[bytes, ...]],
        meter: LoadMeter,
        metrics: Metrics,
        digest: PrefixDigest,
        publish: Callable[[Changes], None],
        address_of: Callable[[str], str | None],
        may_pull: Callable[[str], bool],
        learn_ratio: Callable[[str, int, int], None],
        on_engine: Callable[[link.Hello | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._secrets = secrets
        self._meter = meter
        self._metrics = metrics
        self._digest = digest
        self._publish = publish
        self._address_of = address_of
        self._may_pull = may_pull
        self._learn_ratio = learn_ratio
        self._on_engine = on_engine
        self._clock = clock
        self.rates = RateBook()
        self.hello: link.Hello | None = None
        self._scheduler = False
        self._flights = Flights()
        #: Prompt tokens that the engine found cached, by request, until its answer is over: it may be reported finished
        #: before the first byte is here.
        self._cached: dict[str, int] = {}
        self._lock = threading.Lock()
        self._evictions: deque[bytes | None] = deque(maxlen=MAX_EVICTIONS)
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.pool: BlockPool | None = None
        self.link: EngineLink | None = None
        self.server: TransferServer | None = None
        self.puller: Puller | None = None

    # --- life

    async def start(self) -> None:
        """Open the pool, the link and the transfer server. Raises `kvmigrate.errors.LocalError`."""
        settings = self._settings
        if not settings.pool_bytes:
            return
        self._loop = asyncio.get_running_loop()
        self.pool = await asyncio.to_thread(BlockPool, settings.pool_path, settings.pool_bytes)
        self.pool.subscribe(self._on_pool)
        self.link = EngineLink(settings.link_socket, self.pool, self._on_link)
        await self.link.start()
        self.server = TransferServer(
            self.pool, self._resolve, self._secrets(), settings.cluster, host=settings.host, port=settings.kv_port
        )
        self.server.start()
        self.puller = Puller(self.pool, self._secrets(), settings.cluster, name=settings.name)

    def rekey(self) -> None:
        """Follow the ring: connections that are open stay, new ones prove the keys as they are now."""
        if self.server is not None:
            self.server.rekey(self._secrets())
        if self.puller is not None:
            self.puller.rekey(self._secrets())

    async def close(self) -> None:
        """Close everything that was opened, in reverse order. Idempotent."""
        if self.puller is not None:
            await self.puller.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)
        if self.link is not None:
            await self.link.close()
        if self.pool is not None:
            self.pool.unsubscribe(self._on_pool)
            await asyncio.to_thread(self.pool.close)
        self.pool = self.link = self.server = self.puller = None

    @property
    def port(self) -> int:
        """Port of the transfer server; 0 without one."""
        return self.server.port if self.server is not None else 0

    # --- a request on our engine

    @property
    def connected(self) -> bool:
        """Our connector runs in the engine and told us so."""
        return self._scheduler

    def begin(self, rid: str, call: Call, plan: Plan) -> None:
        """The engine is about to get this request."""
        if call.parsed.prompt_bytes:
            self._flights.add(rid, call.parsed, plan)

    def cached(self, rid: str) -> int | None:
        """Prompt tokens that the engine found cached, its own and ours; None while it did not report them."""
        return self._cached.get(rid)

    def end(self, rid: str, *, whole: bool) -> None:
        """The answer is over. A connected engine still reports what it filled; any other is guessed at."""
        self._cached.pop(rid, None)
        if whole and self._scheduler:
            return
        flight = self._flights.pop(rid)
        if flight is not None and whole and flight.chunks:
            with self._lock:
                changes = self._digest.used(
                    flight.chunks, prompt_tokens=flight.text_tokens, prompt_bytes=flight.prompt_bytes
                )
            self._publish(changes)

    async def pull(self, plan: Plan, call: Call) -> int:
        """Pull what the plan's source has of the prompt. Returns the blocks that came; never raises for a peer."""
        if self.puller is None or self.link is None or plan.source is None or not self._scheduler:
            return 0
        if not self._may_pull(plan.model):
            return 0
        address = self._address_of(plan.source)
        chunks = call.parsed.chunks[: plan.chunks] if plan.chunks else call.parsed.chunks
        if address is None or not chunks:
            self._metrics.pulls.labels("no_address" if chunks else "nothing").inc()
            return 0
        result = await self.puller.pull(address, chunks, self._pull_deadline(plan))
        self._note_pull(plan.source, result)
        if result.blocks:
            await self.link.flush()
        return result.blocks

    def _pull_deadline(self, plan: Plan) -> float:
        recompute_s = self._meter.prefill.ms(0, plan.prompt_tokens) / 1000
        return min(max(recompute_s, PULL_MIN_S), PULL_MAX_S)

    def _note_pull(self, source: str, result: PullResult) -> None:
        if result.joined:
            return  # noted by the request that it was made for, and perhaps from another source than ours
        if result.blocks:
            self.rates.pulled(source, result.bytes, result.seconds, result.lookup_s)
        self._metrics.pulled(str(result.reason), result.blocks, result.bytes, result.seconds, result.corrupt)
        level = logging.INFO if result.blocks else logging.DEBUG
        _log.log(level, "pulled %d blocks from %s in %.3f s: %s", result.blocks, source, result.seconds, result.reason)

    # --- what the engine reports

    def _on_link(self, event: LinkEvent) -> None:
        now = self._clock()
        match event:
            case link.Hello():
                self._on_hello(event)
            case Gone():
                self._on_gone(event)
            case link.Started():
                self._on_started(event, now)
            case link.Prefilled():
                self._meter.prefilled(event.rid, now, event.seconds)
            case link.Filled():
                self._on_filled(event)
            case link.Finished():
                self._on_finished(event)
            case link.Load():
                self._meter.engine_load(now, event.running, event.waiting, event.kv_use)
            case link.Loaded():
                self.rates.loaded(event.bytes, event.seconds)
            case link.Corrupt():
                self._metrics.corrupt.inc(len(event.slots))
            case _:
                pass

    def _on_hello(self, hello: link.Hello) -> None:
        if hello.role is link.Role.SCHEDULER:
            self._scheduler = hello.supported
        elif hello.rank == 0:
            self.hello = hello
            self._on_engine(hello)

    def _on_gone(self, gone: Gone) -> None:
        if gone.role is link.Role.SCHEDULER:
            self._scheduler = False
        elif gone.rank == 0:
            self.hello = None
            self._on_engine(None)

    def _on_started(self, event: link.Started, now: float) -> None:
        cached = event.local_tokens + event.external_tokens
        self._meter.started(event.rid, now, event.prompt_tokens, cached)
        flight = self._flights.get(event.rid)
        if flight is None:
            return
        self._cached[event.rid] = cached
        while len(self._cached) > MAX_FLIGHTS:
            del self._cached[next(iter(self._cached))]
        flight.prompt_tokens = event.prompt_tokens
        self._metrics.started(flight.predicted, cached, event.prompt_tokens)
        if flight.teaches:
            self._learn_ratio(flight.model, flight.prompt_bytes, event.prompt_tokens)

    def _on_filled(self, event: link.Filled) -> None:
        flight = self._flights.get(event.rid)
        if flight is not None:
            flight.unconfirmed = event.hashes
            self._confirm(flight)

    def _on_finished(self, event: link.Finished) -> None:
        flight = self._flights.pop(event.rid)
        if flight is not None:
            self._confirm(flight)

    def _confirm(self, flight: Flight) -> None:
        """Claim what the pool holds of the blocks that a request filled.

        Workers report to the pool over links of their own, so some blocks may become known only later: then the end
        of the request asks again. What the pool never took (it was full) is never claimed.
        """
        if self.pool is None or self.hello is None or not flight.chunks or not flight.unconfirmed:
            return
        held = len(self.pool.lookup(flight.unconfirmed, use=False))
        with self._lock:
            changes = self._digest.confirm(
                flight.chunks,
                flight.unconfirmed[:held],
                prompt_tokens=flight.prompt_tokens or len(flight.unconfirmed) * self.hello.block_size,
                prompt_bytes=flight.prompt_bytes,
                block_size=self.hello.block_size,
            )
        if held == len(flight.unconfirmed):
            flight.unconfirmed = ()
        self._publish(changes)

    def engine_lost(self) -> None:
        """The engine went down: its requests are gone, and so is a cache that only it held."""
        self._meter.engine_lost(self._clock())
        self._flights.clear()
        self._cached.clear()
        with self._lock:
            withdrawn = self._digest.lost()
        self._publish(Changes(withdrawn=withdrawn))

    # --- from other threads

    def _resolve(self, chunks: Sequence[int]) -> tuple[bytes, ...]:
        with self._lock:
            return self._digest.resolve(chunks)

    def _on_pool(self, event: PoolEvent) -> None:
        """Called under the pool's lock, in any thread."""
        if isinstance(event, Evicted):
            self._evictions.append(event.block_hash)
        elif isinstance(event, Cleared):
            self._evictions.clear()
            self._evictions.append(None)
        else:
            return
        if not self._scheduled and self._loop is not None and not self._loop.is_closed():
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._withdraw)

    def _withdraw(self) -> None:
        self._scheduled = False
        full = len(self._evictions) == MAX_EVICTIONS
        withdrawn: list[int] = []
        with self._lock:
            if full:
                self._evictions.clear()
                self._evictions.append(None)
            while self._evictions:
                block = self._evictions.popleft()
                withdrawn += self._digest.clear() if block is None else self._digest.evicted(block)
        self._publish(Changes(withdrawn=tuple(withdrawn)))

    def snapshot(self) -> dict[str, object]:
        """The state as plain JSON values."""
        if self.pool is None or self.server is None or self.puller is None or self.link is None:
            return {"enabled": False, "digest_size": len(self._digest)}
        stats, served, pulled = self.pool.stats(), self.server.stats(), self.puller.stats()
        status = self.link.status()
        return {
            "enabled": True,
            "path": str(self._settings.pool_path),
            "why": status.why,
            "connected": self._scheduler,
            "digest_size": len(self._digest),
            "block_tokens": self.hello.block_size if self.hello is not None else 0,
            "pool": {name: getattr(stats, name) for name in stats.__slots__},
            "served": {name: getattr(served, name) for name in served.__slots__},
            "pulls": {name: getattr(pulled, name) for name in pulled.__slots__},
            "corrupt": stats.corrupt + pulled.corrupt,
            "rates_bytes_s": self.rates.network(),
        }
