"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from node.errors import LocalError
from node.policy.base import Policy
from node.policy.cost import Cost
from node.policy.latency_based import LatencyBased
from node.policy.least_connections import LeastConnections
from node.policy.round_robin import RoundRobin

#: The policies that `--policy` takes; the first is the default.
POLICIES: dict[str, Callable[[], Policy]] = {
    "cost": Cost,
    "least_connections": LeastConnections,
    "latency_based": LatencyBased,
    "round_robin": RoundRobin,
}

#: What a candidate's total counts, for people: the formulas of these two know no times.
MILLISECONDS = "ms"
UNITS = {"least_connections": "requests", "round_robin": "turns"}


def make_policy(name: str) -> Policy:
    """A new policy of that name. Raises `LocalError` naming the known ones."""
    maker = POLICIES.get(name)
    if maker is None:
        raise LocalError(f"unknown policy {name!r}; known are {', '.join(sorted(POLICIES))}")
    return maker()
