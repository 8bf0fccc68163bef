"""A cluster in virtual time: real decisions over gossip that is late, emulated engines, a trace.

What is real: `node.decide` with its policies, `LoadMeter`, `Roster`, `PeerPrefixes` and `OwnSends`. What is modelled:
- Load vectors are taken every `vector_s` and seen `delay_s` later. Entries share a few rosters, each with its own
  phases, instead of having one each: what an entry sent itself stays its own.
- Prefix digests reach everybody `digest_s` after the engine got a prompt, stored or evicted a block. One trace block
  of 512 tokens counts as one chunk; the bounds of the index are divided by four: a real chunk is about 128 tokens.
- Pulled blocks come one pull after the other from each source, at `net_bytes_s`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from benches.simnode import Request, SimNode
from benches.traces import BLOCK_TOKENS, Arrival
from node import peerprefix
from node.chunks import CHUNK_BYTES
from node.decide import decide
from node.emulator import EngineConfig
from node.load import LoadVector
from node.models import ModelInfo
from node.peerprefix import PeerPrefixes
from node.plan import Plan, RouteOptions
from node.policy import Policy
from node.policy.pull import PullModel
from node.prompt import ParsedRequest
from node.roster import Roster
from node.view import Candidate, ClusterView, NodeState

MODEL = "m"
MAX_BOUNCES = 2
#: A real chunk is about so many tokens: the index holds that much less per entry than ours.
CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The cluster. Seconds, bytes."""

    nodes: int
    engine: EngineConfig
    vector_s: float = 0.5
    delay_s: float = 0.5
    digest_s: float = 1.0
    rtt_s: float = 0.0005
    net_bytes_s: float = 12.5e9
    memory_bytes_s: float = 25e9
    rosters: int = 8
    seed: int = 1

    @property
    def pull(self) -> PullModel:
        """The pull formula with this world's memory and one source; how fast the network is has to be found out."""
        return PullModel(memory=self.memory_bytes_s, more=0)


class Placing(Protocol):
    """Where a request goes: the target, and the source of a pull."""

    def __call__(self, cluster: SimCluster, request: Request, now: float) -> tuple[int, int | None]:
        """Called when the request arrives at its entry."""
        ...


class SimCluster:
    """One run over one trace."""

    def __init__(self, world: World, placing: Placing) -> None:
        self.world = world
        self.rng = random.Random(world.seed)
        self.now = 0.0
        self.nodes = [SimNode(number, world.engine) for number in range(world.nodes)]
        scale = BLOCK_TOKENS // CHUNK_TOKENS
        self.index = PeerPrefixes(
            max_per_node=peerprefix.MAX_PER_NODE // scale, max_pairs=peerprefix.MAX_PAIRS // scale
        )
        self._placing = placing
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self.finished: list[Request] = []
        self.decisions = 0
        self.bounces = 0
        self.asked = 0
        self._rosters = [self._roster() for _ in range(min(world.rosters, world.nodes))]

    def _roster(self) -> Roster:
        roster = Roster("", prefixes=self.index)
        info = ModelInfo(
            MODEL,
            max_model_len=self.world.engine.max_model_len,
            block_size=self.world.engine.block_size,
            kv_token_bytes=self.world.engine.kv_token_bytes,
            fingerprint=b"f" * 16,
            kv_tokens=self.world.engine.kv_tokens,
        )
        for node in self.nodes:
            roster.member(node.name, NodeState.ALIVE, incarnation=1, rtt_ms=self.world.rtt_s * 1000)
            roster.models(node.name, {MODEL: info})
            roster.row(node.name, incarnation=1, seq=1, load=node.vector(0.0), age_s=0.0, now=0.0)
            node.seq = 1
        return roster

    def run(self, arrivals: Sequence[Arrival]) -> list[Request]:
        """Play the trace until every request is done."""
        for number, arrival in enumerate(arrivals):
            entry = self.rng.randrange(len(self.nodes))
            self._at(arrival.at, partial(self._arrive, Request(f"r{number}", arrival, entry)))
        for node in self.nodes:
            self._at(self.rng.random() * self.world.vector_s, partial(self._take_vector, node))
        while self._events and len(self.finished) < len(arrivals):
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.finished

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ticket), event))

    # --- gossip

    def _take_vector(self, node: SimNode) -> None:
        node.seq += 1
        load = node.vector(self.now)
        for number in range(len(self._rosters)):
            late = self.world.delay_s * (0.5 + self.rng.random())
            self._at(self.now + late, partial(self._see, number, node.name, node.seq, load, self.now))
        if any(node.told):
            self._at(self.now + self.world.digest_s, partial(self._see_digest, node, *node.told))
            node.told = ([], [], [])
        self._at(self.now + self.world.vector_s * (0.9 + 0.2 * self.rng.random()), partial(self._take_vector, node))

    def _see(self, number: int, name: str, seq: int, load: LoadVector, taken: float) -> None:
        roster = self._rosters[number]
        roster.row(name, incarnation=1, seq=seq, load=load, age_s=self.now - taken, now=self.now)

    def _see_digest(self, node: SimNode, added: list[int], gone: list[int], promised: list[int]) -> None:
        cache = node.engine.cache
        for block in promised:
            self.index.learn(node.name, block, promised=block not in cache)
        for block in gone:
            if block not in cache:
                self.index.forget(node.name, block)
        for block in added:
            if block in cache:
                self.index.learn(node.name, block)

    # --- a request

    def _arrive(self, request: Request) -> None:
        target, source = self._placing(self, request, self.now)
        request.target = target
        node = self.nodes[target]
        late = 0.0 if target == request.entry else self.world.rtt_s / 2
        if source is not None:
            late += self._pull(request, node, self.nodes[source])
        self._at(self.now + late, partial(self._begin, node, request))

    def _pull(self, request: Request, node: SimNode, source: SimNode) -> float:
        """Seconds until the blocks are there; they are put into the target's cache when the request begins."""
        keys = request.arrival.blocks
        have = node.engine.cache.match(keys, len(keys))
        held = source.engine.cache.match(keys, min(len(keys), request.pull_limit))
        size = max(0, held - have) * BLOCK_TOKENS * self.world.engine.kv_token_bytes
        model = self.world.pull
        begin = max(self.now + model.lookup_ms / 1000, source.link_free)
        source.link_free = begin + size / self.world.net_bytes_s
        node.rates.pulled(
            source.name, size, model.lookup_ms / 1000 + size / self.world.net_bytes_s, model.lookup_ms / 1000
        )
        request.pulled, request.pull_to = max(0, held - have) * BLOCK_TOKENS, held
        return source.link_free - self.now + self.world.rtt_s + size / self.world.memory_bytes_s

    def _begin(self, node: SimNode, request: Request) -> None:
        if request.pull_to:
            blocks = request.arrival.blocks[: request.pull_to]
            fresh = [block for block in blocks if block not in node.engine.cache]
            node.engine.insert(blocks, self.now)
            node.told[0].extend(fresh)
        node.begin(request, self.now)
        self._go_on(node)

    def _go_on(self, node: SimNode) -> None:
        for request in node.hear(self.now):
            self.finished.append(request)
            self.nodes[request.entry].sends.ended(request.rid)
        due = node.engine.due
        if due is not None and due != node.scheduled:
            node.scheduled = due
            self._at(max(due, self.now), partial(self._due, node, due))

    def _due(self, node: SimNode, due: float) -> None:
        if node.scheduled == due:
            node.scheduled = -1.0
            self._go_on(node)

    # --- what an entry sees

    def view(self, request: Request, now: float) -> ClusterView:
        """The view of a request's entry: its own vector live, the others' as gossip brought them."""
        entry = self.nodes[request.entry]
        number = request.entry % len(self._rosters)
        seen = self._rosters[number].view(request.arrival.blocks, entry.vector(now), now)
        candidates = list(seen.candidates)
        me = candidates[request.entry]
        mine = Candidate(me.name, entry.vector(now), now, me.state, True, None, me.models, me.incarnation, me.seq)
        candidates[request.entry], candidates[0] = candidates[0], mine
        self._sync(entry, self._rosters[number])
        return replace(seen, candidates=tuple(candidates), unseen=entry.sends.unseen)

    def roster(self, entry: SimNode) -> Roster:
        """What an entry knows, with those who share it."""
        return self._rosters[entry.number % len(self._rosters)]

    def fresh(self, entry: SimNode, target: SimNode) -> None:
        """A target refused, and told its load: to all who share the roster, though only one of them asked."""
        self.roster(entry).fresh(target.name, target.vector(self.now), self.now)

    def _sync(self, entry: SimNode, roster: Roster) -> None:
        """Compare our own sends with the vectors that came since."""
        for name in list(entry.sends.unseen) + list(entry.synced):
            seen = roster.get(name)
            if seen is not None and seen.as_of > entry.synced.get(name, -1.0):
                entry.sends.vector(name, seen.as_of, seen.hop_ms)
                entry.synced[name] = seen.as_of


class Grapevine:
    """Requests go where `node.decide` says, as `node.relay.dispatch` would do it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __call__(self, cluster: SimCluster, request: Request, now: float) -> tuple[int, int | None]:
        """Decide; a full target bounces it."""
        entry, visited, asked = cluster.nodes[request.entry], list[str](), 0
        parsed = parsed_request(request.arrival)
        while True:
            cluster.decisions += 1
            options = RouteOptions(rid=request.rid, visited=tuple(visited), asked=asked)
            plan = decide(
                cluster.view(request, now), parsed, self.policy, now, cluster.rng, entry=entry.name, options=options
            )
            assert isinstance(plan, Plan) and plan.cost is not None
            target = cluster.nodes[int(plan.target[1:])]
            if plan.patience_ms and target.meter.queued_ms(now) > plan.patience_ms:
                cluster.asked += 1
                asked += 1
            elif len(visited) == MAX_BOUNCES or len(target.requests) < target.config.max_num_seqs:
                break
            else:
                cluster.bounces += 1
                visited.append(plan.target)
            cluster.fresh(entry, target)
        request.predicted = plan.matched_tokens
        cluster.roster(entry).asked(plan.prompt_tokens, plan.matched_tokens)
        if target is not entry:
            entry.sends.sent(request.rid, target.name, plan.cost.prefill_ms, now)
            entry.synced.setdefault(target.name, -1.0)
        if plan.source is not None:
            request.pull_limit = plan.chunks
        return target.number, None if plan.source is None else int(plan.source[1:])


def parsed_request(arrival: Arrival) -> ParsedRequest:
    """The request as the entry would have parsed it; a chunk is a trace block."""
    return ParsedRequest(
        path="/v1/completions",
        model=MODEL,
        chunks=arrival.blocks,
        prompt_bytes=arrival.tokens * CHUNK_BYTES // BLOCK_TOKENS,
        est_prompt_tokens=arrival.tokens,
        exact_tokens=True,
        max_tokens=None,
    )
