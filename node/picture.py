"""The cluster as the page draws it: one object for the first look, smaller ones for each tick after it.

Columns instead of records keep a tick of a hundred nodes near 15 KB. Names of nodes and models stand once; edges and
flows name nodes by their place in the columns. Nothing in it is secret: it is what `/gossip/state` shows, the last
requests without their text, and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from gossip import MemberView
from node import history
from node.decisions import Decision, DecisionLog
from node.flows import Flows
from node.history import History
from node.peer_info import PeerInfo

#: Requests in the first look, and in one tick.
FIRST_ROWS = 100
TICK_ROWS = 50
#: Edges per node that are drawn (the nearest ones), and edges in all.
EDGES_PER_NODE = 4
MAX_EDGES = 2048
#: Transfer rates between nodes that are shown.
MAX_RATES = 512
#: Nodes in a tick: those beyond are counted.
MAX_NODES = 1024

#: Attributes of a load vector that are shown, and digits kept.
_LOAD = {
    "running": 0,
    "waiting": 0,
    "slots": 0,
    "queued_tokens": 0,
    "kv_use": 3,
    "prefill_tps": 0,
    "decode_tps": 1,
    "ttft_p50_ms": 1,
    "ttft_p95_ms": 1,
    "itl_p50_ms": 1,
    "e2e_p50_ms": 0,
}

Section = Callable[[], Mapping[str, Any]]


class Picture:
    """Builds the messages of `/page/events`, encoded."""

    def __init__(
        self,
        name: str,
        cluster: str,
        build: str,
        *,
        members: Callable[[], list[MemberView]],
        describe: Callable[[str], PeerInfo],
        engine: Section,
        kv: Section,
        log: DecisionLog,
        ids: bool,
        clock: Callable[[], float],
        past: History,
        flows: Flows,
    ) -> None:
        self._fixed = {"self": name, "cluster": cluster, "build": build}
        self._members = members
        self._describe = describe
        self._engine = engine
        self._kv = kv
        self._log = log
        self._ids = ids
        self._clock = clock
        self._past = past
        self._flows = flows
        self._shown = 0
        self._told_step = 0

    def nodes(self) -> int:
        """Members known, the dead included until they are forgotten."""
        return len(self._members())

    def first(self) -> bytes:
        """The whole: what a page needs when it opens, or has missed a tick."""
        past = {"columns": history.COLUMNS, "step_s": history.STEP_S, "points": history.POINTS}
        told = self._now() | {
            **self._fixed,
            "past": past,
            "steps": self._past.points(),
            "requests": self._requests(0, FIRST_ROWS),
        }
        return orjson.dumps(told)

    def tick(self) -> bytes:
        """What is now, and what is new since the tick before."""
        told = self._now() | {
            "steps": self._past.points(self._told_step),
            "requests": self._requests(self._shown, TICK_ROWS),
        }
        self._shown, self._told_step = self._log.last, int(self._past.now())
        return orjson.dumps(told)

    def _requests(self, after: int, most: int) -> list[dict[str, object]]:
        now = self._clock()
        return [_request(decision, now, self._ids) for decision in self._log.since(after, most)]

    def _now(self) -> dict[str, object]:
        views = sorted(self._members(), key=lambda view: (not view.is_self, view.name))
        hidden = len(views) - MAX_NODES
        views = views[:MAX_NODES]
        peers = [self._describe(view.name) for view in views]
        place = {view.name: index for index, view in enumerate(views)}
        models = sorted({model for peer in peers for model in peer.models})
        return {
            "now": round(self._past.now(), 2),
            "hidden": max(0, hidden),
            "models": models,
            "nodes": _columns(views, peers, {model: index for index, model in enumerate(models)}),
            "edges": _edges(views, peers, place),
            "rates": _rates(peers, place),
            "forwards": _placed(self._flows.forwards(), place),
            "pulls": _placed(self._flows.pulls(), place),
            "engine": _engine(self._engine()),
            "kv": _kv(self._kv()),
        }


def _request(decision: Decision, now: float, ids: bool) -> dict[str, object]:
    """One request; ``cached_tokens`` as the engine told, or as they were predicted where it told nothing."""
    plan = decision.plan
    predicted = plan.matched_tokens if plan is not None else 0
    return {
        **decision.short(now, ids=ids),
        "seq": decision.seq,
        "first_byte_ms": None if decision.first_byte_ms is None else round(decision.first_byte_ms, 1),
        "expected_ms": None if decision.predicted_ms is None else round(decision.predicted_ms, 1),
        "prompt_tokens": plan.prompt_tokens if plan is not None else 0,
        "cached_tokens": predicted if decision.cached_tokens is None else decision.cached_tokens,
        "source": plan.source if plan is not None else None,
        "pulled_blocks": decision.pulled_blocks or 0,
        "refused_by": list(plan.visited) if plan is not None else [],
        "cost_ms": round(plan.cost.total_ms, 1) if plan is not None and plan.cost is not None else None,
        "others": [(name, round(cost, 1)) for name, cost in decision.others],
        "broke": decision.broke,
    }


def _columns(views: list[MemberView], peers: list[PeerInfo], models: Mapping[str, int]) -> dict[str, list[object]]:
    pairs = list(zip(views, peers, strict=True))
    columns: dict[str, list[object]] = {
        "name": [view.name for view in views],
        "state": [_state(view, peer) for view, peer in pairs],
        "state_age_s": [round(view.state_age_s) for view in views],
        "address": [f"{view.host}:{view.port}" for view in views],
        "http": [peer.http for peer in peers],
        "version": [peer.version for peer in peers],
        "incarnation": [view.incarnation for view in views],
        "models": [sorted(models[model] for model in peer.models) for peer in peers],
        "rtt_ms": [None if view.rtt_s is None else _round(view.rtt_s * 1000.0, 2) for view in views],
        "age_s": [None if peer.load_age_s is None else round(peer.load_age_s, 1) for peer in peers],
        "chunks": [peer.digest_size for peer in peers],
        "suspected_by": [len(view.suspected_by) for view in views],
        "avoided": [peer.avoided for peer in peers],
    }
    for name, digits in _LOAD.items():
        columns[name] = [None if p.load is None else _round(getattr(p.load, name), digits) for p in peers]
    return columns


def _state(view: MemberView, peer: PeerInfo) -> str:
    """One word: gossip's, or of a living node whether it takes requests."""
    if view.state.value != "alive" or peer.load is None:
        return view.state.value
    if peer.load.draining:
        return "draining"
    return "alive" if peer.load.ready else "loading"


def _edges(views: list[MemberView], peers: list[PeerInfo], place: Mapping[str, int]) -> list[tuple[int, int, float]]:
    """Round trips in milliseconds, each pair once: all of our own, and the nearest of each other node."""
    found: dict[tuple[int, int], float] = {}
    for index, view in enumerate(views):
        if index and view.rtt_s is not None and view.state.is_up and len(found) < MAX_EDGES:
            found[0, index] = view.rtt_s * 1000.0
    for index, peer in enumerate(peers):
        if peer.load is None or not views[index].state.is_up:
            continue
        near = (place[name] for name in list(peer.load.rtts)[:EDGES_PER_NODE] if name in place)
        for other in near:
            pair = (index, other) if index < other else (other, index)
            if index != other and len(found) < MAX_EDGES:
                found.setdefault(pair, peer.load.rtts[views[other].name])
    return [(*pair, _round(value, 2)) for pair, value in found.items()]


def _rates(peers: list[PeerInfo], place: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Bytes per second of the last KV transfers, as (source, target, rate): each puller gossips its own."""
    rates = (
        (place[source], index, int(rate))
        for index, peer in enumerate(peers)
        if peer.load is not None
        for source, rate in peer.load.rates.items()
        if source in place
    )
    return [triple for triple, _ in zip(rates, range(MAX_RATES), strict=False)]


def _placed(flows: Iterable[tuple[str, str, int]], place: Mapping[str, int]) -> list[tuple[int, int, int]]:
    return [(place[a], place[b], count) for a, b, count in flows if a in place and b in place]


def _engine(section: Mapping[str, Any]) -> dict[str, object]:
    """What of the engine's state is for everybody: no process id, no path."""
    return {name: section.get(name) for name in ("state", "reason", "progress", "version", "starts")}


def _kv(section: Mapping[str, Any]) -> dict[str, object]:
    pool = section.get("pool") or {}
    shown = ("capacity_bytes", "used_bytes", "blocks", "block_bytes", "evictions", "hits", "misses")
    return {
        "enabled": bool(section.get("enabled")),
        "connected": bool(section.get("connected")),
        "corrupt": section.get("corrupt", 0),
        "block_tokens": section.get("block_tokens", 0),
        "pool": {name: pool.get(name, 0) for name in shown} if pool else None,
    }


def _round(value: float, digits: int) -> float:
    return round(value, digits) if digits else round(value)
