"""Least connections: the candidate with the fewest active requests.

Formula: requests running and waiting by its load vector, less what we know to have finished and plus what we
sent since that vector was true. Ties are broken at random. Source: the seed's second policy.
"""

from __future__ import annotations

import random

from node.policy.base import CandidateCost, Choice, Question, active_requests


class LeastConnections:
    """Fewest active requests."""

    name = "least_connections"

    def choose(self, question: Question, now: float, rng: random.Random) -> Choice:
        """One of those with the fewest active requests. The costs are requests, not milliseconds."""
        costs = tuple(
            CandidateCost(
                candidate.name,
                float(active_requests(candidate, question.unseen)),
                age_ms=candidate.age_s(now) * 1000,
            )
            for candidate in question.candidates
        )
        fewest = min(cost.total_ms for cost in costs)
        chosen = rng.choice([cost for cost in costs if cost.total_ms == fewest])
        return Choice(chosen, f"least connections, {int(fewest)} active", costs)
