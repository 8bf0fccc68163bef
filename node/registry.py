"""Joins what gossip reports with what this node sees itself into one view of the cluster.

Rules:
1. Gossip events are the only source of membership, rows and slow state. What peers wrote is decoded here; what
   makes no sense is counted and dropped, the rest of it stands.
2. What this node sees itself (a refused connection, a fresh vector on a refusal) corrects the view at once: a
   peer that refuses connections is treated as suspected long before gossip says so.
3. A peer that is declared dead, leaves or restarts is told to everybody who waits for it (`Downs`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gossip import (
    GossipEvent,
    IncarnationRaised,
    MemberChanged,
    MemberView,
    NameConflict,
    RowReceived,
    SlowChanged,
    SlowReset,
)
from gossip import MemberState as GossipState
from node import load as load_vector
from node import models as model_records
from node.circuits import Circuits
from node.errors import RemoteError
from node.load import LoadVector
from node.meta import NodeMeta, decode_meta
from node.metrics import Metrics
from node.models import ModelInfo
from node.peer_info import PeerInfo, peer_info
from node.plan import Plan
from node.prompt import ParsedRequest
from node.relay.downs import Downs
from node.roster import Roster
from node.stored import StoredResponses
from node.view import Candidate, ClusterView, NodeState

#: A row is renewed several times a second: older than this, in seconds, it says nothing about what happens there now.
FRESH_S = 3.0
#: Slow-state keys of prefix chunks: this byte, then the hash, big-endian.
CHUNK_PREFIX = b"p"
#: What such a key holds: the chunk's KV is there, or its node's engine is about to compute it.
HELD, PROMISED = b"", b"p"
_CHUNK_KEY = 9

_log = logging.getLogger("grapevine.cluster")


class Registry:
    """The node's knowledge of the cluster. Lives in the event loop."""

    def __init__(
        self,
        name: str,
        *,
        metrics: Metrics,
        downs: Downs,
        own_load: Callable[[], LoadVector],
        on_raised: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.roster = Roster(name)
        self.circuits = Circuits()
        self._stored = StoredResponses()
        self._metrics = metrics
        self._downs = downs
        self._own_load = own_load
        self._subscribers: list[Callable[[], None]] = []
        self._on_raised = on_raised
        self._clock = clock
        self._meta: dict[str, NodeMeta] = {}
        self._hosts: dict[str, str] = {}
        self._up: frozenset[str] = frozenset()
        self._sends = itertools.count(1)
        #: Nodes whose slow state begins anew: what they served stays known until they say what they serve now,
        #: so that an error can name it.
        self._unread: set[str] = set()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after every change of what is known."""
        self._subscribers.append(callback)

    # --- what happens

    def begin(self, incarnation: int, meta: NodeMeta, host: str) -> None:
        """Enter ourselves, before the first gossip event."""
        self.roster.member(self.name, NodeState.ALIVE, incarnation=incarnation, kv_tls=meta.kv_tls)
        self._meta[self.name] = meta
        self._hosts[self.name] = host
        self._up = frozenset(self._hosts.values())
        self._count_members()

    def on_gossip(self, event: GossipEvent) -> None:
        """Take one event of the gossip agent."""
        match event:
            case MemberChanged():
                self._member(event.view)
            case RowReceived():
                self._row(event)
            case SlowChanged():
                self._slow(event)
            case SlowReset():
                self.roster.prefixes.drop(event.name)
                self._unread.add(event.name)
            case NameConflict():
                _log.warning("another node claims the name %s: %s:%s", event.name, event.host, event.port)
            case IncarnationRaised():
                self._on_raised(event.incarnation)
        self._changed()

    def rtts(self, members: list[MemberView]) -> dict[str, float]:
        """Take the measured round trips; returns those of live peers in milliseconds, nearest first."""
        measured: dict[str, float] = {}
        for view in members:
            if view.rtt_s is not None and not view.is_self and view.state.is_up:
                measured[view.name] = view.rtt_s * 1000.0
                self.roster.rtt(view.name, measured[view.name])
        return dict(sorted(measured.items(), key=lambda item: item[1]))

    def own_models(self, models: Mapping[str, ModelInfo]) -> None:
        """Take what our own engine serves now."""
        self.roster.models(self.name, models)
        self._changed()

    # --- what the dispatcher asks and tells

    def view(self, parsed: ParsedRequest) -> ClusterView:
        """Return the candidates for a request, now."""
        now = self._clock()
        view = self.roster.view(parsed.chunks, self._own_load(), now)
        if parsed.refers_to is not None:
            view = replace(view, owner=self._stored.owner(parsed))
        avoided = self._avoided(now)
        if not avoided:
            return view
        candidates = tuple(
            replace(c, state=NodeState.SUSPECT) if c.name in avoided and c.state is NodeState.ALIVE else c
            for c in view.candidates
        )
        return replace(view, candidates=candidates)

    def _avoided(self, now: float) -> set[str]:
        """Nodes that are left alone for now: few have a circuit, however many nodes there are."""
        return {name for name in self.circuits if self.circuits.avoided(name, self._incarnation(name), now)}

    def sent(self, plan: Plan) -> Callable[[bool], None]:
        """Count a request as sent until the returned function is called; our own vector counts itself."""
        self.roster.asked(plan.prompt_tokens, plan.matched_tokens)
        if plan.target == self.name:
            return lambda whole: None
        trial = self.circuits.sent(plan.target, self._clock())
        key = f"{plan.rid}#{next(self._sends)}"
        cost = plan.cost
        self.roster.sends.sent(key, plan.target, cost.prefill_ms if cost is not None else 0.0, self._clock())

        def ended(whole: bool) -> None:
            self.roster.sends.ended(key)
            self.circuits.ended(plan.target, trial)

        return ended

    def busy(self, target: str, load: LoadVector | None) -> None:
        """Learn that a target is full, and how full."""
        self.circuits.worked(target, self._clock())
        if load is not None and target != self.name:
            self.roster.fresh(target, load, self._clock())

    def failed(self, target: str, why: str) -> None:
        """Learn that a target could not begin."""
        if target != self.name:
            _log.info("%s could not take a request: %s", target, why)
            self.circuits.failed(target, self._incarnation(target), self._clock(), why)

    def worked(self, target: str) -> None:
        """Learn that a target answered."""
        if self.circuits:
            self.circuits.worked(target, self._clock())

    def row_age_s(self, target: str) -> float:
        """Return the seconds since a node's newest load row was true; infinite for a stranger."""
        node = self.roster.get(target)
        return node.age_s(self._clock()) if node is not None else float("inf")

    def answered(self, parsed: ParsedRequest, target: str, first: bytes) -> None:
        """Learn from the first piece of an answer without an error."""
        self._stored.answered(parsed, target, first)

    # --- what others ask

    def known(self, name: str) -> bool:
        """Say whether a node of that name is or was a member."""
        return self.roster.get(name) is not None

    def meta(self, name: str) -> NodeMeta | None:
        """What a node told of itself; None for a stranger."""
        return self._meta.get(name)

    def load(self, name: str) -> LoadVector:
        """Return the last load vector of a node, an empty one when there is none."""
        node = self.roster.get(name)
        return node.load if node is not None else LoadVector()

    def moves(self, name: str) -> int | None:
        """Return the count of the signs of life of a node's engine, None when nothing new is heard of it."""
        node = self.roster.get(name)
        if node is None or node.state is not NodeState.ALIVE or node.age_s(self._clock()) > FRESH_S:
            return None
        return node.load.moves

    def kv_address(self, name: str) -> str | None:
        """Return where a live node serves its KV blocks, host:port."""
        meta, node = self._meta.get(name), self.roster.get(name)
        if meta is None or node is None or node.state in (NodeState.DEAD, NodeState.LEFT):
            return None
        return meta.kv or None

    def member_hosts(self) -> frozenset[str]:
        """Return the addresses of current members, ourselves included."""
        return self._up

    def serves(self, model: str) -> bool:
        """Say whether our own engine serves ``model``; an empty name stands for its only one."""
        me = self.roster.get(self.name)
        return me is not None and (model in me.models or not model)

    def may_pull(self, model: str) -> bool:
        """Say whether blocks of ``model`` may be pulled for our engine: its fingerprint covers them."""
        me = self.roster.get(self.name)
        info = me.models.get(model) if me is not None else None
        return info is not None and bool(info.fingerprint)

    def holders(self, model: str, chunks: Sequence[int]) -> dict[str, int]:
        """Return the live nodes that hold a prefix of these chunks in blocks for us, and how many chunks of it."""
        ours = self.roster.get(self.name)
        info = ours.models.get(model) if ours is not None else None
        if ours is None or info is None or not info.fingerprint:
            return {}
        prefixes = self.roster.prefixes
        given = prefixes.given(chunks)
        longest = prefixes.longest(chunks) if given is None else given
        found: dict[str, int] = {}
        for name, held in longest.items():
            node = self.roster.get(name)
            if node is not None and _fingerprint(node, model) == info.fingerprint and node.exchanges_kv_with(ours):
                found[name] = held
        return found

    def unlike(self) -> dict[str, str]:
        """Return the nodes that serve a model of ours and whose KV blocks we cannot use, and why, in words."""
        ours = self.roster.get(self.name)
        return {} if ours is None else {name: why for name in self.roster.names() if (why := self._unlike(name, ours))}

    def _unlike(self, name: str, ours: Candidate) -> str:
        node = self.roster.get(name)
        if node is None or node is ours:
            return ""
        for model, info in ours.models.items():
            fingerprint = _fingerprint(node, model)
            if not info.fingerprint or not fingerprint:
                continue
            if fingerprint != info.fingerprint:
                return f"another fingerprint of {model}"
            if not node.exchanges_kv_with(ours):
                return f"they travel {node.kv_way}, ours {ours.kv_way}: start both with --kv-tls or neither"
        return ""

    def models_union(self) -> dict[str, object]:
        """Return the answer to `GET /v1/models`."""
        return model_records.union(self.roster.catalogues())

    def serving(self) -> list[str]:
        """Return the nodes that could take a request of some kind now."""
        own = self._own_load()
        names = []
        for name in self.roster.names():
            node = self.roster.get(name)
            if node is None or not node.models or node.state not in (NodeState.ALIVE, NodeState.SUSPECT):
                continue
            load = own if name == self.name else node.load
            if load.ready and not load.draining:
                names.append(name)
        return sorted(names)

    def describe(self, name: str) -> PeerInfo:
        """Return what is known of one node."""
        node, now = self.roster.get(name), self._clock()
        if node is None:
            return PeerInfo()
        return peer_info(
            node,
            self._meta.get(name),
            own=self._own_load() if name == self.name else None,
            digest_size=self.roster.prefixes.count(name),
            avoided=self.circuits.avoided(name, node.incarnation, now),
            circuit=self.circuits.describe(name, node.incarnation, now),
            now=now,
        )

    # --- gossip, in detail

    def _member(self, view: MemberView) -> None:
        if view.is_self:
            return
        before = self._incarnation(view.name)
        rtt_ms = None if view.rtt_s is None else view.rtt_s * 1000.0
        # Known from hearsay only: like a suspect, it gets work when there is nobody better.
        state = view.state if view.verified or not view.state.is_up else GossipState.SUSPECT
        try:
            self._meta[view.name] = decode_meta(view.meta)
        except RemoteError:
            self._metrics.remote_errors.labels("meta").inc()
        meta = self._meta.get(view.name)
        self.roster.member(
            view.name,
            NodeState(state.value),
            incarnation=view.incarnation,
            rtt_ms=rtt_ms,
            kv_tls=meta.kv_tls if meta is not None else None,
        )
        if view.state.is_up:
            self._hosts[view.name] = view.host
        else:
            self._hosts.pop(view.name, None)
        self._up = frozenset(self._hosts.values())
        # A node that left finishes what it has: only the dead and the restarted are given up.
        if view.state is GossipState.DEAD or 0 < before < view.incarnation:
            self._downs.down(view.name)
        self._forget_strangers()
        self._count_members()

    def _row(self, event: RowReceived) -> None:
        row = event.row
        try:
            load = load_vector.decode(row.payload)
        except RemoteError:
            self._metrics.remote_errors.labels("row").inc()
            return
        if row.name != self.name:
            self.roster.row(
                row.name,
                incarnation=row.incarnation,
                seq=row.seq,
                load=load,
                age_s=row.age_s,
                now=self._clock(),
            )

    def _slow(self, event: SlowChanged) -> None:
        node = self.roster.get(event.name)
        if node is None or event.name == self.name:
            return
        models = {} if event.name in self._unread else dict(node.models)
        self._unread.discard(event.name)
        for key, value in event.changes:
            if key.startswith(CHUNK_PREFIX) and len(key) == _CHUNK_KEY:
                chunk = int.from_bytes(key[1:], "big")
                if value is None:
                    self.roster.prefixes.forget(event.name, chunk)
                else:
                    self.roster.prefixes.learn(event.name, chunk, promised=value == PROMISED)
            elif key.startswith(model_records.KEY_PREFIX):
                self._model(models, key, value)
        if models != node.models:
            self.roster.models(event.name, models)

    def _model(self, models: dict[str, ModelInfo], key: bytes, value: bytes | None) -> None:
        for model_id in [known for known, info in models.items() if info.key == key]:
            del models[model_id]
        if value is None:
            return
        try:
            info = model_records.decode(value)
        except RemoteError:
            self._metrics.remote_errors.labels("model").inc()
            return
        if info.key == key:
            models[info.id] = info

    def _changed(self) -> None:
        for callback in self._subscribers:
            callback()

    def _incarnation(self, name: str) -> int:
        node = self.roster.get(name)
        return node.incarnation if node is not None else 0

    def _forget_strangers(self) -> None:
        """Keep our tables within the roster's bound."""
        for name in [name for name in self._meta if self.roster.get(name) is None]:
            del self._meta[name]
            self._hosts.pop(name, None)
            self._unread.discard(name)

    def _count_members(self) -> None:
        counts = dict.fromkeys((state.value for state in GossipState), 0)
        for name in self.roster.names():
            node = self.roster.get(name)
            if node is not None:
                counts[node.state.value] += 1
        for state, count in counts.items():
            self._metrics.members.labels(state).set(count)


def _fingerprint(node: Candidate, model: str) -> bytes:
    info = node.models.get(model) if node.state is NodeState.ALIVE else None
    return info.fingerprint if info is not None else b""


def chunk_key(chunk: int) -> bytes:
    """Return the slow-state key of a prefix chunk."""
    return CHUNK_PREFIX + chunk.to_bytes(8, "big")
