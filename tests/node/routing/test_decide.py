from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.chunks import CHUNK_BYTES
from node.decide import decide
from node.eligible import eligible
from node.errors import BadRequest
from node.explain import explain
from node.models import ModelInfo
from node.plan import Plan, Refusal, RouteOptions, decode_plan
from node.policy import POLICIES, make_policy
from node.prompt import ParsedRequest
from node.view import Candidate, ClusterView, NodeState, Unseen
from tests.node.routing.building import MODEL, NOW, ask, info, node, planned, refused, request, view


def test_a_single_node_alone_serves_its_own_requests() -> None:
    plan = planned(ask(view(node("a", is_self=True)), rid="r"))
    assert (plan.target, plan.source, plan.hops, plan.reason, plan.rid) == ("a", None, 0, "only candidate", "r")
    assert plan.entry == "a" and plan.model == MODEL and len(plan.costs) == 1


def test_a_prefix_goes_to_its_holder_and_the_plan_says_so() -> None:
    seen = view(node("a", is_self=True, prefill_tps=500.0), node("b", prefill_tps=500.0), matched={"b": 6})
    plan = planned(ask(seen, request(1000), hops=0))
    assert (plan.target, plan.hops, plan.chunks, plan.reason) == ("b", 1, 6, "prefix 6 chunks")
    assert plan.matched_tokens == int(1000 * 6 * CHUNK_BYTES / 4000) and plan.prompt_tokens == 1000
    assert {cost.name for cost in plan.costs} == {"a", "b"}
    assert decode_plan(plan.header()) == plan


def test_a_busy_holder_is_pulled_from() -> None:
    seen = view(
        node("a", is_self=True, prefill_tps=100.0), node("b", prefill_tps=100.0, queued_tokens=5000), matched={"b": 6}
    )
    plan = planned(ask(seen, request(1000)))
    assert (plan.target, plan.source, plan.chunks, plan.reason) == ("a", "b", 6, "pull 6 chunks from b")
    assert plan.matched_tokens == 768


def test_a_draining_holder_still_gives_its_blocks_a_dead_one_does_not() -> None:
    mine = node("a", is_self=True, prefill_tps=100.0)
    assert planned(ask(view(mine, node("b", draining=True), matched={"b": 6}), request(1000))).source == "b"
    assert planned(ask(view(mine, node("b", state=NodeState.DEAD), matched={"b": 6}), request(1000))).source is None


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_passes_over_what_cannot_serve(policy: str) -> None:
    seen = view(
        node("dead", state=NodeState.DEAD),
        node("left", state=NodeState.LEFT),
        node("loading", ready=False),
        node("draining", draining=True),
        node("other", info("x")),
        node("short", info(max_model_len=50)),
        node("suspect", state=NodeState.SUSPECT),
        node("visited"),
        node("good", running=50, waiting=50),
    )
    for seed in range(20):
        assert planned(ask(seen, policy=policy, seed=seed, visited=("visited",))).target == "good"


def test_a_suspect_is_better_than_nobody() -> None:
    seen = view(node("b", state=NodeState.SUSPECT), node("c", state=NodeState.DEAD))
    assert planned(ask(seen)).target == "b"


@pytest.mark.parametrize(
    ("tokens", "limit", "exact", "expected"),
    [
        (100, 16, False, {"short", "long", "unknown"}),
        (900, 16, False, {"long", "unknown"}),  # 900 * 1.25 + 16 > 1000: surely room only in the others
        (900, 16, True, {"short", "long", "unknown"}),
        (900, 200, True, {"long", "unknown"}),
        (9000, 16, False, {"unknown"}),
    ],
)
def test_a_context_must_be_long_enough(tokens: int, limit: int, exact: bool, expected: set[str]) -> None:
    seen = view(
        node("short", info(max_model_len=1000)),
        node("long", info(max_model_len=4000)),
        node("unknown", info(max_model_len=0)),
    )
    asked = request(tokens, max_tokens=limit, exact_tokens=exact)
    assert {c.name for c in eligible(seen, asked, MODEL, tokens, ())} == expected


def test_an_estimate_alone_never_refuses() -> None:
    seen = view(node("short", info(max_model_len=1000)), node("long", info(max_model_len=4000)))
    for tokens, expected in ((5000, "long"), (50_000, "long")):  # may fit; cannot fit, and the engine says so
        assert planned(ask(seen, request(tokens))).target == expected
    assert {c.name for c in eligible(seen, request(50_000, exact_tokens=True), MODEL, 50_000, ())} == {"long"}


def test_learnt_bytes_per_token_change_the_estimate() -> None:
    seen = ClusterView(candidates=(node("a"),), bytes_per_token={MODEL: 2.0})
    assert planned(ask(seen, request(1000))).prompt_tokens == 2000
    assert planned(ask(seen, request(1000, exact_tokens=True))).prompt_tokens == 1000


def test_the_only_model_may_be_left_out() -> None:
    adapter = ModelInfo("lora", kind="adapter")
    assert planned(ask(view(node("a", info(), adapter)), request(model=None))).model == MODEL


def test_a_missing_model_is_an_error_where_there_are_several() -> None:
    refusal = refused(ask(view(node("a"), node("b", info("other"))), request(model=None)))
    assert (refusal.status, refusal.code, refusal.param) == (400, "model_required", "model")
    assert "m, other" in refusal.message


def test_an_unknown_model_is_a_404_as_openai_says_it() -> None:
    refusal = refused(ask(view(node("a")), request(model="gpt-9")))
    assert refusal.status == 404
    assert json.loads(refusal.body()) == {
        "error": {
            "message": "The model `gpt-9` does not exist or you do not have access to it.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


@pytest.mark.parametrize(
    ("candidates", "code", "words"),
    [
        ((node("a", state=NodeState.DEAD),), "no_live_node", "No live node serves model `m` (dead: a)"),
        ((node("a", ready=False), node("b", state=NodeState.DEAD)), "model_loading", "still loading: a; dead: b"),
        ((node("a", draining=True), node("b", draining=True)), "all_draining", "draining: a, b"),
        ((node("v"), node("a", ready=False)), "cluster_full", "full: v; still loading: a"),
        ((node("v", draining=True),), "all_draining", "draining: v"),
    ],
)
def test_a_refusal_says_exactly_what_is_missing(candidates: tuple[Candidate, ...], code: str, words: str) -> None:
    refusal = refused(ask(view(*candidates), visited=("v",)))
    assert (refusal.status, refusal.code) == (503, code)
    assert words in refusal.message and refusal.retry_after_s


def test_a_model_that_a_loading_node_may_bring_is_no_404() -> None:
    loading = Candidate("a", node("a", ready=False).load)
    refusal = refused(ask(view(loading, node("b", info("other")))))
    assert (refusal.status, refusal.code) == (503, "model_loading") and "a" in refusal.message
    assert refused(ask(view(loading), request(model=None))).code == "model_loading"
    assert refused(ask(view(), request(model=None))).code == "no_live_node"


def test_messages_are_bounded() -> None:
    many = view(*(node(f"node-{number}", ready=False) for number in range(500)))
    assert len(refused(ask(many)).message) < 400 and "and 492 more" in refused(ask(many)).message
    assert len(refused(ask(view(node("a")), request(model="x" * 100_000))).message) < 400


def test_a_target_can_be_forced() -> None:
    seen = view(node("a", is_self=True), node("b", queued_tokens=10**6), node("c", draining=True))
    plan = planned(ask(seen, force_target="b"))
    assert plan.target == "b" and plan.reason == "forced, only candidate"
    refusal = refused(ask(seen, force_target="c"))
    assert (refusal.status, refusal.code) == (503, "forced_target_unavailable") and "draining" in refusal.message
    assert refused(ask(seen, force_target="nobody")).status == 400


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_source_can_be_forced_and_a_pull_forbidden(policy: str) -> None:
    seen = view(node("a", is_self=True), node("b"), matched={"b": 3})
    plan = planned(ask(seen, request(1000), policy, force_target="a", force_source="b"))
    assert (plan.source, plan.chunks, plan.reason) == ("b", 3, "forced, pull 3 chunks from b")
    assert plan.forced and decode_plan(plan.header()) == plan
    assert not planned(ask(seen, request(1000), policy, force_target="a")).forced
    unknown = view(node("a", is_self=True), node("b"))
    plan = planned(ask(unknown, request(1000), policy, force_target="a", force_source="b"))
    assert (plan.source, plan.chunks) == ("b", 7)
    assert planned(ask(seen, policy=policy, force_target="b", force_source="b")).source is None
    slow = view(node("a", is_self=True, prefill_tps=1.0), node("b"), matched={"b": 6})
    assert planned(ask(slow, request(1000), policy, force_target="a", no_pull=True)).source is None


def test_options_are_read_from_headers_of_any_case() -> None:
    options = RouteOptions.from_headers(
        {"X-Grapevine-Force-Target": " n1 ", "x-grapevine-force-source": "n2", "x-grapevine-no-pull": "1"},
        rid="r",
    )
    assert options == RouteOptions(rid="r", force_target="n1", force_source="n2", no_pull=True)
    assert RouteOptions.from_headers({}) == RouteOptions()
    for headers in ({"x-grapevine-force-target": "a b"}, {"x-grapevine-no-pull": "maybe"}):
        with pytest.raises(BadRequest):
            RouteOptions.from_headers(headers)


CANDIDATES = st.builds(
    lambda name, served, ready, draining, state, length, running: node(
        name,
        *(info(model, max_model_len=length) for model in served),
        ready=ready,
        draining=draining,
        state=state,
        running=running,
        is_self=name == "a",
    ),
    name=st.sampled_from("abcdefghij"),
    served=st.sets(st.sampled_from(["m", "x"]), min_size=1),
    ready=st.booleans(),
    draining=st.booleans(),
    state=st.sampled_from(list(NodeState)),
    length=st.sampled_from([0, 100, 5000]),
    running=st.integers(0, 300),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(CANDIDATES, max_size=10, unique_by=lambda c: c.name),
    st.sampled_from(["m", "x", "y", None]),
    st.sampled_from(list(POLICIES)),
    st.sets(st.sampled_from("abcdefghij"), max_size=4),
    st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1, 7), max_size=5),
    st.none() | st.sampled_from("abz"),
    st.integers(0, 5000),
)
def test_decide_never_names_an_ineligible_node(  # noqa: PLR0917
    candidates: list[Candidate],
    model: str | None,
    policy: str,
    visited: set[str],
    matched: dict[str, int],
    force: str | None,
    tokens: int,
) -> None:
    seen = view(*candidates, matched=matched)
    asked = request(tokens, model=model)
    decision = ask(seen, asked, policy, visited=tuple(visited), force_target=force)
    fit = [
        c
        for c in candidates
        if c.state in (NodeState.ALIVE, NodeState.SUSPECT)
        and c.load.ready
        and not c.load.draining
        and c.name not in visited
    ]
    if isinstance(decision, Refusal):
        if force is None and model is not None:
            assert not [c for c in fit if model in c.models]
        return
    target = next(c for c in fit if c.name == decision.target)
    assert decision.model in target.models and (model is None or decision.model == model)
    assert force is None or decision.target == force
    if target.state is NodeState.SUSPECT and force is None:
        assert not [c for c in fit if c.state is NodeState.ALIVE and decision.model in c.models]
    if decision.source is not None:
        source = next(c for c in candidates if c.name == decision.source)
        assert source.state is NodeState.ALIVE and source.name != target.name and matched[source.name]
    assert 0 <= decision.matched_tokens <= max(0, decision.prompt_tokens)
    assert decode_plan(decision.header()) == decision
    assert ask(seen, asked, policy, visited=tuple(visited), force_target=force) == decision


def test_an_explanation_is_json_and_names_everybody() -> None:
    seen = view(node("a", is_self=True), node("b"), node("c", draining=True), matched={"b": 2})
    asked = request(1000)
    shown = json.loads(json.dumps(explain(seen, asked, ask(seen, asked, every=True))))
    assert shown["plan"]["target"] == "b" and {c["node"] for c in shown["candidates"]} == {"a", "b"}
    assert shown["excluded"] == [{"node": "c", "why": "draining"}] and shown["promised_chunks"] == {}
    seen = replace(seen, matched={"a": 1, "b": 2}, given={"a": 1})
    assert explain(seen, asked, ask(seen, asked))["promised_chunks"] == {"b": 2}
    refusal = explain(seen, request(model="zz"), ask(seen, request(model="zz")))
    assert json.loads(json.dumps(refusal))["refusal"]["status"] == 404


def test_an_explanation_says_why_each_of_the_others_was_not_weighed() -> None:
    short, long = info(max_model_len=1000), info(max_model_len=9000)
    seen, asked = view(node("a", short), node("b", long), node("c", long, state=NodeState.SUSPECT)), request(5000)
    shown = json.loads(json.dumps(explain(seen, asked, ask(seen, asked, every=True))))
    why = {each["node"]: each["why"] for each in shown["excluded"]}
    assert why == {"a": "its context of 1000 tokens is too short, or may be", "c": "suspected"}
    forced = json.loads(json.dumps(explain(seen, asked, ask(seen, asked, every=True, force_target="a"))))
    assert {each["why"] for each in forced["excluded"]} == {"the request is for another node"}


@pytest.mark.parametrize(("policy", "unit"), [("cost", "ms"), ("latency_based", "ms"), ("round_robin", "turns")])
def test_an_explanation_says_what_the_totals_of_its_policy_count(policy: str, unit: str) -> None:
    seen, asked = view(node("a"), node("b")), request(10)
    assert json.loads(json.dumps(explain(seen, asked, ask(seen, asked, policy, every=True))))["plan"]["unit"] == unit


def test_nothing_is_decoded_for_embeddings() -> None:
    """A node that decodes slowly is as good for them as any."""
    seen = view(node("a", itl_p50_ms=500.0, samples=200, is_self=True), node("b", itl_p50_ms=5.0, samples=200))
    asked = request(100)
    assert planned(ask(seen, asked)).target == "b"
    plan = planned(ask(seen, replace(asked, path="/v1/embeddings")))
    assert plan.target == "a" and {cost.decode_ms for cost in plan.costs} == {0.0}


def test_who_only_promises_a_prompt_hides_no_source_that_holds_some_of_it() -> None:
    names = ["b", "c", "d", "e", "f", "g"]
    holders = dict.fromkeys(names, 60)
    me = node("a", is_self=True, prefill_tps=100.0)
    seen = view(me, *(node(name, prefill_tps=100.0) for name in names), matched={**holders, "g": 40})
    seen, asked = replace(seen, given={"g": 40}), request(40_000)
    plan = ask(seen, asked, force_target="a")
    assert isinstance(plan, Plan) and (plan.source, plan.chunks) == ("g", 40)
    far = ask(replace(seen, given={**holders, "b": 0, "g": 40}), asked, force_target="a", force_source="g")
    assert isinstance(far, Plan) and (far.source, far.chunks) == ("g", 40)


def large(count: int) -> ClusterView:
    rng = random.Random(5)
    nodes = [
        node(
            f"n{i}", is_self=i == 0, age_s=rng.random(), queued_tokens=rng.randrange(5000), running=rng.randrange(60),
            prefill_tps=500 + rng.random() * 100, itl_p50_ms=20.0, e2e_p50_ms=900.0, kv_use=rng.random() / 2,
        )
        for i in range(count)
    ]  # fmt: skip
    matched = {f"n{i}": 3 + i for i in range(5)}
    return view(*nodes, matched=matched, unseen={f"n{i}": Unseen(2, 100) for i in range(20)})


def decide_time(seen: ClusterView, asked: ParsedRequest) -> float:
    policy, rng = make_policy("cost"), random.Random(1)
    times = []
    for _ in range(60):
        start = time.perf_counter()
        assert isinstance(decide(seen, asked, policy, NOW, rng, entry="n0"), Plan)
        times.append(time.perf_counter() - start)
    return min(times)


def test_a_decision_among_a_hundred_nodes_takes_well_under_a_millisecond() -> None:
    taken = decide_time(large(100), request(2000))
    print(f"decide among 100: {taken * 1e6:.0f} us")
    assert taken < 0.0005
    taken = decide_time(large(1000), request(2000))
    print(f"decide among 1000: {taken * 1e6:.0f} us")
    assert taken < 0.002


def test_an_adapter_runs_only_where_it_is_loaded_however_busy_and_its_blocks_are_not_pulled() -> None:
    lora = ModelInfo("lora", kind="adapter", parent=MODEL, max_model_len=8192)
    free, busy = node("a", info(), is_self=True), node("b", info(), lora, prefill_tps=1e3, queued_ms=60_000.0)
    also = node("c", info(), lora, prefill_tps=1e3, queued_ms=1e6)
    plan = planned(ask(view(free, busy, also, matched={"c": 2}), request(2000, model="lora"), no_pull=False))
    assert plan.target == "b" and plan.source is None
    gone = refused(ask(view(free), request(model="lora")))
    assert (gone.status, gone.code) == (404, "model_not_found")


def test_revisions_under_one_name_share_requests_and_never_blocks() -> None:
    """Their fingerprints differ: each holds its own prefix, and a node of the other revision computes it again."""
    old = node("a", info(fingerprint=b"1" * 16, revision="v1"), prefill_tps=10.0, queued_ms=1e7)
    new = node("b", info(fingerprint=b"2" * 16, revision="v2"), prefill_tps=10.0)
    plan = planned(ask(view(old, new, matched={"a": 3}), request(1000)))
    assert (plan.target, plan.source, plan.matched_tokens) == ("b", None, 0)
    third = node("c", info(fingerprint=b"1" * 16, revision="v1"), prefill_tps=10.0)
    plan = planned(ask(view(old, third, matched={"a": 3}), request(1000)))
    assert (plan.target, plan.source) == ("c", "a")


def test_of_nodes_with_the_adapter_those_with_room_for_the_prompt_are_taken() -> None:
    short = ModelInfo("lora", kind="adapter", parent=MODEL, max_model_len=1024)
    long = ModelInfo("lora", kind="adapter", parent=MODEL, max_model_len=16_384)
    seen = view(node("a", short, is_self=True), node("b", long, prefill_tps=1e3, queued_ms=60_000.0))
    assert planned(ask(seen, request(4000, model="lora"))).target == "b"
    assert planned(ask(seen, request(100, model="lora"))).target == "a"
