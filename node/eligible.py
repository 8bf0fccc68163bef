"""Which nodes may take a request, and what to say when none may.

Candidates are live, ready, not draining, serve the model, have not refused this request already, and have a
context that is long enough. Two of these give way rather than refuse:
- Suspected nodes are taken when no node above suspicion is left.
- Context: the prompt's length is an estimate, so nodes that surely have room are taken first, then nodes that
  may have room, then those with the longest context; the engine knows exactly and answers exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from node.plan import Refusal
from node.prompt.request import ParsedRequest
from node.view import Candidate, ClusterView, NodeState

#: How far an estimated prompt length may be off, upwards and downwards.
CAUTIOUS = 1.25
OPTIMISTIC = 0.5

#: Node and model names spelled out in one message.
_MAX_NAMES = 8

#: Longest id of a response in a message, characters.
_MAX_ID = 128

_UNAVAILABLE = "service_unavailable_error"


def eligible(
    view: ClusterView, request: ParsedRequest, model: str, tokens: int, visited: Sequence[str]
) -> list[Candidate]:
    """The candidates for `model`; empty when there is none. `tokens`: the request's prompt tokens."""
    found = [candidate for candidate in view.candidates if model in candidate.offers]
    if visited:
        found = [candidate for candidate in found if candidate.name not in visited]
    return _with_room(found or _suspects(view, model, visited), view, request, model, tokens)


def _suspects(view: ClusterView, model: str, visited: Sequence[str]) -> list[Candidate]:
    return [
        candidate
        for candidate in view.candidates
        if candidate.state is NodeState.SUSPECT
        and candidate.load.ready
        and not candidate.load.draining
        and model in candidate.models
        and candidate.name not in visited
    ]


def _with_room(
    candidates: list[Candidate], view: ClusterView, request: ParsedRequest, model: str, tokens: int
) -> list[Candidate]:
    prompt = tokens / max(1, request.prompts)
    answer = request.max_tokens or 1
    factors = (1.0,) if request.exact_tokens else (CAUTIOUS, OPTIMISTIC)
    bound = shortest_context(view, model)
    if not bound or bound >= prompt * factors[0] + answer:
        return candidates  # nearly always: not even the shortest context of all is too short
    lengths = [candidate.models[model].max_model_len for candidate in candidates]
    shortest = min((length for length in lengths if length), default=0)
    for factor in factors:
        need = prompt * factor + answer
        if not shortest or shortest >= need:
            return candidates
        room = [c for c, length in zip(candidates, lengths, strict=True) if length == 0 or length >= need]
        if room:
            return room
    longest = max(lengths, default=0)
    return [c for c, length in zip(candidates, lengths, strict=True) if length == longest]


def shortest_context(view: ClusterView, model: str) -> int:
    """The shortest known `max_model_len` with which any node at all serves `model`; 0 = none is known."""
    known = view.shortest.get(model)
    if known is None:
        served = (candidate.models[model].max_model_len for candidate in view.candidates if model in candidate.models)
        known = view.shortest[model] = min((length for length in served if length), default=0)
    return known


def sources(view: ClusterView, model: str, holders: Collection[str]) -> list[Candidate]:
    """Which of `holders` live and could give blocks of the prompt; draining ones included."""
    if not holders:
        return []
    return [
        candidate
        for candidate in view.candidates
        if candidate.name in holders and candidate.state is NodeState.ALIVE and model in candidate.models
    ]


def status(candidate: Candidate, model: str, visited: Sequence[str]) -> str | None:
    """Why a candidate cannot take the request, in words; None = it can."""
    if candidate.state in (NodeState.DEAD, NodeState.LEFT):
        return "dead" if candidate.state is NodeState.DEAD else "left the cluster"
    if candidate.models and model not in candidate.models:
        return "serves other models"
    if candidate.load.draining:
        return "draining"
    if not candidate.load.ready:
        return "still loading"
    if model not in candidate.models:
        return "serves no model"
    if candidate.name in visited:
        return "full"
    return None


def live_models(view: ClusterView) -> list[str]:
    """Base models that live nodes serve, sorted; adapters only where there is no base model."""
    found: dict[str, bool] = {}
    for candidate in view.candidates:
        if candidate.state in (NodeState.ALIVE, NodeState.SUSPECT):
            for model, info in candidate.models.items():
                found[model] = found.get(model, False) or info.kind == "base"
    base = sorted(model for model, is_base in found.items() if is_base)
    return base or sorted(found)


def no_model(view: ClusterView) -> Refusal:
    """The refusal of a request without a model where that leaves a choice, or none."""
    models = live_models(view)
    if models:
        return Refusal(
            400,
            "model_required",
            f"You must provide a model parameter: this cluster serves {listed(models)}.",
            param="model",
        )
    return _unavailable(view, "any model", [c for c in view.candidates if c.state is not NodeState.LEFT], "", ())


def unknown_response(response: str) -> Refusal:
    """The refusal of a request that names nothing but a response that this node never saw."""
    message = f"The response `{response[:_MAX_ID]}` is not known here: only the node that ran it has it."
    return Refusal(404, "response_not_found", message, param="response_id")


def lost_response(view: ClusterView, request: ParsedRequest, model: str) -> Refusal | None:
    """The refusal where the node that stored the response is gone for good; None where it may still answer."""
    owner = view.get(view.owner or "")
    if owner is not None and owner.state not in (NodeState.DEAD, NodeState.LEFT) and model in owner.models:
        return None
    why = "is not here any more" if owner is None else status(owner, model, ()) or "does not serve it any more"
    message = f"The response `{(request.refers_to or '')[:_MAX_ID]}` was stored by node {view.owner} ({why})."
    return Refusal(404, "response_not_found", message, param="response_id")


def refuse(view: ClusterView, model: str, visited: Sequence[str]) -> Refusal:
    """What to answer when `eligible` found nobody for `model`."""
    serving = [candidate for candidate in view.candidates if model in candidate.models]
    if not serving:
        # A node that still loads may turn out to serve it: what it will serve is not known before.
        serving = [c for c in view.candidates if not c.models and status(c, model, visited) == "still loading"]
    if not serving:
        shown = model if len(model) <= 128 else model[:128] + "..."
        return Refusal(
            404,
            "model_not_found",
            f"The model `{shown}` does not exist or you do not have access to it.",
            param="model",
        )
    return _unavailable(view, f"model `{model}`", serving, model, visited)


def _unavailable(
    view: ClusterView, what: str, nodes: Iterable[Candidate], model: str, visited: Sequence[str]
) -> Refusal:
    states: dict[str, list[str]] = {}
    for candidate in nodes:
        why = status(candidate, model, visited) or "unavailable"
        states.setdefault(why, []).append(candidate.name)
    if not states:
        return Refusal(503, "no_live_node", f"No node of this cluster serves {what}.", _UNAVAILABLE, None, 5)
    story = "; ".join(f"{why}: {listed(names)}" for why, names in states.items())
    for why, code, text in _CAUSES:
        if why in states:
            return Refusal(503, code, f"{text} {what} ({story}).", _UNAVAILABLE, None, 1 if why == "full" else 5)
    return Refusal(503, "no_live_node", f"No live node serves {what} ({story}).", _UNAVAILABLE, None, 5)


#: The most hopeful cause decides the code and the first words.
_CAUSES = (
    ("full", "cluster_full", "All nodes are full that serve"),
    ("still loading", "model_loading", "No node is ready that serves"),
    ("draining", "all_draining", "All live nodes are draining that serve"),
)


def listed(names: Sequence[str]) -> str:
    """Names for a message, bounded."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
