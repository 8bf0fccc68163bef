"""The interface of a policy: one question, one choice.

A policy sees only candidates that may take the request (`node.eligible` has filtered them) and at least one.
It holds no clock and no randomness of its own; what it remembers between calls is bounded.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from node.models import ModelInfo
from node.quick import quick
from node.view import PRIOR_REUSE, Candidate, Typical, Unseen


class CandidateCost(NamedTuple):
    """What one candidate would cost, in milliseconds; the terms of other policies stay 0.

    A tuple, because every decision makes several: a frozen dataclass of this size takes three times as long.
    """

    name: str
    total_ms: float
    hop_ms: float = 0.0
    queue_ms: float = 0.0
    #: Fetching the missing prefix from `source`, or 0 where it is computed again (then it is in prefill_ms).
    pull_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    barrier_ms: float = 0.0
    #: What the others lose when a prefix is computed again here which somebody holds.
    burden_ms: float = 0.0
    #: Tokens of the prompt that the candidate holds itself, and tokens that would be pulled from `source`.
    matched_tokens: int = 0
    pulled_tokens: int = 0
    matched_chunks: int = 0
    source: str | None = None
    source_chunks: int = 0
    #: Age of the load vector that this rests on, in milliseconds.
    age_ms: float = 0.0
    #: Other holders that are expected to give blocks at the same time as `source`.
    helpers: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """JSON-able, rounded for people."""
        return {
            "node": self.name,
            "total_ms": round(self.total_ms, 3),
            "hop_ms": round(self.hop_ms, 3),
            "queue_ms": round(self.queue_ms, 3),
            "pull_ms": round(self.pull_ms, 3),
            "prefill_ms": round(self.prefill_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
            "barrier_ms": round(self.barrier_ms, 3),
            "burden_ms": round(self.burden_ms, 3),
            "matched_tokens": self.matched_tokens,
            "matched_chunks": self.matched_chunks,
            "pulled_tokens": self.pulled_tokens,
            "source": self.source,
            "source_chunks": self.source_chunks,
            "helpers": list(self.helpers),
            "load_age_ms": round(self.age_ms, 1),
        }


@dataclass(frozen=True, slots=True)
class Question:
    """Everything a policy may look at."""

    model: str
    #: Tokens of the prompt, tokens expected to be generated.
    prompt_tokens: int
    output_tokens: int
    #: Nodes that may take the request; at least one.
    candidates: tuple[Candidate, ...]
    #: Nodes that may give KV blocks (live, not necessarily candidates).
    sources: tuple[Candidate, ...] = ()
    #: Node name -> tokens / chunks of the prompt's beginning that it holds.
    matched_tokens: Mapping[str, int] = field(default_factory=dict)
    matched_chunks: Mapping[str, int] = field(default_factory=dict)
    #: The same for what a source can give now, which is less where it only promises a part; None = as much.
    source_tokens: Mapping[str, int] | None = None
    source_chunks: Mapping[str, int] | None = None
    #: Those of them that are weighed for it, the ones that hold most; None = all.
    near: Collection[str] | None = None
    #: Share of what is asked for that somebody holds, of late.
    reuse: float = PRIOR_REUSE
    unseen: Mapping[str, Unseen] = field(default_factory=dict)
    typical: Typical = field(default_factory=Typical)
    #: Nodes that refused this request already, being full.
    refused: int = 0
    #: Compute the prefix again wherever it is missing / pull from this node and no other.
    forbid_pull: bool = False
    force_source: str | None = None
    #: Work out every candidate's cost, also those that the policy would not look at.
    every: bool = False
    #: False: only asking (explain): nothing is remembered.
    commit: bool = True

    @property
    def giving_tokens(self) -> Mapping[str, int]:
        """Source -> tokens of the prompt's beginning that it can give now."""
        return self.matched_tokens if self.source_tokens is None else self.source_tokens

    @property
    def giving_chunks(self) -> Mapping[str, int]:
        """The same in chunks."""
        return self.matched_chunks if self.source_chunks is None else self.source_chunks

    def info(self, candidate: Candidate) -> ModelInfo | None:
        """The candidate's record of the model that is asked for."""
        return candidate.models.get(self.model)


@dataclass(frozen=True, slots=True)
class Choice:
    """The node that a policy chose, why, and what it weighed."""

    cost: CandidateCost
    reason: str
    costs: tuple[CandidateCost, ...]
    #: Queue at the target, in milliseconds, up to which it is the better choice; 0 = whatever it is.
    patience_ms: float = 0.0

    @property
    def target(self) -> str:
        """The chosen node's name."""
        return self.cost.name


quick(Question, Choice)


class Policy(Protocol):
    """Chooses one of the candidates."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    def choose(self, question: Question, now: float, rng: random.Random) -> Choice:
        """One of `question.candidates`. `now` is monotonic seconds."""
        ...


def active_requests(candidate: Candidate, unseen: Mapping[str, Unseen]) -> int:
    """Requests that the candidate has as far as we know: its vector, corrected by what we did since."""
    since = unseen.get(candidate.name)
    if since is None:
        return candidate.load.active
    return max(0, candidate.load.active - since.finished) + since.sent
