"""A decision in words and numbers, for `/route/explain`, the page and the log of decisions. JSON-able."""

from __future__ import annotations

from collections.abc import Sequence

from kvmigrate.planner import PRIOR_NET_BYTES_S
from node.decide import FORCED
from node.eligible import status
from node.kv_sources import further
from node.plan import Plan, Refusal
from node.policy.registry import MILLISECONDS, UNITS
from node.prompt.request import ParsedRequest
from node.view import Candidate, ClusterView, NodeState

#: Nodes that are listed as excluded; the rest is counted.
MAX_EXCLUDED = 64

#: Refusals of requests that name their node.
_NAMED = ("unknown_node", "forced_target_unavailable")


def explain(view: ClusterView, request: ParsedRequest, decision: Plan | Refusal) -> dict[str, object]:
    """What was decided, and every candidate's terms in milliseconds.

    Decide with `every=True, commit=False` first: then the costs of all candidates are there and nothing is
    remembered of the question.
    """
    asked: dict[str, object] = {
        "path": request.path,
        "model": request.model,
        "prompt_bytes": request.prompt_bytes,
        "prompt_tokens": request.est_prompt_tokens,
        "prompt_tokens_exact": request.exact_tokens,
        "chunks": len(request.chunks),
        "max_tokens": request.max_tokens,
        "stream": request.stream,
    }
    answer: dict[str, object] = {
        "request": asked,
        "matched_chunks": dict(view.matched),
        "promised_chunks": _promised(view),
    }
    if isinstance(decision, Refusal):
        answer["refusal"] = {"status": decision.status, "code": decision.code, "message": decision.message}
        named = view.owner is not None or decision.code in _NAMED
        answer["excluded"] = _excluded(view, request.model or "", (), set(), named=named)
        return answer
    answer["plan"] = {
        "target": decision.target,
        "source": decision.source,
        "sources": _sources(view, decision),
        "reason": decision.reason,
        "policy": decision.policy,
        "unit": UNITS.get(decision.policy, MILLISECONDS),
        "model": decision.model,
        "chunks": decision.chunks,
        "matched_tokens": decision.matched_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "hops": decision.hops,
        "visited": list(decision.visited),
    }
    answer["unlike"] = _unlike(view, decision)
    answer["candidates"] = [cost.as_dict() for cost in decision.costs]
    weighed = {cost.name for cost in decision.costs}
    named = view.owner is not None or decision.reason.startswith(FORCED)
    answer["excluded"] = _excluded(view, decision.model, decision.visited, weighed, named=named)
    return answer


def _promised(view: ClusterView) -> dict[str, int]:
    """How many of the matched chunks a node's engine has yet to compute: they cannot be pulled from there."""
    if view.given is None:
        return {}
    promised = {name: count - view.given.get(name, 0) for name, count in view.matched.items()}
    return {name: count for name, count in promised.items() if count}


def _sources(view: ClusterView, plan: Plan) -> list[dict[str, object]]:
    """Whom the target may ask, and for how many chunks: the plan's source, then those that it would have help."""
    target = view.get(plan.target)
    if plan.source is None or target is None:
        return []
    giving, rates = view.matched if view.given is None else view.given, target.load.rates
    held = {node.name: giving.get(node.name, 0) for node in view.candidates if _gives(node, target, plan.model)}
    more = further(
        held,
        target=target.name,
        source=plan.source,
        reach=plan.chunks,
        rate=lambda name: rates.get(name, PRIOR_NET_BYTES_S),
        tie=lambda name: name,
    )
    return [{"node": name, "chunks": chunks} for name, chunks in {plan.source: plan.chunks, **more}.items()]


def _gives(node: Candidate, target: Candidate, model: str) -> bool:
    ours, theirs = target.models.get(model), node.models.get(model)
    alike = ours is not None and theirs is not None and ours.fingerprint == theirs.fingerprint
    return alike and node.state is NodeState.ALIVE and node.exchanges_kv_with(target)


def _unlike(view: ClusterView, plan: Plan) -> list[dict[str, str]]:
    """Nodes that hold a part of the prompt in KV blocks that the target cannot use, so nothing is pulled from them."""
    target = view.get(plan.target)
    ours = target.models.get(plan.model) if target is not None else None
    if target is None or ours is None or not ours.fingerprint:
        return []
    found = []
    for candidate in view.candidates:
        theirs = candidate.models.get(plan.model)
        if theirs is None or not theirs.fingerprint or not view.matched.get(candidate.name):
            continue
        if theirs.fingerprint != ours.fingerprint:
            why = f"its KV blocks are not like those of {plan.target}; `grapevine kv` there says what differs"
        elif not candidate.exchanges_kv_with(target):
            why = f"its KV blocks travel {candidate.kv_way} and those of {plan.target} {target.kv_way}"
        else:
            continue
        found.append({"node": candidate.name, "why": why})
    return found[:MAX_EXCLUDED]


def _excluded(
    view: ClusterView, model: str, visited: Sequence[str], weighed: set[str], *, named: bool
) -> list[dict[str, str]]:
    """Who was not weighed, and why. ``named``: the request is for one node, whatever the others would cost."""
    listed: list[dict[str, str]] = []
    for candidate in view.candidates:
        if candidate.name in weighed:
            continue
        why = status(candidate, model, visited)
        if why is None:
            why = "the request is for another node" if named else _not_weighed(candidate, model)
        if len(listed) == MAX_EXCLUDED:
            break
        listed.append({"node": candidate.name, "why": why})
    return listed


def _not_weighed(candidate: Candidate, model: str) -> str:
    """Why one that could take it was passed over, see `node.eligible`."""
    if candidate.state is NodeState.SUSPECT:
        return "suspected"
    length = candidate.models[model].max_model_len if model in candidate.models else 0
    return f"its context of {length} tokens is too short, or may be" if length else "not weighed"
