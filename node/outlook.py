"""What a request that finds no place may expect of the cluster, from the load vectors of those that serve its model."""

from __future__ import annotations

from dataclasses import dataclass

from node.view import Candidate, ClusterView, NodeState

#: Until anybody has measured a whole request, seconds.
PRIOR_USUAL_S = 2.0
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """How long a request usually takes once it has a place, and how often a place becomes free for one entry."""

    usual_s: float
    places_per_s: float


def outlook(view: ClusterView, model: str | None) -> Outlook:
    """The outlook for ``model``. Every node is an entry too: each may hope for its share of the places."""
    serving = [candidate for candidate in view.candidates if _serves(candidate, model)]
    times = [candidate.load.e2e_p50_ms / _MS for candidate in serving if candidate.load.e2e_p50_ms > 0]
    usual_s = sum(times) / len(times) if times else PRIOR_USUAL_S
    places = sum(candidate.load.slots or 1 for candidate in serving)
    entries = sum(candidate.state is NodeState.ALIVE for candidate in view.candidates)
    return Outlook(usual_s, max(1, places) / usual_s / max(1, entries))


def full_peers(view: ClusterView, model: str | None) -> list[str]:
    """Peers that have no place now, as far as their vectors and what we sent and got back since can tell.

    Not ourselves: our own admission answers for itself, at no cost.
    """
    return [c.name for c in view.candidates if not c.is_self and _serves(c, model) and seems_full(view, c)]


def seems_full(view: ClusterView, candidate: Candidate) -> bool:
    """Whether all places of a candidate seem to be taken."""
    load, since = candidate.load, view.unseen.get(candidate.name)
    active = load.active if since is None else load.active + since.sent - since.finished
    return 0 < load.slots <= active


def _serves(candidate: Candidate, model: str | None) -> bool:
    if candidate.state not in (NodeState.ALIVE, NodeState.SUSPECT):
        return False
    load = candidate.load
    return load.ready and not load.draining and (model is None or model in candidate.models)
