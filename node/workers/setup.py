"""Connects the parts of a node with its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from node.flows import WatchedPeers, WatchedRunner
from node.http.peer import PeerRoutes
from node.settings import Settings
from node.workers.desk import Parts
from node.workers.down import Hello
from node.workers.front import Front
from node.workers.runners import AskedDispatcher, AskedLocal, AskedPeers

if TYPE_CHECKING:
    from node.assembly import Node


def make_front(node: Node, routes: PeerRoutes, clock: Callable[[], float]) -> Front:
    """Return the front of a node whose parts are all made; not started."""
    settings = node.settings
    local = WatchedRunner(AskedLocal(node.local), node.flows)
    dispatcher = AskedDispatcher(
        settings.name,
        cluster=node.registry,
        policy=node.policy,
        local=local,
        peers=WatchedPeers(AskedPeers(node.peers), node.flows),
        room=node.room,
        downs=node.downs,
        deadlines=node.deadlines,
        handovers=node.handovers,
        notes=node.metrics,
        rng=node.rng,
        clock=clock,
    )
    parts = Parts(
        settings.name,
        dispatcher,
        guests=local,
        peers=node.peers,
        routes=routes,
        access=node.access,
        registry=node.registry,
        metrics=node.metrics,
        notes=node.metrics,
        handovers=node.handovers,
        vector=node.reporter.vector,
        queued_ms=lambda: node.meter.queued_ms(clock()),
        clock=clock,
    )
    front = Front(
        settings.workers,
        parts,
        hello=lambda number: hello(node, number),
        load=lambda: node.reporter.vector().encode(),
        inside=settings.inner_socket,
    )
    node.metrics.watch(front.gauges, front.totals)
    node.downs.subscribe(front.down)
    node.keys.subscribe(lambda: front.rekey(_roots(node)))
    node.reloader.subscribe(front.reread)
    return front


def hello(node: Node, number: int) -> Hello:
    """What a worker is greeted with."""
    address = node.engine.address
    return Hello(
        number,
        packed(node.settings),
        orjson.dumps(asdict(node.deadlines)),
        address.base,
        None if address.socket is None else str(address.socket),
        address.api_key,
        _roots(node),
    )


def packed(settings: Settings) -> bytes:
    """Settings as JSON, secrets included: they go to processes of ours over a socket without a name."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return orjson.dumps({name: str(value) if isinstance(value, Path) else value for name, value in values.items()})


def _roots(node: Node) -> tuple[bytes, ...]:
    return tuple(key.root for key in node.keys.ring)
