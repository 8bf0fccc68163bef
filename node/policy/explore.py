"""Pulling a little only to learn how fast that is.

Network rates are learnt from pulls, and pulls are chosen by the rates: where the prior says no, nobody would ever find
out that it is wrong. So a request that computes a prefix again, which somebody holds, now and then fetches a piece of
it, from a peer that its target never pulled from, and computes the rest. What it costs is bounded (`PullModel`).
"""

from __future__ import annotations

from collections.abc import Sequence

from node.policy.base import CandidateCost, Question
from node.policy.pull import PullModel
from node.policy.times import times_of
from node.view import Candidate


def explored(
    cost: CandidateCost, question: Question, holders: Sequence[Candidate], pull: PullModel, *, few: float
) -> CandidateCost | None:
    """The same target with a small pull from one of `holders` (longest prefix first); None where it teaches nothing."""
    target = next(candidate for candidate in question.candidates if candidate.name == cost.name)
    info = question.info(target)
    if info is None or not info.fingerprint or not info.kv_token_bytes or question.force_source is not None:
        return None
    prefill, _, _ = times_of(target.load, question.typical, few)
    held = cost.matched_tokens
    for source in holders:
        theirs, extra = question.info(source), question.giving_tokens.get(source.name, 0) - held
        if extra <= 0 or source.name == target.name or source.name in target.load.rates:
            continue
        if theirs is None or theirs.fingerprint != info.fingerprint or not source.exchanges_kv_with(target):
            continue
        rtt = target.load.rtts.get(source.name) or (source.hop_ms if target.is_self else target.hop_ms)
        net, copy_rate = pull.guess(question.typical.net, rtt), target.load.copy_rate
        recompute_ms = prefill.ms(held, extra) - prefill.fixed_ms
        tokens = pull.explored(extra, info.kv_token_bytes, rtt, net, copy_rate, recompute_ms)
        if tokens:
            pull_ms = pull.pull_ms(tokens, info.kv_token_bytes, rtt, net, copy_rate)
            return _pulling(cost, source.name, tokens, pull_ms, question)
    return None


def _pulling(cost: CandidateCost, source: str, tokens: int, pull_ms: float, question: Question) -> CandidateCost:
    reach, chunks = cost.matched_tokens + tokens, question.giving_chunks.get(source, 0)
    missing = question.prompt_tokens - cost.matched_tokens
    prefill_ms = cost.prefill_ms * (missing - tokens) / missing if missing > 0 else 0.0
    return cost._replace(
        source=source,
        source_chunks=min(chunks, -(-chunks * reach // question.giving_tokens[source])),
        pulled_tokens=tokens,
        pull_ms=pull_ms,
        prefill_ms=prefill_ms,
        total_ms=cost.total_ms + pull_ms + prefill_ms - cost.prefill_ms,
    )
