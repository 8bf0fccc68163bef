"""The fast decision against the plain one it grew from (`plain/`): the same choice, to the last bit."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from node.chunks import CHUNK_BYTES, MAX_CHUNKS, chunk_hashes
from node.eligible import eligible, sources
from node.policy import Choice, Question
from node.policy.cost import Cost, CostConfig
from node.policy.pull import PullModel
from node.view import Candidate, ClusterView, NodeState, Unseen, typical_of
from tests.node.routing.building import MODEL, NOW, PRINT, info, node, request
from tests.node.routing.plain.cost import PlainCost
from tests.node.routing.plain.eligible import eligible as plain_eligible
from tests.node.routing.plain.eligible import sources as plain_sources


def drawn_node(rng: random.Random, number: int) -> Candidate:
    def some(value: float) -> float:
        return value if rng.random() < 0.7 else 0.0

    models = [
        info(
            MODEL if rng.random() < 0.9 else "other",
            max_model_len=rng.choice([0, 512, 4096, 131_072]),
            kv_tokens=rng.choice([0, 10_000, 1 << 20]),
            kv_token_bytes=rng.choice([0, 1000, 131_072]),
            fingerprint=rng.choice([b"", PRINT, b"\x02" * 16]),
        )
    ]
    return node(
        f"n{number}",
        *models,
        ready=rng.random() < 0.9,
        draining=rng.random() < 0.1,
        state=rng.choice([NodeState.ALIVE] * 6 + [NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT]),
        is_self=number == 0 and rng.random() < 0.8,
        rtt_ms=rng.choice([None, 0.2, 3.0, 40.0]),
        kv_tls=rng.choice([None, False, False, True]),
        age_s=rng.choice([0.0, 0.3, 2.0, 20.0]),
        running=rng.randrange(20),
        waiting=rng.choice([0, 0, 5, 60]),
        slots=rng.choice([0, 8, 64]),
        queued_tokens=int(some(rng.randrange(200_000))),
        kv_use=rng.random(),
        prefill_tps=some(rng.uniform(100, 30_000)),
        decode_tps=some(rng.uniform(5, 200)),
        itl_p50_ms=some(rng.uniform(5, 60)),
        e2e_p50_ms=some(rng.uniform(100, 20_000)),
        rtts={f"n{rng.randrange(9)}": 2.0},
        rates={f"n{rng.randrange(9)}": rng.uniform(1e8, 2e10)},
        copy_rate=some(rng.choice([1e8, 4e9, 4e10])),
        samples=rng.choice([0.0, 3.0, 100.0]),
    )


def drawn_view(rng: random.Random) -> ClusterView:
    candidates = tuple(drawn_node(rng, number) for number in range(rng.choice([1, 3, 5, 9, 30])))
    names = [candidate.name for candidate in candidates]
    return ClusterView(
        candidates=candidates,
        matched={name: rng.randrange(1, 40) for name in names if rng.random() < 0.3},
        unseen={name: Unseen(rng.randrange(9), rng.uniform(0, 9000), rng.randrange(9)) for name in names[::2]},
    )


def question(view: ClusterView, candidates: list[Candidate], rng: random.Random) -> Question:
    asked = request(rng.choice([1, 60, 5000]))
    tokens = asked.tokens()
    return Question(
        model=MODEL,
        prompt_tokens=tokens,
        output_tokens=rng.randrange(512),
        candidates=tuple(candidates),
        sources=tuple(sources(view, MODEL, view.matched)),
        near=rng.choice([None, set(list(view.matched)[:2])]),
        matched_tokens={name: asked.matched_tokens(chunks, tokens) for name, chunks in view.matched.items()},
        matched_chunks=view.matched,
        unseen=view.unseen,
        typical=typical_of(candidates),
        forbid_pull=rng.random() < 0.2,
        force_source=f"n{rng.randrange(9)}" if rng.random() < 0.1 else None,
        every=rng.random() < 0.2,
        refused=rng.choice([0, 0, 1]),
    )


@settings(max_examples=300)
@given(st.integers(0, 1 << 32))
def test_the_fast_and_the_plain_decision_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    view = drawn_view(rng)
    asked = request(rng.choice([10, 900, 6000]), exact_tokens=rng.random() < 0.5)
    visited = tuple(f"n{number}" for number in range(rng.choice([0, 0, 2])))
    found = eligible(view, asked, MODEL, asked.tokens(), visited)
    assert found == plain_eligible(view, asked, MODEL, asked.tokens(), visited)
    assert sources(view, MODEL, view.matched) == plain_sources(view, MODEL)
    if not found:
        return
    put = question(view, found, rng)
    fast = Cost(pull=PullModel(explore_share=0.0)).choose(put, NOW, random.Random(seed))
    plain = PlainCost().choose(put, NOW, random.Random(seed))
    assert told(fast) == told(plain)


def told(choice: Choice) -> tuple[object, ...]:
    return tuple(choice.cost), choice.reason, [tuple(cost) for cost in choice.costs]


def test_the_comparison_bites_when_one_constant_differs() -> None:
    differ = 0
    for seed in range(40):
        rng = random.Random(seed)
        view = drawn_view(rng)
        found = eligible(view, request(900), MODEL, 900, ())
        if found:
            put = question(view, found, rng)
            other = Cost(CostConfig(half_life_s=8.4)).choose(put, NOW, random.Random(seed))
            differ += told(other) != told(PlainCost().choose(put, NOW, random.Random(seed)))
    assert differ > 10


@given(st.binary(max_size=4000), st.binary(max_size=8))
def test_chunks_cut_in_c_have_the_hashes_of_chunks_cut_one_by_one(text: bytes, seed: bytes) -> None:
    previous, plain = xxh3_64_intdigest(seed), []
    for start in range(0, min(len(text) // CHUNK_BYTES, MAX_CHUNKS) * CHUNK_BYTES, CHUNK_BYTES):
        previous = xxh3_64_intdigest(text[start : start + CHUNK_BYTES], previous)
        plain.append(previous)
    assert chunk_hashes(seed, text) == plain
