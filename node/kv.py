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
from collections.abc import Callable, Mapping, Sequence

from kvmigrate.link import messages as link
from kvmigrate.link.server import EngineLink, Gone, LinkEvent
from kvmigrate.messages import Chain
from kvmigrate.planner import RateBook
from kvmigrate.pool import BlockPool
from kvmigrate.pool_file import remove_stale_files
from kvmigrate.pool_types import Cleared, Evicted, PoolEvent
from kvmigrate.puller import Puller, PullResult, Source, WarmResult
from kvmigrate.server import TransferServer
from node import kv_state
from node.digest import Changes, PrefixDigest
from node.flights import Flight, Flights
from node.kv_hot import Prefix, hottest, shared
from node.kv_peers import PeerPulls
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
#: Sources of one pull besides the plan's: those that hold most of the prompt.
MORE_SOURCES = 2
#: Longest time of one step of warming, seconds: whoever asks for it repeats it until all is here.
WARM_STEP_S = 5.0
#: Chunks, the most recently used, that the hottest prefixes are looked for in.
TOP_CHUNKS = 4096

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
        holders: Callable[[str, Sequence[int]], Mapping[str, int]],
        unlike: Callable[[], Mapping[str, str]],
        learn_ratio: Callable[[str, int, int], None],
        on_engine: Callable[[link.Hello | None], None],
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self._secrets = secrets
        self._meter = meter
        self._metrics = metrics
        self._digest = digest
        self._publish = publish
        self._address_of = address_of
        self._may_pull = may_pull
        self._holders = holders
        self._unlike = unlike
        self._learn_ratio = learn_ratio
        self._on_engine = on_engine
        self._clock = clock
        self.rates = RateBook()
        self.peers = PeerPulls()
        #: Prompt tokens that the engine started, and where it found them.
        self.tokens = {"prompt": 0, "engine": 0, "pool": 0}
        self.hello: link.Hello | None = None
        self._scheduler = False
        self._flights = Flights()
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
        settings = self.settings
        if not settings.pool_bytes:
            return
        self._loop = asyncio.get_running_loop()
        for path in await asyncio.to_thread(remove_stale_files, settings.pool_path):
            _log.info("removed %s, which a node that was killed had left", path)
        self.pool = await asyncio.to_thread(BlockPool, settings.pool_path, settings.pool_bytes)
        self.pool.subscribe(self._on_pool)
        self.link = EngineLink(settings.link_socket, self.pool, self._on_link)
        await self.link.start()
        self.server = TransferServer(
            self.pool,
            self._resolve,
            self._secrets(),
            settings.cluster,
            host=settings.host,
            port=settings.kv_port,
            describe=self.fields,
            hottest=self._hottest,
        )
        self.server.start()
        self.puller = Puller(self.pool, self._secrets(), settings.cluster, name=settings.name, describe=self.fields)

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

    def end(self, rid: str, *, whole: bool) -> None:
        """The answer is over. A connected engine still reports what it filled; any other is guessed at."""
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
        named = self._sources(plan, call.parsed.chunks)
        if not named:
            self._metrics.pulls.labels("no_address" if call.parsed.chunks else "nothing").inc()
            return 0
        sources = list(named.values())
        chunks = call.parsed.chunks[: max(source.chunks for source in sources)]
        result = await self.puller.pull(sources, chunks, self._pull_deadline(plan))
        self._note_pull({source.address: name for name, source in named.items()}, result)
        if result.blocks:
            await self.link.flush()
        return result.blocks

    def _sources(self, plan: Plan, chunks: Sequence[int]) -> dict[str, Source]:
        """The plan's source, then those that hold as much or more: they are asked for what it does not give."""
        assert plan.source is not None
        wanted = {plan.source: plan.chunks or len(chunks)}
        others = sorted(self._holders(plan.model, chunks).items(), key=lambda item: -item[1])
        for name, held in others:
            if len(wanted) <= MORE_SOURCES and held >= wanted[plan.source] and name != self.settings.name:
                wanted.setdefault(name, held)
        found: dict[str, Source] = {}
        for name, count in wanted.items():
            address = self._address_of(name)
            if address is not None and chunks:
                found[name] = Source(address, count)
            elif name == plan.source:
                return {}
        return found

    def _pull_deadline(self, plan: Plan) -> float:
        recompute_s = plan.prompt_tokens / self._meter.prefill_tps
        return min(max(recompute_s, PULL_MIN_S), PULL_MAX_S)

    def _note_pull(self, names: Mapping[str, str], result: PullResult) -> None:
        if result.joined:
            return  # noted by the request that it was made for, and perhaps from another source than ours
        for part in result.parts:
            name = names[part.address]
            if part.blocks:
                self.rates.pulled(name, part.bytes, part.seconds, part.lookup_s)
            self.peers.note(name, part)
            self._metrics.pulled_way(part.way, part.bytes)
        self._metrics.pulled(str(result.reason), result.blocks, result.bytes, result.seconds, result.corrupt)

    # --- warming

    async def warm(self, source: str, max_bytes: int, deadline_s: float = WARM_STEP_S) -> WarmResult | str:
        """Copy what is used most at a peer, at most so many bytes and seconds. Returns why not, where it cannot be."""
        address = self._address_of(source)
        if self.puller is None or self.link is None:
            return "this node has no KV pool"
        if address is None:
            return f"no live node named {source} serves KV blocks"
        if source == self.settings.name:
            return "a node cannot be warmed from itself"
        result = await self.puller.warm(address, max_bytes, min(deadline_s, WARM_STEP_S))
        for part in result.parts:
            if part.blocks:
                self.rates.pulled(source, part.bytes, part.seconds, part.lookup_s)
            self.peers.note(source, part)
        self._metrics.warmed.inc(result.blocks)
        for chain in result.chains:
            with self._lock:
                changes = self._digest.adopt(chain.hashes, chain.labels)
            self._publish(changes)
        await self.link.flush()
        return result

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
            if self.hello is None or self.hello.fingerprint != hello.fingerprint:
                self.peers.forget_unlike()
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
        for name, n in (
            ("prompt", event.prompt_tokens),
            ("engine", event.local_tokens),
            ("pool", event.external_tokens),
        ):
            self.tokens[name] += n
        self._meter.started(event.rid, now, event.prompt_tokens, cached)
        flight = self._flights.get(event.rid)
        if flight is None:
            return
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
        with self._lock:
            withdrawn = self._digest.lost()
        self._publish(Changes(withdrawn=withdrawn))

    # --- from other threads

    def _resolve(self, chunks: Sequence[int]) -> tuple[bytes, ...]:
        with self._lock:
            return self._digest.resolve(chunks)

    def fields(self) -> dict[str, str | int]:
        """The readable fields of our engine's fingerprint; none without an engine."""
        hello = self.hello
        return dict(hello.fields) if hello is not None else {}

    def _hottest(self, blocks: int) -> list[Chain]:
        pool = self.pool
        with self._lock:
            runs = self._digest.runs()
        return hottest(runs, pool.uses, blocks) if pool is not None else []

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

    def top(self, most: int) -> list[Prefix]:
        """The prefixes that are used most, of those used last."""
        if self.pool is None:
            return []
        with self._lock:
            runs = self._digest.runs(TOP_CHUNKS)
        return shared(runs, self.pool.uses)[:most]

    def unlike(self) -> dict[str, str]:
        """Nodes that serve a model of ours and whose blocks we cannot use, and why, in words."""
        known = self.peers.unlike()
        models = {**dict.fromkeys(known, "it"), **self._unlike()}
        return {name: known.get(name) or f"another fingerprint of {model}" for name, model in models.items()}

    @property
    def digest_size(self) -> int:
        """Chunks in the prefix digest."""
        return len(self._digest)

    def snapshot(self) -> dict[str, object]:
        """The state as plain JSON values."""
        return kv_state.snapshot(self)
