"""The node's side of KV: what the engine's connector reports, what is pulled for a request, what peers may have.

Rules
1. Every report of the engine feeds the load meter and the prefix digest; a report about a request that is not
   known here changes nothing.
2. The digest says what can be had here. It grows with blocks that the engine filled, and shrinks when the pool
   evicts one; where the engine's KV cache is larger than the pool it says also, without blocks, what that may hold
   beyond it. Without a connector in the engine it is a guess: the prompts that it was given last, as many as fit into
   its KV cache.
3. A pull ends within its deadline, which is about what computing the same tokens would take (`kv_pulls`); its result
   only changes how fast the answer comes. It runs beside the request's wait in the engine's queue (`node.kv_pulling`).
4. Transfer threads ask for blocks and the pool evicts from any thread: the digest is behind one lock
   (`node.kv_digest`), everything else happens in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvmigrate.link import messages as link
from kvmigrate.link.server import EngineLink, Gone, LinkEvent
from kvmigrate.pool import BlockPool
from kvmigrate.pool_file import remove_stale_files
from kvmigrate.pull_types import Reason
from kvmigrate.puller import Puller
from kvmigrate.reserve import Reserve
from kvmigrate.server import TransferServer
from kvmigrate.warm import WarmResult, spare
from node import kv_state
from node.counted_hits import CountedHits
from node.digest import Changes, PrefixDigest
from node.flights import MAX_FLIGHTS, Flight, Flights, Late
from node.kv_digest import SharedDigest
from node.kv_offer import Offer, Taken
from node.kv_pulling import Pulling, begin
from node.kv_pulls import Pulls, pull_deadline
from node.kv_spill import Spill
from node.meter import LoadMeter
from node.metrics import Metrics
from node.plan import Plan
from node.relay.call import Call
from node.settings import Settings

#: Longest time of one step of warming, seconds: whoever asks for it repeats it until all is here.
WARM_STEP_S = 5.0

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
        on_lookup: Callable[[str, str, int, float], None],
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self._secrets = secrets
        self._meter = meter
        self._metrics = metrics
        self.digest = SharedDigest(digest, publish)
        self._address_of = address_of
        self._may_pull = may_pull
        self._unlike = unlike
        self._learn_ratio = learn_ratio
        self._on_engine = on_engine
        self._on_lookup = on_lookup
        self._clock = clock
        #: Called at each report of the engine.
        self.on_report: Callable[[], None] = lambda: None
        self._pulls = Pulls(settings.name, address_of=address_of, holders=holders, metrics=metrics)
        self.rates = self._pulls.rates
        self.peers = self._pulls.peers
        #: Prompt tokens that the engine started, and where it found them.
        self.tokens = {"prompt": 0, "engine": 0, "pool": 0}
        #: What an engine without our connector found cached is known in sum only.
        self.counted = CountedHits()
        self.hello: link.Hello | None = None
        self._scheduler = self._holds = False
        self._kv_tokens = 0
        self._flights = Flights()
        self._late = Late()
        #: Prompt tokens that the engine found cached, by request, until its answer is over: it may be reported finished
        #: before the first byte is here.
        self._cached: dict[str, int] = {}
        self.spill = Spill(settings, self.digest, metrics)
        self.pool: BlockPool | None = None
        self.link: EngineLink | None = None
        self._reserve: Reserve | None = None
        self.server: TransferServer | None = None
        self.puller: Puller | None = None

    # --- life

    async def start(self) -> None:
        """Open the pool, the link and the transfer server. Raises `kvmigrate.errors.LocalError`."""
        settings = self.settings
        if not settings.pool_bytes:
            return
        for path in await asyncio.to_thread(remove_stale_files, settings.pool_path):
            _log.info("removed %s, which a node that was killed had left", path)
        self.pool = await asyncio.to_thread(BlockPool, settings.pool_path, settings.pool_bytes)
        self.digest.follow(self.pool)
        self._reserve = Reserve(self.pool, busy=lambda: self._meter.active > 0)
        self.spill.begin(self.pool)
        self.link = EngineLink(settings.link_socket, self.pool, self._on_link)
        await self.link.start()
        self.server = TransferServer(
            self.pool,
            self.digest.resolve,
            self._secrets(),
            settings.cluster,
            host=settings.host,
            port=settings.kv_port,
            describe=self.fields,
            hottest=self.digest.hottest,
            encrypt=settings.kv_tls,
            on_lookup=self._on_lookup,
        )
        self.server.start()
        self.puller = Puller(
            self.pool,
            self._secrets(),
            settings.cluster,
            name=settings.name,
            describe=self.fields,
            encrypt=settings.kv_tls,
        )

    def rekey(self) -> None:
        """Follow the ring: connections that are open stay, new ones prove the keys as they are now."""
        if self.server is not None:
            self.server.rekey(self._secrets())
        if self.puller is not None:
            self.puller.rekey(self._secrets())

    async def close(self) -> None:
        """Close everything that was opened, in reverse order; what the pool holds is kept where that was asked for.

        Idempotent.
        """
        if self.puller is not None:
            await self.puller.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)
        if self.link is not None:
            await self.link.close()
        if self.pool is not None:
            if self._reserve is not None:
                await asyncio.to_thread(self._reserve.close)
            await self.spill.end(self.pool)
            self.digest.unfollow()
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
        """The engine is about to get this request.

        Its prompt is claimed from now on: the next turn of a conversation, or another request with the same beginning,
        often comes before this answer, and behind it in the engine's queue finds it computed. With our connector the
        claim is a promise until the engine reports the blocks: nobody pulls what is not there yet.
        """
        if not call.parsed.prompt_bytes:
            return
        for forgotten in self._flights.make_room(rid):
            self.digest.unpromise(forgotten)
        flight = self._flights.add(rid, call.parsed, plan)
        if self._scheduler:
            self.digest.promise(flight)
        elif flight.chunks:
            self.digest.used(flight)

    def cached(self, rid: str) -> int | None:
        """Prompt tokens that the engine found cached, its own and ours; None while it did not report them."""
        return self._cached.get(rid)

    def end(self, rid: str, *, whole: bool) -> None:
        """The answer is over. A connected engine still reports what it filled; any other is guessed at."""
        self._cached.pop(rid, None)
        if whole and self._scheduler:
            return
        flight = self._flights.pop(rid)
        if flight is None:
            return
        self.digest.unpromise(flight)
        if whole:
            self.counted.ended(flight.predicted, flight.text_tokens)
        if whole and flight.chunks:
            self.digest.used(flight)

    async def begin_pull(self, rid: str, plan: Plan, call: Call) -> Pulling:
        """Begin to pull what the plan's source has of the prompt; never raises for a peer.

        Returns when the engine may be asked: at once where its connector holds the request and it computes others, else
        when all is here.
        """
        if self.puller is None or self.link is None or plan.source is None or not self._scheduler:
            return Pulling(None, 0.0)
        if not self._may_pull(plan.model):
            return Pulling(None, 0.0)
        deadline_s = pull_deadline(self._meter.prefill.ms(0, plan.prompt_tokens), forced=plan.forced)
        tag = call.trace.tag if call.trace is not None else ""
        over = partial(self.link.pulled, rid) if self._holds and self._meter.active else None
        pull = partial(self._pulls.pull, self.puller, self.link, plan, call.parsed.chunks, deadline_s, tag=tag)
        return await begin(pull, deadline_s, over)

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
        self._pulls.note_parts({address: source}, result.parts)
        self._metrics.warmed.inc(result.blocks)
        self.digest.adopt(result.chains)
        await self.link.flush()
        return result

    async def take(self, source: str, offer: Offer) -> Taken:
        """Copy what a node that is about to go offers, as far as it fits; without chains only tell of the room."""
        address, pool, link = self._address_of(source), self.pool, self.link
        if self.puller is None or link is None or pool is None:
            return Taken(Reason.UNCONFIGURED, "it has no KV pool")
        if address is None or source == self.settings.name:
            return Taken(Reason.UNREACHABLE, f"it knows no live node {source} that serves KV blocks")
        if not offer.chains:
            return Taken(Reason.NOTHING, room=spare(pool))
        result = await self.puller.take(address, offer.chains, offer.shared, offer.seconds)
        self._pulls.note_parts({address: source}, result.parts)
        self._metrics.taken.inc(result.blocks)
        self.digest.adopt(result.chains)
        await link.flush()
        held = [len(pool.lookup(chain.hashes, use=False)) for chain in offer.chains]
        return Taken(result.reason, result.detail, result.blocks, result.bytes, held, spare(pool))

    # --- what the engine reports

    def _on_link(self, event: LinkEvent) -> None:
        now = self._clock()
        self.on_report()
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
                self._on_finished(event, now)
            case link.Stored():
                for late in self._late.waiting(now):
                    self._confirm(late)
            case link.Load():
                self._meter.engine_load(now, event.running, event.waiting, event.kv_use)
            case link.Loaded():
                ranks = self.hello.ranks if self.hello is not None else 1  # each tells of its own part
                self.rates.loaded(event.bytes * ranks, event.seconds)
            case link.Corrupt():
                self._metrics.corrupt.inc(len(event.slots))
            case _:
                pass

    def _on_hello(self, hello: link.Hello) -> None:
        if hello.role is link.Role.SCHEDULER:
            self._scheduler, self._holds = hello.supported, hello.holds
            if self._scheduler:
                self.digest.limit(0)  # the pool says what it drops
                self.digest.engine_holds(self._kv_tokens)
            self._unpromise()
        elif hello.rank == 0:
            if self.hello is None or self.hello.fingerprint != hello.fingerprint:
                self.peers.forget_unlike()
            self.hello = hello
            self.spill.met(hello.fingerprint)
            self._on_engine(hello)

    def _on_gone(self, gone: Gone) -> None:
        if gone.role is link.Role.SCHEDULER:
            self._scheduler = False
            self._unpromise()
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
        self._cached[event.rid] = cached
        while len(self._cached) > MAX_FLIGHTS:
            del self._cached[next(iter(self._cached))]
        flight.prompt_tokens = event.prompt_tokens
        self._metrics.started(flight.predicted, cached, event.prompt_tokens)
        if flight.teaches:
            self._learn_ratio(flight.model, flight.prompt_bytes, event.prompt_tokens)

    def _on_filled(self, event: link.Filled) -> None:
        flight = self._flights.get(event.rid)
        if flight is None:
            return
        if not event.hashes:
            # Blocks that nobody can be given (pictures, adapters): the promise stands, until the digest forgets it or
            # the engine goes. So who comes with the same beginning is sent here, and nobody pulls.
            flight.promised = ()
        flight.unconfirmed = event.hashes
        flight.computed = self._covers(event.tokens, flight.prompt_tokens)
        self._confirm(flight)

    def _on_finished(self, event: link.Finished, now: float) -> None:
        flight = self._flights.pop(event.rid)
        if flight is not None:
            self._confirm(flight)
            self.digest.unpromise(flight)
            self._late.add(flight, now)

    def _covers(self, filled: int, prompt: int) -> bool:
        """Whether the full blocks of a prompt are computed, when so many of its tokens are."""
        return self.hello is not None and filled > prompt - self.hello.block_size

    def _confirm(self, flight: Flight) -> None:
        if self.hello is not None:
            self.digest.confirm(flight, self.hello.block_size)

    def _unpromise(self) -> None:
        """The scheduler's link is another one or none: what was reported meanwhile is lost, ends of requests too."""
        for flight in self._flights:
            self.digest.unpromise(flight)

    def engine_ready(self, kv_tokens: int) -> None:
        """The engine takes requests; its KV cache holds so many tokens, 0 = it does not say."""
        self._kv_tokens = kv_tokens
        self.digest.limit(0 if self._scheduler else kv_tokens)
        self.digest.engine_holds(kv_tokens if self._scheduler else 0)

    def engine_lost(self) -> None:
        """The engine went down: its requests are gone, and so is a cache that only it held."""
        self._meter.engine_lost(self._clock())
        self._flights.clear()
        self._late.clear()
        self._cached.clear()
        self.digest.lost()

    def fields(self) -> dict[str, str | int]:
        """The readable fields of our engine's fingerprint; none without an engine."""
        hello = self.hello
        return dict(hello.fields) if hello is not None else {}

    def unlike(self) -> dict[str, str]:
        """Nodes that serve a model of ours and whose blocks we cannot use, and why, in words."""
        return {**self._unlike(), **self.peers.unlike()}

    def snapshot(self) -> dict[str, object]:
        """The state as plain JSON values."""
        return kv_state.snapshot(self)
