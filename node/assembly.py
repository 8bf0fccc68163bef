"""The composition root: makes every part of a node, connects them, starts them, and stops them in reverse.

Rules
1. What can fail cheaply starts first (name, ports), then KV, gossip and the HTTP server, the engine last: the
   node answers, and routes to its peers, while its own engine is still loading.
2. Whatever fails while starting, everything that was started is stopped.
3. Stopping: drain (the peers hear of it at once; what can move is handed to them) and tell balancers to go elsewhere;
   only then take no new connection, let the clients' answers finish, tell the peers that we leave, and stop in reverse
   order. All of that has one deadline; `hurry` ends it now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gossip import GossipAgent, GossipConfig, Identity
from gossip.boot import next_incarnation, raise_to
from node import __version__, addresses, banner, dirs
from node.admission import Admission
from node.clients import Access
from node.digest import PrefixDigest
from node.drain import Drain
from node.engine.client import open_session
from node.engine.events import EngineEvent
from node.engine.supervisor import EngineSupervisor
from node.engine_metrics import read_page
from node.flows import Flows, WatchedPeers, WatchedRunner
from node.host import HostFacts
from node.http.readiness import Readiness
from node.http.server import HttpServer, Routes
from node.http.signature import PeerSigner
from node.keys import USE_TRANSFERS, NodeKeys
from node.kv import KvSide
from node.kv_heirs import Heirs
from node.kv_offering import Offering
from node.kv_rescue import Rescue
from node.load import LoadVector
from node.meta import NodeMeta
from node.meter import LoadMeter
from node.metrics import Metrics
from node.onlooker import Onlooker
from node.peers import PeerClient
from node.policy import make_policy
from node.registry import Registry
from node.relay.deadlines import Deadlines
from node.relay.dispatch import Dispatcher
from node.relay.downs import Downs
from node.relay.forward import PeerRunner
from node.relay.handover import Handovers
from node.relay.local import Engine, LocalRunner
from node.relay.ports import Notes, Peers, Runner
from node.relay.session import Session
from node.reload import CLIENTS, TLS, Reloader
from node.reporter import Reporter
from node.room import WaitingRoom
from node.runfiles import claim
from node.settings import Settings, check_pool_fits
from node.surface import make_routes
from node.tls import ClusterTrust, ServerTls
from node.tracing import make_tracing

if TYPE_CHECKING:
    from node.tracing.tracing import Tracing
    from node.workers.front import Front

#: Seconds to announce ourselves by multicast DNS; without it a node still joins by address.
DISCOVERY_S = 5.0

#: Seconds that clients get to read why their streams end, when the node stops before they are over.
BREAK_OFF_S = 0.5

_log = logging.getLogger("grapevine")


class NodeEngine(Engine, Protocol):
    """The engine as the node uses it; `EngineSupervisor` is one."""

    async def start(self) -> None:
        """Begin; returns at once."""
        ...

    async def stop(self) -> None:
        """End it."""
        ...

    def snapshot(self) -> dict[str, object]:
        """Its state, JSON-able."""
        ...


EngineFactory = Callable[[Settings, Callable[[EngineEvent], None]], NodeEngine]


def supervised(settings: Settings, listener: Callable[[EngineEvent], None]) -> NodeEngine:
    """The usual engine: started and watched by us, or attached to."""
    return EngineSupervisor(settings, listener=listener)


class Node:
    """One node of the cluster. `start` once, `stop` once.

    `on_leave` is called when an administrator asks the node to end; `say` gets the lines for people. The rest of
    the keywords is for tests and simulations.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_leave: Callable[[], None] = lambda: None,
        say: banner.Say = _log.info,
        engine: EngineFactory = supervised,
        gossip_config: GossipConfig | None = None,
        deadlines: Deadlines | None = None,
        tracing: Tracing | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.deadlines = deadlines or Deadlines()
        self.http_port = 0
        self._on_leave = on_leave
        self._clock = clock
        self.rng = rng or random.Random()
        self._config = gossip_config or gossip_preset(settings)
        self._stack = AsyncExitStack()
        self._stopping = False
        self._hurried = asyncio.Event()
        self._grace_s = settings.stop_grace_s
        self._http: HttpServer | Front | None = None
        self._routes: Routes | None = None

        self.tracing = tracing or make_tracing(settings)
        self.metrics = Metrics(clock)
        self.flows = Flows()
        self.meter = LoadMeter(slots=settings.max_running)
        self.room = WaitingRoom(settings.max_queue, clock)
        self.admission = Admission(settings.max_running, self.room)
        self.downs = Downs()
        self.handovers = Handovers()
        self.keys = NodeKeys(settings)
        self.signer = PeerSigner(self.keys.ring)
        self.trust = ClusterTrust(self.keys.ring, settings.run_dir)
        self.reloader = Reloader()
        self.access = Access(settings, clock)
        self.tls = _server_tls(settings, self.trust)
        self.reporter = Reporter(settings.name, meter=self.meter, admission=self.admission, say=say, clock=clock)
        self.registry = self._make_registry()
        self.kv = self._make_kv()
        self.reporter.connect(
            self.registry,
            rates=self.kv.rates.network,
            copy_rate=lambda: self.kv.rates.copy_bytes_s,
            engine_ready=self.kv.engine_ready,
            engine_lost=self.kv.engine_lost,
        )
        self.engine = engine(settings, self.reporter.on_engine)
        self.client = PeerClient(settings.name, self.signer, self.deadlines, self.trust)
        self.local = self._make_local()
        self.kv.on_report = self.local.sign
        #: Runs what peers forward to us.
        self.guests = WatchedRunner(self._traced_local(), self.flows)
        self.peers = self._make_peers()
        self.policy = make_policy(settings.policy)
        self.dispatcher = self._make_dispatcher()
        self.host = HostFacts()
        self.rescue = self._make_rescue()
        self.drainer = self._make_drain()
        self.readiness = Readiness(self.registry.serving, clock)
        self.gossip: GossipAgent
        #: For questions about the engine (`_start_looks`), and who asks them.
        self.looks: Session
        self.onlooker: Onlooker

    # --- life

    async def start(self) -> None:
        """Start everything. Raises the errors of the part that could not; nothing is left running then."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """Stop everything: take nothing new, finish or cut what runs, release all. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        try:
            if self._http is not None:
                await self._within_grace(self._leave_well(self._http))
                await self._break_off(self._http)
                await self.gossip.leave()
        finally:
            await self._stack.aclose()

    def hurry(self) -> None:
        """Cut what still runs: the person at the terminal asked twice."""
        self._hurried.set()

    async def _start(self) -> None:
        settings, stack = self.settings, self._stack
        check_pool_fits(settings)
        self.keys.subscribe(self.kv.rekey)
        self.keys.subscribe(self.trust.rekey)
        listener = addresses.listen_http(settings.host, settings.port)
        stack.callback(listener.close)
        self.http_port = int(listener.getsockname()[1])
        shown = "127.0.0.1" if settings.host in addresses.WILDCARD_HOSTS else settings.host
        stack.enter_context(claim(settings, f"{settings.scheme}://{addresses.join_address(shown, self.http_port)}"))
        # Holds the key ring, and the engine's log.
        dirs.private_dir(settings.node_dir, "--state-dir")
        await self.keys.load()
        tls = await asyncio.to_thread(self._start_tls)
        await asyncio.to_thread(self._start_clients)
        if self.tracing is not None:
            stack.push_async_callback(self.tracing.close)
        stack.push_async_callback(self.kv.close)
        await self.kv.start()
        await self.client.start()
        stack.push_async_callback(self.client.close)
        await self._start_gossip()
        self._routes = make_routes(self, self._clock)
        stack.push_async_callback(self.drainer.close)
        stack.push_async_callback(self.engine.stop)
        if settings.workers > 1:
            self._http = await self._start_workers(listener, self._routes)
        else:
            self._http = HttpServer(self._routes.router())
            stack.push_async_callback(self._http.close)
            await self._http.start(listener, tls)
        reloading = asyncio.create_task(self.reloader.run(), name="grapevine-reload")
        stack.push_async_callback(_cancelled, reloading)
        await self.engine.start()
        self._start_looks()
        self.host.look()
        await self._start_discovery()

    async def _start_workers(self, listener: socket.socket, routes: Routes) -> Front:
        from node.workers.setup import make_front  # nobody else needs these modules

        front = make_front(self, routes.peer, self._clock)
        self._stack.push_async_callback(front.close)
        await front.start(listener, routes.router())
        return front

    def _start_tls(self) -> ssl.SSLContext | None:
        if self.tls is None:
            return None
        context = self.tls.start()
        self.reloader.add(TLS, self.tls.files, self.tls.reload)
        return context

    def _start_clients(self) -> None:
        if self.access.path is not None:
            self.access.load()
            self.reloader.add(CLIENTS, [self.access.path], self.access.load)

    def _start_looks(self) -> None:
        # A session of its own: on a connection that is kept warm by questions, a request would be sent twice when the
        # engine cuts it.
        self.looks = open_session(self.engine.address)
        self._stack.push_async_callback(self.looks.close)

        def wanted() -> bool:
            return self.engine.ready and not self.kv.connected

        def read() -> Awaitable[bytes]:
            return read_page(self.looks, self.engine.address)

        self.onlooker = Onlooker(self.meter, self.kv.counted, self.metrics, wanted=wanted, read=read, clock=self._clock)
        looking = asyncio.create_task(self.onlooker.run(), name="grapevine-looks")
        self._stack.push_async_callback(_cancelled, looking)

    async def _start_gossip(self) -> None:
        settings = self.settings
        incarnation = await asyncio.to_thread(next_incarnation, self._boot_file)
        host, port = settings.advertise, settings.gossip_port
        kv = addresses.join_address(host, self.kv.port) if self.kv.port else ""
        http = addresses.join_address(host, self.http_port)
        kv_tls = settings.kv_tls if kv else None
        meta = NodeMeta(http, kv, __version__, tls=self.tls is not None, boot=self.signer.boot, kv_tls=kv_tls)
        self.gossip = GossipAgent(
            Identity(settings.name, settings.cluster, incarnation, host, port, meta.encode()),
            self._config,
            listener=self.registry.on_gossip,
            rng=self.rng,
            bind_host=settings.host if settings.host in addresses.WILDCARD_HOSTS else None,
            keyring=self.keys.ring,
        )
        self._stack.push_async_callback(self.gossip.close)
        self.registry.begin(incarnation, meta, host)
        await self.gossip.start()
        self.reporter.begin(self.gossip)
        self.gossip.add_seeds(settings.join)
        ticking = asyncio.create_task(self.reporter.run(self._config.gossip_interval_s), name="grapevine-tick")
        self._stack.push_async_callback(_cancelled, ticking)

    async def _start_discovery(self) -> None:
        if not self.settings.mdns:
            return
        from gossip.discovery import MdnsDiscovery  # zeroconf: the node answers already while it is loaded

        identity = self.gossip.identity
        discovery = MdnsDiscovery(identity, interfaces=[identity.host] if is_loopback(identity.host) else None)
        self._stack.push_async_callback(discovery.close)
        try:
            async with asyncio.timeout(DISCOVERY_S):
                await discovery.start(lambda address: self.gossip.add_seeds([address]))
        except (OSError, TimeoutError) as error:
            _log.warning("no multicast DNS here (%s): use --join", error or "it takes too long")

    async def _leave_well(self, http: HttpServer | Front) -> None:
        """End without anybody noticing; the caller sets the deadline."""
        self.readiness.leave()
        self.drainer.begin(self._grace_s)
        await asyncio.gather(self.drainer.over(), self.readiness.told(self._grace_s / 2))
        if self._routes is not None:
            self._routes.page.hub.close()
        await http.stop_accepting()
        await http.idle()

    async def _break_off(self, http: HttpServer | Front) -> None:
        """Tell the clients whose answers are not over that they end here."""
        why = "the node that it came through is stopping"
        self.dispatcher.end_streams(why)
        if not isinstance(http, HttpServer):
            http.end_streams(why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BREAK_OFF_S):
                await http.idle()

    async def _within_grace(self, work: Coroutine[None, None, None]) -> None:
        waits = [asyncio.ensure_future(work), asyncio.ensure_future(self._hurried.wait())]
        await asyncio.wait(waits, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    # --- control (`node.http.admin.Control`)

    def drain(self, timeout_s: float) -> None:
        """Take nothing new on our engine, hand over what can move, wait for the rest; the peers are told at once."""
        self.drainer.begin(timeout_s)

    async def resume(self) -> None:
        """Take requests again."""
        await self.drainer.resume()

    def drain_status(self) -> dict[str, object]:
        """How the drain goes. `answering` counts all requests but the one that asks."""
        answering = self._http.answering - 1 if self._http is not None else 0
        return {**self.drainer.status(), "answering": max(0, answering), "leaving": self.readiness.leaving}

    def leave(self, timeout_s: float) -> None:
        """Begin to stop, within that time."""
        self._grace_s = timeout_s
        self.readiness.leave()
        self.drainer.begin(timeout_s)
        self._on_leave()

    def join(self, addresses: Sequence[str]) -> None:
        """Dial these gossip addresses, again and again until somebody there is a member."""
        self.gossip.add_seeds(addresses)

    def reload(self) -> None:
        """Read the files of certificate and clients again."""
        self.reloader.ask()

    def vector(self) -> LoadVector:
        """Our own load, now."""
        return self.reporter.vector()

    def workers(self) -> list[dict[str, object]]:
        """The processes that serve HTTP, where there are several."""
        return [] if self._http is None or isinstance(self._http, HttpServer) else self._http.snapshot()

    # --- the parts

    @property
    def _boot_file(self) -> Path:
        return self.settings.node_dir / "boot"

    def _make_registry(self) -> Registry:
        registry = Registry(
            self.settings.name,
            metrics=self.metrics,
            downs=self.downs,
            own_load=self.reporter.glance,
            on_raised=lambda incarnation: raise_to(self._boot_file, incarnation),
            clock=self._clock,
        )
        registry.subscribe(self.room.stir_soon)
        return registry

    def _make_kv(self) -> KvSide:
        return KvSide(
            self.settings,
            secrets=lambda: self.keys.secrets(USE_TRANSFERS),
            meter=self.meter,
            metrics=self.metrics,
            digest=PrefixDigest(),
            publish=self.reporter.on_chunks,
            address_of=self.registry.kv_address,
            may_pull=self.registry.may_pull,
            holders=self.registry.holders,
            unlike=self.registry.unlike,
            learn_ratio=self.registry.roster.learn_ratio,
            on_engine=self.reporter.on_connector,
            on_lookup=_untold if self.tracing is None else self.tracing.looked_up,
            clock=self._clock,
        )

    def _make_rescue(self) -> Rescue:
        rescue = Rescue(
            self.settings.name,
            pool=lambda: self.kv.pool,
            prefixes=self.kv.digest,
            cluster=Heirs(self.registry),
            offer=Offering(self.settings.name, self.client, self.deadlines, peer_of=self.registry.meta),
            metrics=self.metrics,
            clock=self._clock,
        )
        self.registry.subscribe(rescue.stir)
        return rescue

    def _make_drain(self) -> Drain:
        return Drain(
            self.admission,
            self.handovers,
            self.rescue,
            copy_s=self.settings.drain_copy_s,
            publish=self.reporter.tick,
            clock=self._clock,
        )

    def _make_local(self) -> LocalRunner:
        return LocalRunner(
            engine=self.engine,
            admission=self.admission,
            meter=self.meter,
            kv=self.kv if self.tracing is None else self.tracing.kv(self.kv),
            deadlines=self.deadlines,
            vector=self.reporter.vector,
            clock=self._clock,
        )

    def _traced_local(self) -> Runner:
        return self.local if self.tracing is None else self.tracing.runner(self.local)

    def _make_peers(self) -> PeerRunner:
        return PeerRunner(
            self.client,
            self.deadlines,
            self.downs,
            peer_of=self.registry.meta,
            load_of=self.registry.load,
            moves_of=self.registry.moves,
        )

    def _make_dispatcher(self) -> Dispatcher:
        peers: Peers = self.peers
        notes: Notes = self.metrics
        if self.tracing is not None:
            peers, notes = self.tracing.peers(peers), self.tracing.notes(notes)
        return Dispatcher(
            self.settings.name,
            cluster=self.registry,
            policy=self.policy,
            local=WatchedRunner(self._traced_local(), self.flows),
            peers=WatchedPeers(peers, self.flows),
            room=self.room,
            downs=self.downs,
            deadlines=self.deadlines,
            handovers=self.handovers,
            notes=notes,
            rng=self.rng,
            clock=self._clock,
        )


def _untold(tag: str, peer: str, blocks: int, seconds: float) -> None:
    """Nobody keeps traces."""


def _server_tls(settings: Settings, trust: ClusterTrust) -> ServerTls | None:
    if not settings.tls_cert:
        return None
    return ServerTls(Path(settings.tls_cert), Path(settings.tls_key or settings.tls_cert), trust)


def gossip_preset(settings: Settings) -> GossipConfig:
    """Return the gossip timers that are set, or those for where the node is."""
    name = settings.gossip_preset
    if name == "auto":
        name = "loopback" if is_loopback(settings.advertise) else "lan"
    presets = {"loopback": GossipConfig.loopback, "lan": GossipConfig.lan, "wan": GossipConfig.wan}
    return presets[name](nodes=settings.cluster_size)


def is_loopback(host: str) -> bool:
    """Say whether an address is of this host alone."""
    return host.startswith("127.") or host in ("::1", "localhost")


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
