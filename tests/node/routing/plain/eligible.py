"""The first, plain form of `node.eligible`: what the faster one must decide alike. Kept as it was."""

from __future__ import annotations

from collections.abc import Sequence

from node.prompt.request import ParsedRequest
from node.view import Candidate, ClusterView, NodeState

#: How far an estimated prompt length may be off, upwards and downwards.
CAUTIOUS = 1.25
OPTIMISTIC = 0.5


def eligible(
    view: ClusterView, request: ParsedRequest, model: str, tokens: int, visited: Sequence[str]
) -> list[Candidate]:
    """The candidates for `model`; empty when there is none. `tokens`: the request's prompt tokens."""
    alive: list[Candidate] = []
    suspect: list[Candidate] = []
    for candidate in view.candidates:
        load = candidate.load
        if not load.ready or load.draining or model not in candidate.models or candidate.name in visited:
            continue
        if candidate.state is NodeState.ALIVE:
            alive.append(candidate)
        elif candidate.state is NodeState.SUSPECT:
            suspect.append(candidate)
    return _with_room(alive or suspect, request, model, tokens)


def _with_room(candidates: list[Candidate], request: ParsedRequest, model: str, tokens: int) -> list[Candidate]:
    lengths = [candidate.models[model].max_model_len for candidate in candidates]
    shortest = min((length for length in lengths if length), default=0)
    prompt = tokens / max(1, request.prompts)
    answer = request.max_tokens or 1
    for factor in (1.0,) if request.exact_tokens else (CAUTIOUS, OPTIMISTIC):
        need = prompt * factor + answer
        if not shortest or shortest >= need:
            return candidates
        room = [c for c, length in zip(candidates, lengths, strict=True) if length == 0 or length >= need]
        if room:
            return room
    longest = max(lengths, default=0)
    return [c for c, length in zip(candidates, lengths, strict=True) if length == longest]


def sources(view: ClusterView, model: str) -> list[Candidate]:
    """Live nodes that hold part of the prompt and could give its blocks; draining ones included."""
    matched = view.matched
    return [
        candidate
        for candidate in view.candidates
        if candidate.name in matched and candidate.state is NodeState.ALIVE and model in candidate.models
    ]
