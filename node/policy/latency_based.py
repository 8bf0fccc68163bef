"""Latency based: the candidate whose requests are answered fastest, less attractive the busier it is.

Formula: median latency of its last 100 requests + 5 ms per active request. Active requests are those running
and waiting by its load vector, corrected by what we sent and saw finish since. A node that has answered nothing
yet has a median of 0 and is tried first; every request sent to it makes it 5 ms less attractive. Ties are
broken at random. Source: the seed's third policy.
"""

from __future__ import annotations

import random

from node.policy.base import CandidateCost, Choice, Question, active_requests

#: Milliseconds that one active request weighs.
ACTIVE_MS = 5.0


class LatencyBased:
    """Lowest median latency, 5 ms per active request added."""

    name = "latency_based"

    def choose(self, question: Question, now: float, rng: random.Random) -> Choice:
        """One of those with the lowest sum."""
        costs = tuple(
            _cost(candidate.name, candidate.load.e2e_p50_ms, active, candidate.age_s(now) * 1000)
            for candidate in question.candidates
            for active in (active_requests(candidate, question.unseen),)
        )
        lowest = min(cost.total_ms for cost in costs)
        chosen = rng.choice([cost for cost in costs if cost.total_ms == lowest])
        return Choice(chosen, f"lowest latency, {lowest:.0f} ms", costs)


def _cost(name: str, median_ms: float, active: int, age_ms: float) -> CandidateCost:
    queue_ms = ACTIVE_MS * active
    return CandidateCost(name, median_ms + queue_ms, queue_ms=queue_ms, decode_ms=median_ms, age_ms=age_ms)
