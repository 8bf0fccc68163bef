"""Every formula against numbers worked out by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate import planner
from node.errors import LocalError
from node.models import ModelInfo
from node.policy import POLICIES, CandidateCost, Choice, Policy, Question, make_policy
from node.policy.cost import Cost, CostConfig
from node.policy.pull import FAR_MS, PullModel
from node.prefill import UNMEASURED, PrefillTime
from node.view import PRIOR_REUSE, Candidate, Typical, Unseen, typical_of
from tests.node.routing.building import MODEL, NOW, info, node


def question(*candidates: Candidate, **fields: object) -> Question:
    base: dict[str, object] = {"model": MODEL, "prompt_tokens": 1000, "output_tokens": 100, "candidates": candidates}
    return Question(**{**base, **fields})  # type: ignore[arg-type]


def choose(policy: Policy, asked: Question, seed: int = 1) -> Choice:
    return policy.choose(asked, NOW, random.Random(seed))


def terms(policy: Cost, candidate: Candidate, **fields: object) -> CandidateCost:
    return policy.cost_of(candidate, question(candidate, **fields), NOW)


def test_round_robin_takes_each_in_turn_also_when_nodes_come_and_go() -> None:
    policy = make_policy("round_robin")
    a, b, c = node("a"), node("b"), node("c")
    assert [choose(policy, question(c, a, b)).target for _ in range(4)] == ["a", "b", "c", "a"]
    assert choose(policy, question(a, c)).target == "c"
    assert choose(policy, question(a, b)).target == "a"
    assert choose(policy, question(a, b, model="other")).target == "a"
    assert choose(policy, question(a, b, commit=False)).target == "b"
    assert choose(policy, question(a, b)).target == "b"


def test_round_robin_remembers_a_bounded_number_of_models() -> None:
    policy = make_policy("round_robin")
    for number in range(1000):
        choose(policy, question(node("a"), model=f"m{number}"))
    assert len(policy._last) == 256  # type: ignore[attr-defined]


def test_least_connections_counts_running_waiting_and_what_we_did_since() -> None:
    policy = make_policy("least_connections")
    a = node("a", running=3, waiting=1)  # 4
    b = node("b", running=6)  # 6 - 3 finished = 3
    c = node("c", running=1)  # 1 + 3 sent = 4
    unseen = {"b": Unseen(finished=3), "c": Unseen(sent=3)}
    choice = choose(policy, question(a, b, c, unseen=unseen))
    assert choice.target == "b" and choice.reason == "least connections, 3 active"
    assert [(cost.name, cost.total_ms) for cost in choice.costs] == [("a", 4), ("b", 3), ("c", 4)]


def test_least_connections_breaks_ties_at_random() -> None:
    policy = make_policy("least_connections")
    chosen = Counter(choose(policy, question(*(node(n) for n in "abcd")), seed).target for seed in range(400))
    assert set(chosen) == set("abcd") and min(chosen.values()) > 60


def test_latency_based_adds_five_milliseconds_per_active_request_to_the_median() -> None:
    policy = make_policy("latency_based")
    a = node("a", e2e_p50_ms=100.0, running=2, waiting=1)  # 100 + 15
    b = node("b", e2e_p50_ms=80.0, running=5)  # 80 + 25 + 5 sent
    c = node("c", e2e_p50_ms=109.0)  # 109
    choice = choose(policy, question(a, b, c, unseen={"b": Unseen(sent=1)}))
    assert [cost.total_ms for cost in choice.costs] == [115.0, 110.0, 109.0]
    assert choice.target == "c" and choice.reason == "lowest latency, 109 ms"


def test_the_cost_of_an_idle_peer_is_hop_prefill_and_decode() -> None:
    # hop 3; prefill 1000 tokens / 500 a second; decode .25 * 100 tokens * 20 ms
    cost = terms(Cost(), node("b", rtt_ms=3.0, prefill_tps=500.0, itl_p50_ms=20.0))
    assert (cost.hop_ms, cost.queue_ms, cost.prefill_ms, cost.decode_ms) == (3.0, 0.0, 2000.0, 500.0)
    assert (cost.barrier_ms, cost.total_ms) == (0.0, 2503.0)


def test_the_queue_is_the_gossiped_one_worked_off_trusted_by_age_plus_own_sends() -> None:
    # 8 s old at half-life 8 s: (10 s - 8 s) / 2 + 600 ms typical / 2 + 200 ms own
    cost = terms(
        Cost(),
        node("b", prefill_tps=500.0, queued_ms=10_000.0, age_s=8.0),
        typical=Typical(queued_ms=600.0),
        unseen={"b": Unseen(sent=1, sent_ms=200.0)},
    )
    assert cost.queue_ms == pytest.approx(1000 + 300 + 200)


def test_the_queue_of_one_who_measured_no_rate_is_its_tokens_at_the_usual_one() -> None:
    typical = Typical(prefill=PrefillTime.of_rate(500.0))
    assert terms(Cost(), node("b", queued_tokens=1000, queued_ms=7.0), typical=typical).queue_ms == 2000.0


def test_a_prompt_takes_its_tokens_what_lies_before_each_and_a_fixed_time() -> None:
    b = node("b", prefill=PrefillTime(50.0, 0.1, 1e-4))
    assert terms(Cost(), b).prefill_ms == pytest.approx(50 + 100 + 1e-4 * 1000 * 500)
    held = terms(Cost(), b, matched_tokens={"b": 600})
    assert held.prefill_ms == pytest.approx(50 + 40 + 1e-4 * 400 * (600 + 200))


def test_prompt_times_of_who_finished_no_request_yet_are_what_is_usual_where_nobody_knows_better() -> None:
    first, unknown = node("a", prefill_tps=500.0, samples=0.0), node("b", samples=0.0)
    assert typical_of([first, unknown]).prefill == first.load.prefill
    sure = node("c", prefill_tps=100.0, samples=99.0)
    assert typical_of([first, unknown, sure]).prefill.token_ms == pytest.approx(0.01 * 2 + 0.99 * 10)
    assert typical_of([unknown]).prefill == UNMEASURED


def test_the_usual_line_counts_prompts_that_wait_and_one_that_is_computed() -> None:
    some = [node("a", waiting=3, queued_ms=9.0), node("b", queued_ms=9.0), node("c", running=5), node("d")]
    assert [candidate.load.prompts for candidate in some] == [4, 1, 0, 0]
    assert typical_of(some).prompts == 1.25


def test_times_that_rest_on_few_requests_are_mixed_with_what_is_usual() -> None:
    typical = Typical(prefill=PrefillTime.of_rate(1000.0), itl_ms=20.0)
    for samples, share in ((0.0, 1.0), (10.0, 0.5), (100.0, 1 / 11)):
        b = node("b", prefill_tps=100.0, itl_p50_ms=120.0, samples=samples)
        cost = terms(Cost(), b, typical=typical)
        assert cost.prefill_ms == pytest.approx(10_000 - share * 9000)
        assert cost.decode_ms == pytest.approx(0.25 * 100 * (120 - share * 100))


def test_after_a_refusal_one_who_is_full_too_counts_a_whole_request_more() -> None:
    full = node("b", running=4, slots=4, e2e_p50_ms=800.0)
    assert terms(Cost(), full, refused=1).queue_ms - terms(Cost(), full).queue_ms == 800.0
    free = node("b", running=3, slots=4, e2e_p50_ms=800.0)
    assert terms(Cost(), free, refused=1) == terms(Cost(), free)


def test_patience_is_the_queue_at_which_the_next_one_is_as_good() -> None:
    b, c = node("b", prefill_tps=1000.0, queued_tokens=100), node("c", prefill_tps=1000.0, queued_tokens=600)
    choice = choose(Cost(CostConfig(patience_ms=20.0)), question(b, c))
    assert choice.target == "b" and choice.patience_ms == pytest.approx(100 + 500 + 20)
    assert choose(Cost(), question(b)).patience_ms == 0.0


def test_this_nodes_own_numbers_are_trusted_fully() -> None:
    cost = terms(
        Cost(),
        node("a", is_self=True, prefill_tps=500.0, queued_tokens=4000, running=2, itl_p50_ms=20.0),
        typical=Typical(queued_ms=600.0, active=50),
    )
    assert (cost.hop_ms, cost.queue_ms, cost.decode_ms) == (0.0, 8000.0, 500.0 + 80.0)


def test_requests_beyond_the_slots_wait_for_one_to_end() -> None:
    # 6 active + ours in 4 slots: 3 must end first, one of 4 ends every 800 / 4 ms
    cost = terms(Cost(), node("b", running=4, waiting=2, slots=4, e2e_p50_ms=800.0, prefill_tps=1000.0))
    assert cost.queue_ms == pytest.approx(600.0)


def test_active_requests_press_on_decoding() -> None:
    # .25 * 100 * 20 + 2 * (8 - 2 finished + 1 sent) * 20
    cost = terms(Cost(), node("b", running=8, itl_p50_ms=20.0), unseen={"b": Unseen(sent=1, finished=2)})
    assert cost.decode_ms == pytest.approx(780.0)


def test_a_gap_is_taken_from_the_decode_rate_or_from_what_is_typical() -> None:
    assert terms(Cost(), node("b", decode_tps=50.0)).decode_ms == pytest.approx(500.0)
    assert terms(Cost(), node("b"), typical=Typical(itl_ms=30.0)).decode_ms == pytest.approx(750.0)
    usual = Typical(prefill=PrefillTime.of_rate(100.0))
    assert terms(Cost(), node("b"), typical=usual).prefill_ms == pytest.approx(10_000.0)


def test_computing_again_what_somebody_holds_costs_the_others_more_than_itself() -> None:
    # 1000 tokens at 500 a second: the holder of 800 spares 1600 ms, who has 200 himself would spare 1200 of them
    asked = {"matched_tokens": {"a": 800, "c": 200}}
    found = {name: terms(Cost(), node(name, prefill_tps=500.0), **asked) for name in ("a", "b", "c")}
    share = 1 + PRIOR_REUSE
    assert [found[name].burden_ms for name in ("a", "b", "c")] == [0.0, share * 1600.0, share * 1200.0]
    assert terms(Cost(), node("b", prefill_tps=500.0), **asked, reuse=0.0).burden_ms == 1600.0
    assert terms(Cost(), node("b", prefill_tps=500.0)).burden_ms == 0.0


def test_superfluous_work_costs_more_the_longer_the_line_there_and_everywhere() -> None:
    def burden(line: int, crowd: float, **fields: object) -> float:
        target = node("b", prefill_tps=500.0, waiting=line, **fields)
        return terms(Cost(), target, matched_tokens={"a": 800}, typical=Typical(prompts=crowd)).burden_ms

    alone = burden(0, 0.0)
    assert burden(3, 0.0) == burden(0, 2.0) == alone > 0
    assert burden(3, 2.0) == pytest.approx(7 * alone)
    # One prompt is being computed besides those that wait; an old vector counts half, the rest is what is usual.
    assert burden(3, 2.0, queued_ms=5.0) == pytest.approx(9 * alone)
    assert burden(4, 2.0, age_s=8.0) == pytest.approx((1 + (4 / 2 + 2 / 2) * 2) * alone)


def test_own_sends_that_a_vector_does_not_show_stand_in_the_line() -> None:
    asked = {"matched_tokens": {"a": 800}, "typical": Typical(prompts=2.0)}
    alone = terms(Cost(), node("b", prefill_tps=500.0), **asked).burden_ms
    sent = terms(Cost(), node("b", prefill_tps=500.0), **asked, unseen={"b": Unseen(sent=3)})
    assert sent.burden_ms == pytest.approx(7 * alone)


def test_the_barrier_grows_near_a_full_cache_and_with_the_time_of_a_request() -> None:
    for seconds in (0.5, 20.0):
        three_percent = 30 * seconds
        for use, times in ((0.0, 0.0), (0.5, 1.0), (0.9, 9.0), (1.0, 49.0)):
            cost = terms(Cost(), node("b", kv_use=use, e2e_p50_ms=1000 * seconds))
            assert cost.barrier_ms == pytest.approx(three_percent * times)


def test_a_prompt_that_has_no_room_waits_until_enough_of_those_who_run_are_done() -> None:
    def waits(kv_tokens: int, kv_use: float) -> float:
        full = node("b", info(kv_tokens=kv_tokens), kv_use=kv_use, e2e_p50_ms=8000.0)
        return terms(Cost(), full).queue_ms - terms(Cost(), node("b", e2e_p50_ms=8000.0)).queue_ms

    assert waits(4000, 0.75) == 0.0  # 1000 tokens of 4000: it just fits
    assert waits(4000, 0.8) == pytest.approx(8000 * 0.05 / 0.8)
    assert waits(4000, 1.0) == pytest.approx(8000 * 0.25)
    assert waits(500, 0.1) == pytest.approx(8000.0)  # never more than all of them
    assert waits(4000, 0.0) == waits(0, 1.0) == 0.0  # nothing runs; nobody knows


def test_a_long_prompt_goes_where_it_has_room_and_a_short_one_where_it_is_faster() -> None:
    full = node("b", info(kv_tokens=4000), kv_use=0.8, e2e_p50_ms=8000.0)
    slow = node("c", info(kv_tokens=4000), rtt_ms=1000.0, e2e_p50_ms=8000.0)
    assert choose(Cost(), question(full, slow, prompt_tokens=100)).target == "b"
    assert choose(Cost(), question(full, slow, prompt_tokens=2000)).target == "c"


def test_a_held_prefix_is_not_computed_again() -> None:
    cost = terms(Cost(), node("b", prefill_tps=500.0), matched_tokens={"b": 800}, matched_chunks={"b": 6})
    assert (cost.prefill_ms, cost.matched_tokens, cost.matched_chunks) == (400.0, 800, 6)


PULL = PullModel(lookup_ms=2.0, step_ms=10.0, default_net=1e6, memory=2e6, margin=0.7)


@given(st.integers(1, 10_000), st.integers(1, 1 << 20), st.floats(0, 50), st.floats(1e5, 1e10), st.floats(10, 1e5))
def test_the_rule_is_the_planners(tokens: int, token_bytes: int, rtt_ms: float, net: float, prefill: float) -> None:
    model = PullModel()
    costs = planner.Costs(
        bytes_per_token=token_bytes,
        net_bytes_s=net,
        memory_bytes_s=model.memory,
        prefill_tokens_s=prefill,
        fixed_s=(model.lookup_ms + rtt_ms + model.step_ms) / 1000,
    )
    verdict = planner.decide(costs, tokens)
    pull_ms = model.pull_ms(tokens, token_bytes, rtt_ms, net, 0.0)
    assert pull_ms == pytest.approx(verdict.migrate_s * 1000)
    recompute_ms = tokens / prefill * 1000
    if abs(pull_ms - model.margin * recompute_ms) > 1e-6 * recompute_ms:
        assert model.pays(pull_ms, recompute_ms) == verdict.migrate


def pulling(target: Candidate, source: Candidate, **fields: object) -> CandidateCost:
    base: dict[str, object] = {
        "sources": (source,),
        "matched_tokens": {source.name: 800},
        "matched_chunks": {source.name: 6},
    }
    return terms(Cost(pull=PULL), target, **{**base, **fields})


def test_pulling_is_chosen_when_it_beats_computing_by_the_margin() -> None:
    # 800 tokens * 1000 B: 2 + 1 + 800 ms network + 400 ms memory + 10 = 1213 ms; computing: 800 / 400 = 2000 ms
    target, source = node("a", prefill_tps=400.0), node("b")
    cost = pulling(target, source)
    assert (cost.source, cost.source_chunks, cost.pulled_tokens) == ("b", 6, 800)
    assert cost.pull_ms == pytest.approx(1213.0) and cost.prefill_ms == 500.0
    # 800 / 470 a second = 1702 ms; .7 of it = 1191 < 1213
    faster = pulling(node("a", prefill_tps=470.0), source)
    assert (faster.source, faster.pull_ms) == (None, 0.0) and faster.prefill_ms == pytest.approx(1000 / 0.47)


def test_a_copy_costs_the_others_for_what_it_drives_out() -> None:
    cost = pulling(node("a", prefill_tps=400.0), node("b"))
    assert cost.pulled_tokens == 800 and cost.burden_ms == pytest.approx(PRIOR_REUSE * 2000.0)
    assert pulling(node("a", prefill_tps=400.0), node("b"), reuse=0.0).burden_ms == 0.0
    crowded = pulling(node("a", prefill_tps=400.0, waiting=3), node("b"), typical=Typical(prompts=2.0))
    assert crowded.burden_ms == pytest.approx(7 * PRIOR_REUSE * 2000.0)


def test_an_idle_node_copies_what_stands_behind_a_long_prompt_and_a_crowded_one_does_not() -> None:
    # The holder has 3 s to go; fetching its 800 tokens takes 1.2 s where computing them would take 2.
    holder, typical = node("b", prefill_tps=400.0, queued_ms=4_000.0), Typical(prompts=2.0)
    fields: dict[str, object] = {"matched_tokens": {"b": 800}, "matched_chunks": {"b": 6}, "sources": (holder,)}
    idle = node("a", prefill_tps=400.0)
    choice = choose(Cost(pull=PULL), question(holder, idle, typical=typical, **fields))
    assert (choice.target, choice.cost.source) == ("a", "b")
    crowded = node("a", prefill_tps=400.0, waiting=2)
    assert choose(Cost(pull=PULL), question(holder, crowded, typical=typical, **fields)).target == "b"


def test_only_what_the_target_lacks_is_pulled() -> None:
    cost = pulling(node("a", prefill_tps=100.0), node("b"), matched_tokens={"a": 500, "b": 800})
    assert (cost.matched_tokens, cost.pulled_tokens) == (500, 300)
    assert cost.pull_ms == pytest.approx(2 + 1 + 300 + 150 + 10) and cost.prefill_ms == pytest.approx(2000.0)


def test_the_learnt_rate_and_round_trip_between_target_and_source_count() -> None:
    target = node("a", prefill_tps=100.0, rates={"b": 8e6}, rtts={"b": 7.0})
    assert pulling(target, node("b")).pull_ms == pytest.approx(2 + 7 + 100 + 400 + 10)


def test_what_the_targets_engine_takes_to_copy_blocks_counts_once_it_is_known() -> None:
    target = node("a", prefill_tps=100.0, copy_rate=8e6)
    assert pulling(target, node("b", copy_rate=1.0)).pull_ms == pytest.approx(2 + 1 + 800 + 100 + 10)
    assert pulling(node("a", prefill_tps=100.0, copy_rate=1e6), node("b")).pull_ms == pytest.approx(1613)


def test_a_pair_that_never_pulled_is_taken_to_be_as_fast_as_others_here_unless_it_is_far() -> None:
    target, typical = node("a", prefill_tps=100.0, rates={"c": 9e6}), Typical(net=8e6)
    assert pulling(target, node("b"), typical=typical).pull_ms == pytest.approx(2 + 1 + 100 + 400 + 10)
    far = node("a", prefill_tps=100.0, rtt_ms=FAR_MS)
    assert pulling(far, node("b"), typical=typical).pull_ms == pytest.approx(2 + FAR_MS + 800 + 400 + 10)


def slow(name: str, *models: ModelInfo) -> Candidate:
    return node(name, *models, prefill_tps=10.0)


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True)])
def test_nothing_is_pulled_between_a_node_that_encrypts_blocks_and_one_that_does_not(ours: bool, theirs: bool) -> None:
    target = node("a", prefill_tps=10.0, kv_tls=ours)
    assert pulling(target, node("b", kv_tls=theirs)).source is None
    assert pulling(target.with_load(target.load, NOW), node("b", kv_tls=theirs)).source is None
    for alike in (ours, None):
        assert pulling(target, node("b", kv_tls=alike)).source == "b"


def test_nothing_is_pulled_across_different_fingerprints_or_without_one() -> None:
    assert pulling(slow("a"), node("b", info(fingerprint=b"x" * 16))).source is None
    assert pulling(slow("a", info(fingerprint=b"")), node("b", info(fingerprint=b""))).source is None
    assert pulling(slow("a", info(kv_token_bytes=0)), node("b")).source is None
    assert pulling(slow("b"), node("b")).source is None
    assert pulling(slow("a"), node("b"), forbid_pull=True).source is None
    assert pulling(slow("a"), node("b")).source == "b"


def test_of_several_sources_the_one_that_saves_most_is_taken() -> None:
    target = node("a", prefill_tps=100.0, rates={"near": 1e7, "far": 1e5})
    asked = question(
        target,
        sources=(node("far"), node("near")),
        matched_tokens={"far": 900, "near": 700},
        matched_chunks={"far": 7, "near": 5},
    )
    assert Cost(pull=PULL).cost_of(target, asked, NOW).source == "near"


def test_a_forced_source_is_used_whether_it_pays_or_not() -> None:
    cost = pulling(node("a", prefill_tps=1e6), node("b"), force_source="b")
    assert cost.source == "b"
    assert pulling(node("a", prefill_tps=10.0), node("b"), force_source="c").source is None


def test_the_holder_wins_only_inside_its_cost() -> None:
    policy = Cost()
    # Computing 800 tokens again takes as long as a queue of 800; the others pay for that and for what it drives out.
    even = 800 + round(800 * (1 + PRIOR_REUSE))
    for queued, wins in ((0, "b"), (even - 100, "b"), (even + 100, "a")):
        holder = node("b", prefill_tps=500.0, queued_tokens=queued)
        other = node("a", prefill_tps=500.0)
        choice = choose(policy, question(holder, other, matched_tokens={"b": 800}, matched_chunks={"b": 6}))
        assert choice.target == wins
    assert (
        choose(policy, question(node("b"), matched_tokens={"b": 800}, matched_chunks={"b": 6})).reason
        == "prefix 6 chunks"
    )
    assert choose(policy, question(node("b"))).reason == "only candidate"
    assert choose(policy, question(node("b"), node("c"))).reason == "least cost"


def test_near_ties_spread_over_the_peers_but_a_request_stays_where_it_is_as_well_off() -> None:
    peers = [node(name) for name in "bcde"]
    spread = Counter(choose(Cost(), question(*peers), seed).target for seed in range(400))
    assert set(spread) == set("bcde") and min(spread.values()) > 60
    mine = node("a", is_self=True)
    assert {choose(Cost(), question(*peers[:3], mine), seed).target for seed in range(50)} == {"a"}
    loaded = node("a", is_self=True, queued_tokens=5000)
    assert "a" not in {choose(Cost(), question(*peers[:3], loaded), seed).target for seed in range(50)}


def test_in_a_large_cluster_only_holders_this_node_and_a_few_others_contend() -> None:
    policy = Cost(CostConfig(show=4))
    peers = [node(f"n{number}") for number in range(100)]
    mine = node("a", is_self=True)
    asked = question(*peers, mine, matched_tokens={"n7": 900, "n8": 10}, matched_chunks={"n7": 7, "n8": 1})
    names = {cost.name for cost in choose(policy, asked).costs}
    assert {"a", "n7", "n8"} <= names and len(names) == 5
    assert choose(policy, asked).target == "n7"
    everything = question(*peers, mine, every=True)
    assert len(choose(policy, everything).costs) == 101
    crowd = {f"n{number}": number for number in range(1, 50)}
    names = {cost.name for cost in choose(policy, question(*peers, mine, matched_tokens=crowd)).costs}
    assert {"a", "n49", "n48", "n47"} <= names and len(names) == 6


def test_costs_are_listed_cheapest_first_and_can_be_written_as_json() -> None:
    choice = choose(Cost(), question(node("b", queued_tokens=100), node("c")))
    assert [cost.name for cost in choice.costs] == ["c", "b"]
    shown = choice.costs[0].as_dict()
    parts = ("hop_ms", "queue_ms", "pull_ms", "prefill_ms", "decode_ms", "barrier_ms", "burden_ms")
    assert sum(float(str(shown[part])) for part in parts) == pytest.approx(float(str(shown["total_ms"])), abs=0.01)


def test_policies_are_made_by_name() -> None:
    assert next(iter(POLICIES)) == "cost"
    for name in ("cost", "round_robin", "least_connections", "latency_based"):
        assert make_policy(name).name == name
    with pytest.raises(LocalError, match="known are cost"):
        make_policy("random")
