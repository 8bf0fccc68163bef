"""What the routing decision sees: candidates, and what this node knows about them beyond their own words.

Everything here is a value. `node.roster` builds it from gossip events; tests build it by hand.
A `Candidate` holds what changes with gossip (so it is kept between decisions); what changes with every request
(who holds its prefix, what we sent where) lies beside the candidates in `ClusterView`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from node.load import LoadVector
from node.models import ModelInfo
from node.prefill import UNMEASURED, PrefillTime
from node.quick import quick

#: Round trip assumed for a peer that was never measured, in milliseconds.
UNKNOWN_RTT_MS = 1.0

#: Share of what is asked for that is taken to be held somewhere, before anything was asked for.
PRIOR_REUSE = 0.5


class NodeState(enum.Enum):
    """Membership as gossip sees it."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


_ALIVE = NodeState.ALIVE  # members of an enumeration are slow to look up
_NOTHING: Mapping[str, ModelInfo] = {}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the entry knows it."""

    name: str
    load: LoadVector
    #: Local monotonic time at which its load vector was true (arrival less age), in seconds.
    as_of: float = 0.0
    state: NodeState = NodeState.ALIVE
    is_self: bool = False
    #: Round trip from here, in milliseconds; None = never measured.
    rtt_ms: float | None = None
    #: What it serves, by model id. Kept after its death, so that an error can say what is missing.
    models: Mapping[str, ModelInfo] = field(default_factory=dict)
    incarnation: int = 0
    seq: int = 0
    #: Its KV blocks travel over TLS and not otherwise; None = it does not say.
    kv_tls: bool | None = None
    #: `models` while it takes requests (alive, ready, not draining), else nothing: every decision asks everybody.
    offers: Mapping[str, ModelInfo] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        load = self.load
        takes = self.state is _ALIVE and load.ready and not load.draining
        object.__setattr__(self, "offers", self.models if takes else _NOTHING)

    def age_s(self, now: float) -> float:
        """Seconds since its load vector was true."""
        return max(0.0, now - self.as_of)

    def with_load(self, load: LoadVector, now: float) -> Candidate:
        """The same node with a vector that is true now; `dataclasses.replace` takes three times as long."""
        return Candidate(
            self.name,
            load,
            now,
            self.state,
            self.is_self,
            self.rtt_ms,
            self.models,
            self.incarnation,
            self.seq,
            self.kv_tls,
        )

    @property
    def kv_way(self) -> str:
        """How its KV blocks travel, for people."""
        return "over TLS" if self.kv_tls else "in clear"

    def exchanges_kv_with(self, other: Candidate) -> bool:
        """Whether KV blocks travel between the two: not between one that encrypts them and one that does not."""
        return self.kv_tls == other.kv_tls or self.kv_tls is None or other.kv_tls is None

    @property
    def hop_ms(self) -> float:
        """The way there and back, in milliseconds."""
        if self.is_self:
            return 0.0
        return UNKNOWN_RTT_MS if self.rtt_ms is None else self.rtt_ms


@dataclass(frozen=True, slots=True)
class Unseen:
    """What this node did to a candidate that the candidate's load vector cannot show yet."""

    #: Requests sent and not finished, the milliseconds that computing their prompts should take, requests finished.
    sent: int = 0
    sent_ms: float = 0.0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Typical:
    """What is usual among the candidates for one model: fills what a vector leaves open or has outgrown."""

    active: float = 0.0
    queued_ms: float = 0.0
    #: Prompts not computed yet, of each node.
    prompts: float = 0.0
    prefill: PrefillTime = UNMEASURED
    itl_ms: float = 0.0
    e2e_ms: float = 0.0
    #: Bytes a second of KV between two nodes that pulled from each other.
    net: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One node's view of the cluster at the moment of one decision."""

    candidates: tuple[Candidate, ...]
    #: Node name -> chunks of this request's prompt that it holds, counted from the front.
    matched: Mapping[str, int] = field(default_factory=dict)
    #: The same without what it only promises, so that it cannot be pulled yet (`node.peerprefix`); None = as much.
    given: Mapping[str, int] | None = None
    #: Share of what clients asked for here of late that somebody held.
    reuse: float = PRIOR_REUSE
    unseen: Mapping[str, Unseen] = field(default_factory=dict)
    #: Bytes of canonical text per token, learnt per model.
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    #: The node that stored the response which this request refers to, where that is known.
    owner: str | None = None
    #: Cache shared between views of unchanged candidates: model -> what is typical. Owned by the roster.
    typical: dict[str, Typical] = field(default_factory=dict)
    #: The same for models that do not change: model -> the shortest context that any node serves it with.
    shortest: dict[str, int] = field(default_factory=dict)

    def get(self, name: str) -> Candidate | None:
        """The candidate of that name."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        return None

    def models(self) -> set[str]:
        """Every model that some known node serves or served."""
        return {model for candidate in self.candidates for model in candidate.models}


quick(Candidate, Unseen, ClusterView)


def typical_of(candidates: Iterable[Candidate]) -> Typical:
    """Means over `candidates`; rates and latencies over those that have measured them, by how well they have."""
    loads = [candidate.load for candidate in candidates]
    count = max(1, len(loads))
    return Typical(
        active=sum(load.running + load.waiting for load in loads) / count,
        queued_ms=sum(load.queued_ms for load in loads) / count,
        prompts=sum(load.prompts for load in loads) / count,
        # Who has computed prompts and finished no request yet knows more than a prior.
        prefill=_usual([(load.prefill, max(1.0, load.samples)) for load in loads if load.prefill.measured]),
        itl_ms=_mean([(gap_ms(load), load.samples) for load in loads if gap_ms(load) > 0]),
        e2e_ms=_mean([(load.e2e_p50_ms, load.samples) for load in loads if load.e2e_p50_ms > 0]),
        net=_mean([(rate, 1.0) for load in loads for rate in load.rates.values() if rate > 0]),
    )


def gap_ms(load: LoadVector) -> float:
    """Milliseconds between two tokens of a stream; 0 = not measured."""
    return load.itl_p50_ms or (1000 / load.decode_tps if load.decode_tps > 0 else 0.0)


def _usual(times: list[tuple[PrefillTime, float]]) -> PrefillTime:
    if not times:
        return UNMEASURED
    return PrefillTime(*(_mean([(time[term], samples) for time, samples in times]) for term in range(3)))


def _mean(values: list[tuple[float, float]]) -> float:
    """The mean of (value, weight); 0 without any weight."""
    weight = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / weight if weight > 0 else 0.0
