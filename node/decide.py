"""The routing decision: pure, deterministic, explainable.

Promises
1. The target of a plan is live, ready, not draining, serves the model, and is not among the visited.
2. A refusal says which of these is missing, for which nodes.
3. A request for a stored response goes to the node that stored it, as far as that is known (`node.stored`).
4. The same view, request, time and random generator give the same answer.

The receiver of a plan decides on its live state whether it admits. When it is full, the entry puts it on the
visited list, takes its fresh load vector into the view, and asks again. A plan also says up to which queue its target
is the better choice (`Plan.patience_ms`): one that has a longer queue by now says so, and is then weighed anew like
everybody else. So the second choice rests on live state where it matters, and costs a round trip only then.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from node.eligible import eligible, live_models, lost_response, no_model, refuse, sources, status, unknown_response
from node.held import mapped, most
from node.oversize import too_large
from node.plan import MAX_HOPS, MAX_PATIENCE_MS, MAX_REASON, MAX_VISITED, Plan, Refusal, RouteOptions
from node.policy.base import Choice, Policy, Question
from node.prompt.request import TYPICAL_BYTES_PER_TOKEN, ParsedRequest
from node.view import Candidate, ClusterView, Typical, typical_of

#: Output tokens expected where the client set no limit, and the most that one request is weighed with.
TYPICAL_OUTPUT_TOKENS = 128

#: What the reason of a plan begins with when the request named its target or its source.
FORCED = "forced"

#: Endpoints whose answer is no text: nothing is decoded for it.
_POOLING = ("/embeddings", "/pooling", "/classify", "/score", "/rerank")
MAX_OUTPUT_TOKENS = 512

#: Holders of the prompt's prefix that are weighed for it. Often all nodes hold the beginning that every prompt shares.
MAX_HOLDERS = 4

#: Targets that may say that their queue is longer than was known; the next one takes the request whatever it has.
MAX_ASKED = 4


def decide(
    view: ClusterView,
    request: ParsedRequest,
    policy: Policy,
    now: float,
    rng: random.Random,
    *,
    entry: str,
    options: RouteOptions | None = None,
    every: bool = False,
    commit: bool = True,
) -> Plan | Refusal:
    """Where `request` runs. `now` is monotonic seconds; `entry` is this node's name.

    `every`: work out every candidate's cost, however many there are. `commit` False: only asking; the policy
    remembers nothing.
    """
    options = options or RouteOptions()
    model = request.model or _owners_model(view) or _only_model(view)
    if model is None:
        return no_model(view) if request.refers_to is None else unknown_response(request.refers_to)
    refusal = too_large(view, request, model)
    if refusal is not None:
        return refusal
    tokens = request.tokens(view.bytes_per_token.get(model, TYPICAL_BYTES_PER_TOKEN))
    candidates = eligible(view, request, model, tokens, options.visited)
    if options.force_target is not None:
        forced = _forced(view, model, options)
        if isinstance(forced, Refusal):
            return forced
        candidates = [forced]
    elif view.owner is not None:
        lost = lost_response(view, request, model)
        if lost is not None:
            return lost
        candidates = [candidate for candidate in candidates if candidate.name == view.owner]
    if not candidates:
        return refuse(view, model, options.visited)
    question = _question(
        view,
        request,
        model=model,
        tokens=tokens,
        candidates=candidates,
        options=options,
        every=every,
        commit=commit,
        rng=rng,
    )
    choice = policy.choose(question, now, rng)
    return _plan(request, question, choice, policy=policy.name, entry=entry, options=options, now=now)


def _only_model(view: ClusterView) -> str | None:
    models = live_models(view)
    return models[0] if len(models) == 1 else None


def _owners_model(view: ClusterView) -> str | None:
    """What a stored response is asked for by: any model of its node does, its path names the response."""
    owner = view.get(view.owner) if view.owner is not None else None
    return min(owner.models, default=None) if owner is not None else None


def _forced(view: ClusterView, model: str, options: RouteOptions) -> Candidate | Refusal:
    name = options.force_target or ""
    candidate = view.get(name)
    if candidate is None:
        return Refusal(400, "unknown_node", f"The forced target {name} is no member of this cluster.")
    why = status(candidate, model, options.visited)
    if why is None:
        return candidate
    message = f"The forced target {name} cannot take a request for model `{model}`: {why}."
    return Refusal(503, "forced_target_unavailable", message, "service_unavailable_error", None, 5)


def _question(
    view: ClusterView,
    request: ParsedRequest,
    *,
    model: str,
    tokens: int,
    candidates: Sequence[Candidate],
    options: RouteOptions,
    every: bool,
    commit: bool,
    rng: random.Random,
) -> Question:
    output = _output_tokens(request)
    near = most(view.matched, MAX_HOLDERS, rng)
    giving = view.given
    # Who only promises most of it hides nobody who could give some of it now.
    able = near if giving is None else most(giving, MAX_HOLDERS, rng)
    return Question(
        model=model,
        prompt_tokens=tokens,
        output_tokens=min(MAX_OUTPUT_TOKENS, output),
        candidates=tuple(candidates),
        sources=tuple(sources(view, model, {*able, options.force_source} if options.force_source else able)),
        matched_tokens=mapped(view.matched, lambda chunks: request.matched_tokens(chunks, tokens)),
        matched_chunks=view.matched,
        source_tokens=None if giving is None else mapped(giving, lambda chunks: request.matched_tokens(chunks, tokens)),
        source_chunks=giving,
        near=near,
        reuse=view.reuse,
        unseen=view.unseen,
        typical=_typical(view, model),
        refused=len(options.visited),
        forbid_pull=options.no_pull,
        force_source=options.force_source,
        every=every,
        commit=commit,
    )


def _output_tokens(request: ParsedRequest) -> int:
    """Tokens that will probably be generated."""
    if request.path.rstrip("/").endswith(_POOLING):
        return 0
    return min(MAX_OUTPUT_TOKENS, request.max_tokens or TYPICAL_OUTPUT_TOKENS) * request.answers


def _typical(view: ClusterView, model: str) -> Typical:
    known = view.typical.get(model)
    if known is None:
        known = typical_of(c for c in view.candidates if model in c.models and c.load.ready)
        view.typical[model] = known
    return known


def _plan(
    request: ParsedRequest,
    question: Question,
    choice: Choice,
    *,
    policy: str,
    entry: str,
    options: RouteOptions,
    now: float,
) -> Plan:
    cost, reason = choice.cost, choice.reason
    held = question.matched_tokens.get(cost.name, 0)
    source, chunks, cached = cost.source, question.matched_chunks.get(cost.name, 0), held + cost.pulled_tokens
    if source is not None:
        chunks = cost.source_chunks
    forced = options.force_source
    if forced is not None and not options.no_pull and forced != cost.name and source is None:
        # Forced means tried, also when we do not know (yet) that the source holds anything.
        source, chunks = forced, question.giving_chunks.get(forced) or len(request.chunks)
        cached = max(held, question.giving_tokens.get(forced, 0))
    if options.force_target is not None or (forced is not None and source == forced):
        reason = f"{FORCED}, {reason}" if source is None else f"{FORCED}, pull {chunks} chunks from {source}"
    return Plan(
        rid=options.rid,
        model=question.model,
        entry=entry,
        target=cost.name,
        source=source,
        forced=forced is not None and source == forced,
        chunks=chunks,
        matched_tokens=cached,
        prompt_tokens=question.prompt_tokens,
        reason=reason[:MAX_REASON],
        policy=policy,
        hops=min(MAX_HOPS, options.hops + (cost.name != entry)),
        visited=options.visited[-MAX_VISITED:],
        deadline_s=options.deadline_s,
        patience_ms=_patience_ms(choice, entry, options),
        costs=choice.costs,
        decided_at=now,
    )


def _patience_ms(choice: Choice, entry: str, options: RouteOptions) -> float:
    if choice.target == entry or options.force_target is not None or options.asked >= MAX_ASKED:
        return 0.0
    return min(MAX_PATIENCE_MS, float(round(choice.patience_ms)))
