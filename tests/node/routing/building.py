"""Short ways to build views for tests."""

from __future__ import annotations

import random
from dataclasses import replace

from node.decide import decide
from node.load import LoadVector
from node.models import ModelInfo
from node.plan import Plan, Refusal, RouteOptions
from node.policy import Policy, make_policy
from node.prefill import PrefillTime
from node.prompt import ParsedRequest
from node.view import Candidate, ClusterView, NodeState, Unseen

MODEL = "m"
NOW = 1000.0
PRINT = b"\x01" * 16


def info(model: str = MODEL, **fields: object) -> ModelInfo:
    base: dict[str, object] = {"max_model_len": 8192, "block_size": 16, "kv_token_bytes": 1000, "fingerprint": PRINT}
    return ModelInfo(id=model, **{**base, **fields})  # type: ignore[arg-type]


def node(
    name: str,
    *models: ModelInfo,
    ready: bool = True,
    state: NodeState = NodeState.ALIVE,
    is_self: bool = False,
    rtt_ms: float | None = 1.0,
    age_s: float = 0.0,
    kv_tls: bool | None = None,
    **load: object,
) -> Candidate:
    served = models or (info(),)
    return Candidate(
        name=name,
        load=vector(ready=ready, **load),
        as_of=NOW - age_s,
        state=state,
        is_self=is_self,
        rtt_ms=rtt_ms,
        models={model.id: model for model in served},
        kv_tls=kv_tls,
    )


def vector(*, prefill_tps: float = 0.0, **fields: object) -> LoadVector:
    """A load vector; a plain rate stands for all lengths, and its queue is tokens over that rate."""
    given = {"prefill": PrefillTime.of_rate(prefill_tps), **fields}
    load = LoadVector(**given)  # type: ignore[arg-type]
    return load if "queued_ms" in fields else replace(load, queued_ms=load.queued_tokens * load.prefill.token_ms)


def view(
    *candidates: Candidate, matched: dict[str, int] | None = None, unseen: dict[str, Unseen] | None = None
) -> ClusterView:
    return ClusterView(candidates=candidates, matched=matched or {}, unseen=unseen or {})


def request(
    tokens: int = 100, *, model: str | None = MODEL, chunks: int | None = None, **fields: object
) -> ParsedRequest:
    size = tokens * 4
    count = size // 512 if chunks is None else chunks
    base: dict[str, object] = {
        "path": "/v1/chat/completions",
        "model": model,
        "chunks": tuple(range(1, count + 1)),
        "prompt_bytes": size,
        "est_prompt_tokens": tokens,
        "max_tokens": 16,
    }
    return ParsedRequest(**{**base, **fields})  # type: ignore[arg-type]


def ask(
    seen: ClusterView,
    asked: ParsedRequest | None = None,
    policy: Policy | str = "cost",
    *,
    seed: int = 1,
    entry: str = "a",
    every: bool = False,
    **options: object,
) -> Plan | Refusal:
    return decide(
        seen,
        asked or request(),
        make_policy(policy) if isinstance(policy, str) else policy,
        NOW,
        random.Random(seed),
        entry=entry,
        options=RouteOptions(**options),  # type: ignore[arg-type]
        every=every,
    )


def planned(decision: Plan | Refusal) -> Plan:
    assert isinstance(decision, Plan), decision
    return decision


def refused(decision: Plan | Refusal) -> Refusal:
    assert isinstance(decision, Refusal), decision
    return decision
