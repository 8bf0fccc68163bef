"""Pairs of nodes that never pulled: tried out with little, and believed once they were measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvmigrate.planner import MIN_RATE_BYTES, RateBook
from node.policy import Choice, Question
from node.policy.cost import Cost
from node.policy.pull import PullModel
from node.view import Candidate, Typical
from tests.node.routing.building import MODEL, NOW, info, node

#: 128 KiB of KV a token at 15,000 tokens a second: a pull at the prior of 1 GB/s is slower than computing.
INFO = info(kv_token_bytes=131_072, max_model_len=1 << 20)


def target(**fields: object) -> Candidate:
    return node("a", INFO, is_self=True, prefill_tps=15_000.0, **fields)  # type: ignore[arg-type]


def holder() -> Candidate:
    return node("b", INFO, prefill_tps=15_000.0, queued_ms=60_000.0)


def asked(a: Candidate, **fields: object) -> Question:
    base: dict[str, object] = {
        "model": MODEL,
        "prompt_tokens": 20_000,
        "output_tokens": 10,
        "candidates": (a, holder()),
        "sources": (holder(),),
        "matched_tokens": {"b": 16_000},
        "matched_chunks": {"b": 125},
    }
    return Question(**{**base, **fields})  # type: ignore[arg-type]


def choices(question: Question, count: int = 400, **model: object) -> list[Choice]:
    policy = Cost(pull=PullModel(**model))  # type: ignore[arg-type]
    return [policy.choose(question, NOW, random.Random(seed)) for seed in range(count)]


def test_where_the_prior_says_no_a_small_pull_is_tried_now_and_then() -> None:
    tried = [choice for choice in choices(asked(target())) if choice.cost.source is not None]
    assert 10 < len(tried) < 45  # of 400, one in 16
    cost = tried[0].cost
    assert (cost.name, cost.source, cost.pulled_tokens) == ("a", "b", 512)  # 64 MiB
    assert cost.source_chunks == 4 and tried[0].reason == "try 4 chunks from b"
    assert cost.pulled_tokens * INFO.kv_token_bytes >= MIN_RATE_BYTES
    parts = cost.hop_ms + cost.queue_ms + cost.pull_ms + cost.prefill_ms + cost.decode_ms + cost.barrier_ms
    parts += cost.burden_ms
    assert cost.pull_ms < 120 and cost.total_ms == pytest.approx(parts)
    assert cost in tried[0].costs


def test_it_is_not_tried_where_it_was_measured_or_could_never_pay_or_is_only_asked() -> None:
    def never(question: Question, **model: object) -> bool:
        return all(choice.cost.source is None for choice in choices(question, 20, explore_share=1.0, **model))

    assert not never(asked(target()))
    assert never(asked(target(rates={"b": 1e9})))
    assert never(asked(target()), default_net=1e7)  # 16 times faster is still too slow
    assert never(asked(target(), commit=False))
    assert never(asked(target(), forbid_pull=True))
    assert never(asked(target(), matched_tokens={"b": 10}))  # too little to measure anything
    other = node("b", info(kv_token_bytes=131_072, fingerprint=b"x" * 16), queued_ms=60_000.0)
    assert never(asked(target(), candidates=(target(), other), sources=(other,)))
    assert never(asked(target(kv_tls=True), sources=(replace(holder(), kv_tls=False),)))


def test_one_small_pull_makes_a_fast_network_used_by_its_pair_and_believed_by_the_others() -> None:
    book = RateBook()
    book.pulled("b", 64 << 20, 0.005 + (64 << 20) / 12.5e9, 0.005)
    learnt = target(rates=book.network())
    assert choices(asked(learnt), 1)[0].cost.pulled_tokens == 16_000
    elsewhere = asked(target(), typical=Typical(net=12.5e9))
    assert choices(elsewhere, 1)[0].cost.pulled_tokens == 16_000
