"""Puts the HTTP routes of a node together, with the gauges and the engine's metrics that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from node import __version__
from node.engine_metrics import read_page, with_node
from node.http.admin import Admin
from node.http.events import EventHub
from node.http.explain import Explain
from node.http.health import HealthRoutes
from node.http.intake import BodyRoom
from node.http.openai import OpenAi
from node.http.page import PageRoutes, build_of, page_files
from node.http.peer import PeerRoutes
from node.http.server import Routes
from node.http.state import StateRoutes
from node.http.take import TakeRoute
from node.metrics import Sample
from node.picture import Picture

if TYPE_CHECKING:
    from gossip import GossipAgent
    from node.assembly import Node
    from node.tls import ServerTls


def make_routes(node: Node, clock: Callable[[], float]) -> Routes:
    """Return every route of a node whose parts are all made."""
    settings, registry, metrics = node.settings, node.registry, node.metrics
    metrics.watch(lambda: gauges(node), lambda: totals(node))
    metrics.registry.register(node.access)
    if node.tls is not None:
        metrics.watch(lambda: certificate(node.tls))
    metrics.about(node=settings.name, cluster=settings.cluster, version=__version__)
    bodies = BodyRoom(settings.max_body_mib)
    openai = OpenAi(
        settings, registry, node.dispatcher, bodies=bodies, access=node.access, tracing=node.tracing, clock=clock
    )
    peer = PeerRoutes(
        settings,
        registry=registry,
        signer=node.signer,
        local=node.guests,
        metrics=metrics,
        deadlines=node.deadlines,
        bodies=bodies,
        handovers=node.handovers,
        vector=node.reporter.vector,
        queued_ms=lambda: node.meter.queued_ms(clock()),
        tracing=node.tracing,
        clock=clock,
    )
    return Routes(
        openai=openai,
        explain=Explain(openai, node.dispatcher, metrics.log, clock),
        peer=peer,
        take=TakeRoute(peer, node.kv, draining=lambda: node.admission.draining, metrics=metrics),
        state=StateRoutes(
            settings.name,
            settings.cluster,
            members=node.gossip.members,
            registry=registry,
            sections={
                "gossip": lambda: gossip_state(node.gossip),
                "queue": node.room.snapshot,
                "drain": node.drain_status,
                "kv": node.kv.snapshot,
                "engine": node.engine.snapshot,
                "hits": metrics.hits.snapshot,
                "host": node.host.snapshot,
                **({"workers": node.workers} if settings.workers > 1 else {}),
            },
            decisions=lambda: metrics.log.latest(clock(), ids=not settings.has_clients),
        ),
        health=HealthRoutes(node.readiness, metrics, lambda: engine_metrics(node)),
        admin=Admin(settings, node, keys=KeyAdmin(node), kv=node.kv, calls=metrics.admin),
        page=make_page(node, clock),
    )


def make_page(node: Node, clock: Callable[[], float]) -> PageRoutes:
    """Return the page's routes; what it shows is read when somebody looks."""
    files, settings = page_files(), node.settings
    picture = Picture(
        settings.name,
        settings.cluster,
        build_of(files),
        members=node.gossip.members,
        describe=node.registry.describe,
        engine=node.engine.snapshot,
        kv=node.kv.snapshot,
        log=node.metrics.log,
        ids=not settings.has_clients,
        clock=clock,
        past=node.metrics.history,
        flows=node.flows,
    )
    return PageRoutes(files, EventHub(picture))


def gossip_state(agent: GossipAgent) -> dict[str, object]:
    """Return how gossip itself does: health, keys by id, own coordinate, counters, whom it dialled in vain.

    The members are shown elsewhere.
    """
    shown = agent.snapshot()
    del shown["members"]
    return {**shown, "failed_dials": agent.failed_dials()}


class KeyAdmin:
    """The ring as `/admin/keys` sees it."""

    def __init__(self, node: Node) -> None:
        self.add = node.keys.add
        self.use = node.keys.use
        self.remove = node.keys.remove
        self.list = node.gossip.keyring_view


def gauges(node: Node) -> Iterable[Sample]:
    """Return what is read at the moment of a scrape."""
    load = node.reporter.vector()
    pool = node.kv.pool.stats() if node.kv.pool is not None else None
    yield "engine_ready", "1 when the own engine takes requests.", float(load.ready)
    yield "draining", "1 when the node takes nothing new.", float(load.draining)
    yield "active_requests", "Requests that hold a place on the own engine.", float(node.admission.active)
    yield "queued_requests", "Requests that wait for a place anywhere.", float(len(node.room))
    yield "queued_tokens", "Prompt tokens still to be computed here.", float(load.queued_tokens)
    yield "kv_use_ratio", "Share of the engine's KV cache in use.", load.kv_use
    yield "prefix_chunks", "Prefix chunks known over all nodes.", float(len(node.registry.roster.prefixes))
    if pool is not None:
        yield "pool_used_bytes", "Bytes of KV in the pool.", float(pool.used_bytes)
        yield "pool_capacity_bytes", "Size of the pool.", float(pool.capacity_bytes)
        yield "pool_blocks", "Blocks of KV in the pool.", float(pool.blocks)
        yield "pool_protected_blocks", "Of them, blocks that were used again.", float(pool.protected)
        yield "pool_leased_blocks", "Blocks that peers read at the moment.", float(pool.leases)
    yield "kv_unlike_nodes", "Nodes of a model of ours whose KV blocks we cannot use.", float(len(node.kv.unlike()))


def certificate(tls: ServerTls | None) -> Iterable[Sample]:
    """Return how long the certificate of the HTTP port is good."""
    if tls is not None:
        yield "tls_certificate_end_timestamp_seconds", "When the certificate ends, since 1970.", tls.not_after


def totals(node: Node) -> Iterable[Sample]:
    """Return what is counted elsewhere, as it is at the moment of a scrape."""
    if node.kv.pool is not None:
        pool = node.kv.pool.stats()
        yield "pool_evicted_blocks", "Blocks evicted from the pool.", float(pool.evictions)
        yield "pool_recalled_blocks", "Blocks stored again soon after they were evicted.", float(pool.recalled)
        yield "pool_hit_blocks", "Blocks looked up in the pool by peers and found.", float(pool.hits)
        yield "pool_missed_blocks", "Blocks looked up in the pool by peers and not found.", float(pool.misses)
    if node.kv.server is not None:
        served = node.kv.server.stats()
        yield "served_kv_bytes", "Bytes of KV sent to peers.", float(served.bytes)
        yield "pinned_kv_bytes", "Bytes of KV that peers of this host read themselves.", float(served.pinned_bytes)
        yield "kv_busy_answers", "Transfers of peers that were told to come again.", float(served.busy)
        yield "kv_refused_connections", "KV connections without the cluster key.", float(served.unauthorized)


async def engine_metrics(node: Node) -> bytes:
    """Return the engine's own metrics, labelled with the node's name; nothing when it does not answer."""
    engine = node.engine
    return with_node(await read_page(node.looks, engine.address), node.settings.name) if engine.ready else b""
