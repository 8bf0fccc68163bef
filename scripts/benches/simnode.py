"""One simulated node: the emulated engine, the real load meter over it, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from benches.traces import Arrival
from kvmigrate.planner import RateBook
from node.emulator import Action, Done, EmulatedEngine, EngineConfig, Evicted, Job, Started, Stored, Tokens
from node.load import LoadVector
from node.meter import LoadMeter
from node.sends import OwnSends


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way, and what became of it. Seconds of virtual time."""

    rid: str
    arrival: Arrival
    entry: int
    target: int = -1
    #: What was predicted to be cached, what was pulled and what really was cached. Tokens.
    predicted: int = 0
    pulled: int = 0
    #: Blocks from the first on that the source had, as far as they are asked for.
    pull_to: int = 0
    pull_limit: int = 1 << 30
    cached: int = 0
    started: float = 0.0
    first: float = 0.0
    done: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival.at


@dataclass(slots=True, eq=False)
class SimNode:
    """Engine, meter, and the ledger of what it sent as an entry."""

    number: int
    config: EngineConfig
    engine: EmulatedEngine = field(init=False)
    meter: LoadMeter = field(init=False)
    rates: RateBook = field(default_factory=RateBook)
    sends: OwnSends = field(default_factory=OwnSends)
    #: Targets with open sends of ours, and the vectors they were last compared with.
    synced: dict[str, float] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    #: Those of them without a first token.
    prompts: dict[str, Request] = field(default_factory=dict)
    #: Prompt seconds computed here, and when its network is free to give blocks again.
    work_s: float = 0.0
    link_free: float = 0.0
    scheduled: float = -1.0
    seq: int = 0
    #: Blocks that it stored, evicted and promised since the last digest.
    told: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))

    def __post_init__(self) -> None:
        self.engine = EmulatedEngine(self.config)
        self.meter = LoadMeter(slots=self.config.max_num_seqs)

    @property
    def name(self) -> str:
        return f"n{self.number}"

    def vector(self, now: float) -> LoadVector:
        """The load vector, as a node with our connector has it."""
        self.meter.engine_load(now, self.engine.running, self.engine.waiting, self.engine.cache.use)
        return self.meter.vector(now, ready=True, draining=False, rates=self.rates.network())

    def begin(self, request: Request, now: float) -> None:
        """The engine gets a request."""
        arrival = request.arrival
        self.requests[request.rid] = self.prompts[request.rid] = request
        self.meter.dispatched(request.rid, now, arrival.tokens, request.predicted)
        self.told[2].extend(block for block in arrival.blocks if block not in self.engine.cache)
        output = min(arrival.output, self.config.max_model_len - arrival.tokens)
        self.engine.submit(Job(request.rid, arrival.tokens, output, arrival.blocks), now)

    def hear(self, now: float) -> list[Request]:
        """Let the engine go on to `now`; returns the requests that are done."""
        done: list[Request] = []
        for action in self.engine.advance(now):
            if isinstance(action, Stored):
                self.told[0].extend(action.keys)  # type: ignore[arg-type]
            elif isinstance(action, Evicted):
                self.told[1].extend(action.keys)  # type: ignore[arg-type]
            else:
                self._heard(action, done)
        return done

    def _heard(self, action: Action, done: list[Request]) -> None:
        assert not isinstance(action, Stored | Evicted)
        request = self.requests[action.rid]
        tokens = request.arrival.tokens
        match action:
            case Started():
                request.started, request.cached = action.at, action.cached_tokens
                self.work_s += self.config.timing.prefill(request.cached, tokens - request.cached)
                self.meter.started(action.rid, action.at, tokens, request.cached)
            case Tokens(first=True):
                request.first = action.at
                del self.prompts[action.rid]
                self.meter.prefilled(action.rid, action.at, action.at - request.started)
                self.meter.first_byte(action.rid, action.at)
            case Done():
                request.done = action.at
                self.meter.chunk(action.rid, action.at, request.arrival.output - 1)
                self.meter.finished(action.rid, action.at, request.arrival.output)
                done.append(self.requests.pop(action.rid))
            case _:
                pass
