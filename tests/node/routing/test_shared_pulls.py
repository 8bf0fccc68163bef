"""What a pull is expected to cost where several hold the prompt: that of what the target will really do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmigrate.crew import recruits
from kvmigrate.pull_types import Look, Source
from node.kv_sources import further
from node.policy import CandidateCost, Question
from node.policy.cost import Cost
from node.policy.pull import PullModel
from node.view import Candidate
from tests.node.routing.building import MODEL, NOW, info, node

#: 100 KB of KV a token: 8,000 tokens are 800 MB.
INFO = info(kv_token_bytes=100_000, max_model_len=1 << 20)
MODEL_OF_PULLS = PullModel(lookup_ms=5.0, step_ms=10.0, memory=4e9)


def target(rates: dict[str, float], *, tps: float = 5_000.0, **fields: object) -> Candidate:
    return node("t", INFO, prefill_tps=tps, rates=rates, **fields)  # type: ignore[arg-type]


def cost(
    at: Candidate, held: dict[str, int], *, model: PullModel = MODEL_OF_PULLS, encrypting: str = "", **fields: object
) -> CandidateCost:
    sources = tuple(node(name, INFO, kv_tls=name in encrypting) for name in held)
    base: dict[str, object] = {
        "model": MODEL,
        "prompt_tokens": 10_000,
        "output_tokens": 10,
        "candidates": (at,),
        "sources": sources,
        "matched_tokens": held,
        "matched_chunks": held,
    }
    return Cost(pull=model).cost_of(at, Question(**{**base, **fields}), NOW)  # type: ignore[arg-type]


def test_with_a_second_source_the_network_takes_half_and_the_rest_as_long() -> None:
    alone = cost(target({"a": 1e9}), {"a": 8000})
    assert (alone.source, alone.helpers) == ("a", ())
    assert alone.pull_ms == pytest.approx(5 + 1 + 800 + 200 + 10)
    both = cost(target({"a": 1e9, "b": 1e9}), {"a": 8000, "b": 8000})
    assert (both.source, both.helpers) == ("a", ("b",))
    assert both.pull_ms == pytest.approx(5 + 1 + (800 + 6) / 2 + 200 + 10)


def test_a_pull_that_pays_only_with_help_is_made() -> None:
    # Computing 8,000 tokens takes a second, of which a pull may take .7: alone 1.016 s, with two helpers .484.
    held, rates = {"a": 8000, "b": 8000, "c": 8000}, {"a": 1e9, "b": 1e9, "c": 1e9}
    assert cost(target(rates, tps=8000.0), {"a": 8000}).source is None
    helped = cost(target(rates, tps=8000.0), held)
    assert (helped.source, helped.helpers, helped.pulled_tokens) == ("a", ("b", "c"), 8000)
    assert cost(target(rates, tps=8000.0), held, model=PullModel(memory=4e9, more=0)).source is None


def test_a_slow_source_of_all_is_worth_asking_with_a_fast_one_of_nearly_all() -> None:
    rates = {"all": 0.2e9, "most": 2e9}
    assert cost(target(rates), {"all": 8000}).source is None
    both = cost(target(rates), {"all": 8000, "most": 7600})
    assert (both.source, both.helpers, both.pulled_tokens) == ("all", ("most",), 8000)
    far = cost(target(rates), {"all": 8000, "most": 4000})  # what only the slow one has would take two seconds
    assert (far.source, far.helpers, far.pulled_tokens) == ("most", (), 4000)


def test_who_may_not_give_does_not_help() -> None:
    rates = {"a": 1e9, "b": 1e9}
    held = {"a": 8000, "b": 8000}
    assert cost(target(rates, kv_tls=False), held, encrypting="b").helpers == ()
    assert cost(target(rates), {"a": 8000, "b": 8000, "t": 8000}).source is None
    assert cost(target({"a": 1e9, "b": 0.05e9}), held).helpers == ()


def test_a_forced_source_has_the_help_that_it_will_have() -> None:
    rates = {"a": 1e9, "b": 0.5e9, "c": 1e9}
    forced = cost(target(rates), {"a": 8000, "b": 6000, "c": 7000}, force_source="b")
    assert (forced.source, forced.helpers, forced.pulled_tokens) == ("b", ("a", "c"), 6000)


drawn = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(1, 10_000), st.floats(1e8, 2e10)), min_size=1, max_size=4
)


@settings(max_examples=300)
@given(drawn, st.floats(100, 50_000), st.integers(0, 3000), st.sampled_from(["", *"abcd"]))
def test_the_estimate_is_that_of_what_the_target_will_do(
    giving: dict[str, tuple[int, float]], tps: float, own: int, forced: str
) -> None:
    held = {name: tokens for name, (tokens, _) in giving.items()}
    # none as good as another: who is asked of those is drawn
    rates = {name: rate * (1 + place / 97) for place, (name, (_, rate)) in enumerate(giving.items())}
    force = {"force_source": forced} if forced else {}
    shared = cost(target(rates, tps=tps), {**held, **({"t": own} if own else {})}, **force)
    if shared.source is None:
        return
    first, nbytes = shared.source, shared.pulled_tokens * 100_000

    def alone(name: str) -> CandidateCost:
        return cost(target(rates, tps=tps), {name: held[name], "t": own}, force_source=name)

    # Never longer than without help, and as long where there is none.
    assert shared.pull_ms <= alone(first).pull_ms + 1e-6
    assert shared.helpers or shared.pull_ms == pytest.approx(alone(first).pull_ms)
    # Never worse than the best single source.
    best = min((alone(name) for name in held if held[name] > own), key=lambda cost: cost.pull_ms + cost.prefill_ms)
    if not forced:
        assert shared.pull_ms + shared.prefill_ms <= best.pull_ms + best.prefill_ms + 1e-3
    # The target asks its source, and then those whom its crew would ask.
    more = further(
        {**held, "t": own}, target="t", source=first, reach=held[first], rate=lambda name: rates[name], tie=str
    )
    wait_s = (MODEL_OF_PULLS.lookup_ms + 1.0) / 1000
    sources = [Source(first, held[first] - own, rates[first], wait_s)]
    sources += [Source(name, tokens - own, rates[name], wait_s) for name, tokens in more.items()]

    def asked(missing_bytes: int) -> tuple[str, ...]:
        look = Look(answered=frozenset({0}), joined=1, missing_bytes=missing_bytes, rate=rates[first])
        return tuple(sources[number].address for number in recruits(look, sources, [0], set(), 0.0))

    # Both, where a hair's breadth decides: what is computed in another order is rounded otherwise.
    assert shared.helpers in (asked(nbytes), asked(nbytes - nbytes // 1000), asked(nbytes + nbytes // 1000))
