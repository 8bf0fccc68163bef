"""Requests that no engine of the cluster can take, whatever it is asked: refused at once, with the numbers.

Only what is certain. The length of a prompt of text is an estimate, and vLLM cuts an answer that would not fit behind
its prompt: what might fit goes to an engine, which knows exactly and answers exactly. Certain are an output limit above
the longest context of all, a prompt of more token ids, and a text of more than 512 times as many characters.
"""

from __future__ import annotations

from node.eligible import shortest_context
from node.plan import Refusal
from node.prompt.request import ParsedRequest
from node.view import ClusterView, NodeState

_GONE = (NodeState.DEAD, NodeState.LEFT)


def too_large(view: ClusterView, request: ParsedRequest, model: str) -> Refusal | None:
    """The refusal of a request that fits nowhere, None when it may fit."""
    wanted = max(request.least_tokens, request.max_tokens or 0)
    # Nearly always it is below the shortest context, which is known without looking at everybody.
    if not wanted or wanted <= shortest_context(view, model):
        return None
    longest = _longest_context(view, model)
    if longest is None or wanted <= longest:
        return None
    limit = f"The longest context with which this cluster serves `{model}` is {longest} tokens."
    if request.least_tokens > longest:
        count = str(request.least_tokens) if request.exact_tokens else f"at least {request.least_tokens}"
        return _refusal(f"{limit} Your prompt has {count} tokens. Please shorten it.", None)
    asked = f"You asked for an answer of up to {request.max_tokens} tokens. Please ask for fewer."
    return _refusal(f"{limit} {asked}", "max_tokens")


def _longest_context(view: ClusterView, model: str) -> int | None:
    """The longest context that a node in the cluster has for ``model``; None when one of them is not known."""
    served = [c.models[model].max_model_len for c in view.candidates if c.state not in _GONE and model in c.models]
    return max(served) if served and all(served) else None


def _refusal(message: str, param: str | None) -> Refusal:
    return Refusal(400, "context_length_exceeded", message, param=param)
