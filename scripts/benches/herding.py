"""A queueing model of many entries that decide on gossiped vectors: real decisions, real meters, virtual time.

Every peer is an entry and serves `slots` requests at once; service times are lognormal. What is measured is the wait
from arrival to a slot. The way of a request is that of `node.relay.dispatch`: decide, ask the target, who admits on its
live state or refuses with its fresh vector; after two bounces the request stands in its entry's line, whose head
decides anew whenever a vector arrives or a slot of the entry becomes free.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from node.decide import decide
from node.load import LoadVector
from node.meter import LoadMeter
from node.models import ModelInfo
from node.plan import Refusal, RouteOptions
from node.policy import make_policy
from node.prompt import ParsedRequest
from node.roster import Roster
from node.view import NodeState

MODEL = "m"
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
REQUEST = ParsedRequest(
    path="/v1/completions", model=MODEL, est_prompt_tokens=PROMPT_TOKENS, prompt_bytes=256, max_tokens=OUTPUT_TOKENS
)
MAX_BOUNCES = 2
#: Share of a request's service that is its prefill, for the meters.
PREFILL_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    """The cluster and its load. Seconds."""

    peers: int = 16
    slots: int = 8
    service_s: float = 2.0
    sigma: float = 1.0
    load: float = 0.85
    gossip_s: float = 1.0
    #: So many peers serve four times slower.
    slow: int = 0
    one_entry: bool = False
    requests: int = 20_000


@dataclass(slots=True, eq=False)
class Request:
    rid: str
    arrived: float
    entry: Peer


@dataclass(slots=True, eq=False)
class Peer:
    """An entry, and the engine behind it."""

    name: str
    roster: Roster
    meter: LoadMeter
    slow: float
    running: int = 0
    queue: deque[Request] = field(default_factory=deque)
    line: deque[Request] = field(default_factory=deque)
    seq: int = 0

    @property
    def active(self) -> int:
        return self.running + len(self.queue)

    def vector(self, now: float) -> LoadVector:
        return self.meter.vector(now, ready=True, draining=False)


#: Places a request that has just arrived: `(herd, request)`.
Placing = Callable[["Herd", Request], None]


class Herd:
    """One run."""

    def __init__(self, setting: Setting, placing: Placing, seed: int) -> None:
        self.setting = setting
        self.now = 0.0
        self.rng = random.Random(seed)
        self.waits: list[float] = []
        self._placing = placing
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self.policy = make_policy("cost")
        self.peers = [self._peer(number) for number in range(setting.peers)]
        for peer in self.peers:
            for other in self.peers:
                peer.roster.member(other.name, NodeState.ALIVE, incarnation=1, rtt_ms=0.5)
                peer.roster.models(other.name, {MODEL: ModelInfo(MODEL)})
        self.by_name = {peer.name: peer for peer in self.peers}

    def _peer(self, number: int) -> Peer:
        name = f"n{number}"
        return Peer(name, Roster(name), LoadMeter(slots=self.setting.slots), 4.0 if number < self.setting.slow else 1.0)

    def run(self) -> tuple[float, float]:
        """Mean and 99th percentile of the wait, without the first fifth."""
        setting = self.setting
        for peer in self.peers:
            self.at(self.rng.random() * setting.gossip_s, partial(self._gossip, peer))
        self.at(0.0, lambda: self._arrive(0))
        while len(self.waits) < setting.requests:
            self.now, _, event = heapq.heappop(self._events)
            event()
        kept = sorted(self.waits[setting.requests // 5 :])
        return sum(kept) / len(kept), kept[int(len(kept) * 0.99)]

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ticket), event))

    def _arrive(self, number: int) -> None:
        setting = self.setting
        capacity = sum(setting.slots / (setting.service_s * peer.slow) for peer in self.peers)
        entry = self.peers[-1] if setting.one_entry else self.rng.choice(self.peers)
        self.at(self.now + self.rng.expovariate(capacity * setting.load), lambda: self._arrive(number + 1))
        self._placing(self, Request(f"r{number}", self.now, entry))

    def _gossip(self, peer: Peer) -> None:
        peer.seq += 1
        load = peer.vector(self.now)
        for other in self.peers:
            if other is not peer:
                other.roster.row(peer.name, incarnation=1, seq=peer.seq, load=load, age_s=0.0, now=self.now)
                self.stir(other)
        interval = self.setting.gossip_s * (0.9 + 0.2 * self.rng.random())
        self.at(self.now + interval, partial(self._gossip, peer))

    # --- an engine

    def enqueue(self, peer: Peer, request: Request) -> None:
        """The peer takes the request: into a slot, or behind others."""
        peer.meter.dispatched(request.rid, self.now, PROMPT_TOKENS)
        peer.queue.append(request)
        self._start(peer)

    def _start(self, peer: Peer) -> None:
        while peer.queue and peer.running < self.setting.slots:
            request = peer.queue.popleft()
            peer.running += 1
            self.waits.append(self.now - request.arrived)
            sigma = self.setting.sigma
            service = peer.slow * self.rng.lognormvariate(math.log(self.setting.service_s) - sigma**2 / 2, sigma)
            peer.meter.started(request.rid, self.now, PROMPT_TOKENS, 0)
            prefill = service * PREFILL_SHARE
            self.at(self.now + prefill, partial(self._first, peer, request, prefill))
            self.at(self.now + service, partial(self._done, peer, request))

    def _first(self, peer: Peer, request: Request, seconds: float) -> None:
        peer.meter.prefilled(request.rid, self.now, seconds)
        peer.meter.first_byte(request.rid, self.now)

    def _done(self, peer: Peer, request: Request) -> None:
        peer.running -= 1
        peer.meter.chunk(request.rid, self.now, OUTPUT_TOKENS - 1)
        peer.meter.finished(request.rid, self.now, OUTPUT_TOKENS)
        request.entry.roster.sends.ended(request.rid)
        self._start(peer)
        self.stir(peer)

    # --- an entry

    def stir(self, entry: Peer) -> None:
        """Something changed: the head of the line tries again."""
        while entry.line and self.attempt(entry.line[0]):
            entry.line.popleft()

    def attempt(self, request: Request) -> bool:
        """Decide and ask, up to two bounces. False: nobody had a slot."""
        entry, visited, asked = request.entry, list[str](), 0
        while len(visited) <= MAX_BOUNCES:
            view = entry.roster.view((), entry.vector(self.now), self.now)
            options = RouteOptions(rid=request.rid, visited=tuple(visited), asked=asked)
            plan = decide(view, REQUEST, self.policy, self.now, self.rng, entry=entry.name, options=options)
            if isinstance(plan, Refusal):  # everybody was asked
                return False
            assert plan.cost is not None
            target = self.by_name[plan.target]
            if plan.patience_ms and target.meter.queued_ms(self.now) > plan.patience_ms:
                entry.roster.fresh(target.name, target.vector(self.now), self.now)
                asked += 1
                continue
            if target.active < self.setting.slots:
                if target is not entry:
                    entry.roster.sends.sent(request.rid, target.name, plan.cost.prefill_ms, self.now)
                self.enqueue(target, request)
                return True
            entry.roster.fresh(target.name, target.vector(self.now), self.now)
            visited.append(target.name)
        return False


def ours(herd: Herd, request: Request) -> None:
    """As a node does it."""
    entry = request.entry
    if entry.line or not herd.attempt(request):
        entry.line.append(request)


def live_best_of_two(herd: Herd, request: Request) -> None:
    """Two random peers are asked for their true load, the lesser one takes it."""
    two = herd.rng.sample(herd.peers, 2)
    herd.enqueue(min(two, key=lambda peer: peer.active), request)


def stale_least_loaded(herd: Herd, request: Request) -> None:
    """The least loaded by the gossiped vectors alone: the classic mistake."""
    seen = request.entry.roster.view((), request.entry.vector(herd.now), herd.now)
    least = min(candidate.load.active for candidate in seen.candidates)
    name = herd.rng.choice([candidate.name for candidate in seen.candidates if candidate.load.active == least])
    herd.enqueue(herd.by_name[name], request)


def random_peer(herd: Herd, request: Request) -> None:
    """Anybody."""
    herd.enqueue(herd.rng.choice(herd.peers), request)
