from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import node.roster as module
from node.decide import decide
from node.learnt import FADE_S, FRESH_S
from node.load import LoadVector
from node.meter import LoadMeter
from node.models import ModelInfo
from node.plan import Plan
from node.policy import make_policy
from node.roster import Roster
from node.sends import OwnSends
from node.view import PRIOR_REUSE, NodeState, Unseen
from tests.node.routing.building import MODEL, info, request

READY = LoadVector(ready=True)


def roster(*names: str) -> Roster:
    made = Roster("a")
    for name in ("a", *names):
        made.member(name, NodeState.ALIVE, incarnation=1, rtt_ms=2.0)
        made.models(name, {"m": ModelInfo("m")})
        assert made.row(name, incarnation=1, seq=1, load=READY, age_s=0.0, now=0.0)
    return made


def test_older_vectors_never_replace_newer_ones() -> None:
    made = roster("b")
    busy = LoadVector(ready=True, running=5)
    assert made.row("b", incarnation=1, seq=7, load=busy, age_s=0.5, now=10.0)
    for incarnation, seq in ((1, 7), (1, 3), (0, 99)):
        assert not made.row("b", incarnation=incarnation, seq=seq, load=READY, age_s=0.0, now=11.0)
    candidate = made.get("b")
    assert candidate is not None and candidate.load is busy and candidate.age_s(11.0) == 1.5
    assert made.row("b", incarnation=2, seq=1, load=READY, age_s=0.0, now=12.0)
    assert not made.row("unknown", incarnation=1, seq=1, load=READY, age_s=0.0, now=0.0)


def test_a_new_incarnation_starts_without_load_and_prefixes() -> None:
    made = roster("b")
    made.prefixes.learn("b", 1)
    made.sends.sent("r", "b", 10, 0.5)
    made.member("b", NodeState.ALIVE, incarnation=2)
    candidate = made.get("b")
    assert candidate is not None and not candidate.load.ready and candidate.rtt_ms == 2.0
    view = made.view([1], READY, 1.0)
    assert view.matched == {} and view.unseen == {}
    made.member("b", NodeState.DEAD, incarnation=1)
    candidate = made.get("b")
    assert candidate is not None and candidate.state is NodeState.ALIVE


def test_a_dead_node_is_remembered_with_its_models_but_not_listed() -> None:
    made = roster("b")
    made.models("b", {"only": ModelInfo("only")})
    made.member("b", NodeState.DEAD, incarnation=1)
    made.models("b", {})
    candidate = made.get("b")
    assert candidate is not None and set(candidate.models) == {"only"}
    assert [set(models) for models in made.catalogues()] == [{"m"}]


def test_the_view_has_this_node_as_it_is_now() -> None:
    made = roster("b")
    view = made.view([], LoadVector(ready=True, running=3), 50.0)
    me, peer = view.candidates
    assert me.is_self and me.load.running == 3 and me.age_s(50.0) == 0 and me.hop_ms == 0
    assert not peer.is_self and peer.age_s(50.0) == 50 and peer.hop_ms == 2.0


def test_views_share_candidates_until_gossip_changes_them() -> None:
    made = roster("b", "c")
    one, two = made.view([], READY, 1.0), made.view([], READY, 1.0)
    assert one.candidates[1] is two.candidates[1] and one.typical is two.typical
    made.row("b", incarnation=1, seq=2, load=READY, age_s=0.0, now=1.0)
    three = made.view([], READY, 1.5)
    assert three.candidates[1] is not one.candidates[1] and three.candidates[2] is one.candidates[2]
    assert three.typical is not one.typical


def test_a_vector_from_a_refusal_counts_at_once() -> None:
    made = roster("b")
    made.sends.sent("r", "b", 10, 1.0)
    made.sends.ended("r")
    made.fresh("b", LoadVector(ready=True, waiting=9), 2.0)
    candidate = made.get("b")
    assert candidate is not None and candidate.load.waiting == 9 and candidate.age_s(2.0) == 0
    assert made.row("b", incarnation=1, seq=2, load=READY, age_s=0.0, now=3.0)


def test_bytes_per_token_are_learnt_slowly_and_within_reason() -> None:
    made = roster()
    for _ in range(200):
        made.learn_ratio("m", 3000, 1000)
    assert abs(made.view([], READY, 0.0).bytes_per_token["m"] - 3.0) < 0.01
    made.learn_ratio("m", 10**9, 1)
    assert made.view([], READY, 0.0).bytes_per_token["m"] < 4.0
    for size, tokens in ((0, 5), (100, 90), (5000, 0)):  # nothing, a chat template, nonsense
        made.learn_ratio("short", size, tokens)
    assert "short" not in made.view([], READY, 0.0).bytes_per_token
    for number in range(module.MAX_RATIOS + 5):
        made.learn_ratio(f"m{number}", 4000, 1000)
    assert len(made.view([], READY, 0.0).bytes_per_token) == module.MAX_RATIOS


def test_nodes_are_bounded_and_the_dead_go_first() -> None:
    made = Roster("a")
    made.member("a", NodeState.ALIVE, incarnation=1)
    made.member("dead", NodeState.DEAD, incarnation=1)
    for number in range(module.MAX_NODES):
        made.member(f"n{number}", NodeState.ALIVE, incarnation=1)
    assert len(made.names()) == module.MAX_NODES
    assert made.get("a") is not None and made.get("dead") is None and made.get("n0") is None


def test_a_send_is_unseen_until_a_vector_from_after_it() -> None:
    sends = OwnSends()
    sends.sent("r1", "b", 100, 10.0)
    sends.sent("r2", "b", 50, 12.0)
    assert sends.unseen == {"b": Unseen(2, 150)}
    sends.vector("b", 10.02, 10.0)  # true before r1 could have arrived
    assert sends.unseen == {"b": Unseen(2, 150)}
    sends.vector("b", 11.0, 10.0)
    assert sends.unseen == {"b": Unseen(1, 50)}
    sends.ended("r1")
    assert sends.unseen == {"b": Unseen(1, 50, 1)}
    sends.ended("r2")
    assert sends.unseen == {"b": Unseen(0, 0, 1)}
    sends.vector("b", 13.0, 10.0)
    assert sends.unseen == {}
    sends.validate()


def test_a_send_that_is_still_on_its_way_is_unseen() -> None:
    sends = OwnSends()
    sends.sent("r", "far", 100, 10.0)
    sends.vector("far", 10.3, 1000.0)  # half a second away: it arrives at 10.5
    assert sends.unseen == {"far": Unseen(1, 100)}
    sends.vector("far", 10.6, 1000.0)
    assert sends.unseen == {}


def test_a_bounced_request_moves() -> None:
    sends = OwnSends()
    sends.sent("r", "b", 10, 0.0)
    sends.sent("r", "c", 10, 0.1)
    assert sends.unseen == {"c": Unseen(1, 10)}
    sends.ended("r")
    sends.ended("r")
    assert sends.unseen == {}
    sends.validate()


class Sends(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sends = OwnSends(max_sends=5)
        self.now = 0.0

    rids, places = st.sampled_from("rstuvwxy"), st.sampled_from("bcd")

    @rule(rid=rids, place=places, tokens=st.integers(0, 9))
    def sent(self, rid: str, place: str, tokens: int) -> None:
        self.now += 0.03
        self.sends.sent(rid, place, tokens, self.now)

    @rule(rid=rids)
    def ended(self, rid: str) -> None:
        self.sends.ended(rid)

    @rule(place=places, age=st.floats(0, 0.2))
    def vector(self, place: str, age: float) -> None:
        self.sends.vector(place, self.now - age, 5.0)

    @rule(place=places)
    def forget(self, place: str) -> None:
        self.sends.forget(place)

    @invariant()
    def books(self) -> None:
        self.sends.validate()
        assert all(u.sent >= 0 and u.sent_ms >= 0 and u.finished >= 0 for u in self.sends.unseen.values())


TestSends = Sends.TestCase
TestSends.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_node_with_a_bad_beginning_is_avoided_and_tried_again_when_that_has_faded() -> None:
    """Its first answers were slow; nobody asks it, so it never measures better ones: only time can say so."""
    seen, policy = Roster("me"), make_policy("cost")
    meters = {"good": LoadMeter(slots=8), "bad": LoadMeter(slots=8)}

    def run(name: str, now: float, gap_s: float) -> None:
        meters[name].dispatched("r", now, 1000)
        meters[name].first_byte("r", now + 0.1)
        meters[name].chunk("r", now + 0.1 + 10 * gap_s, 10)
        meters[name].finished("r", now + 0.1 + 10 * gap_s, 11)

    for name in meters:
        seen.member(name, NodeState.ALIVE, incarnation=1, rtt_ms=1.0)
        seen.models(name, {MODEL: info()})
    last = 105.0 + FRESH_S + 8 * FADE_S
    for number in range(5):
        run("bad", 3.0 * number, 0.2)
    for number in range(int(last) - 1):
        run("good", float(number), 0.02)

    def chosen(now: float) -> set[str]:
        for name, meter in meters.items():
            load = meter.vector(now, ready=True, draining=False)
            seen.row(name, incarnation=1, seq=int(now), load=load, age_s=0.0, now=now)
        view = seen.view((), LoadVector(), now)
        plans = [decide(view, request(), policy, now, random.Random(seed), entry="me") for seed in range(40)]
        return {plan.target for plan in plans if isinstance(plan, Plan)}

    assert chosen(30.0) == {"good"}
    assert chosen(last) == {"good", "bad"}


def test_a_row_that_was_under_way_while_the_node_told_its_load_itself_does_not_take_that_back() -> None:
    made = roster("b")
    made.row("b", incarnation=1, seq=3, load=LoadVector(waiting=1), age_s=0.0, now=1.0)
    made.fresh("b", LoadVector(waiting=9), 2.0)
    assert not made.row("b", incarnation=1, seq=4, load=LoadVector(waiting=2), age_s=0.5, now=2.1)
    assert made.get("b").load.waiting == 9  # type: ignore[union-attr]
    assert made.row("b", incarnation=1, seq=5, load=LoadVector(waiting=3), age_s=0.1, now=2.3)
    assert made.get("b").load.waiting == 3  # type: ignore[union-attr]


def test_how_much_of_what_is_asked_for_is_held_somewhere_is_learnt() -> None:
    roster = Roster("a")
    assert roster.view([], LoadVector(), 0.0).reuse == PRIOR_REUSE
    for _ in range(200):
        roster.asked(1000, 900)
        roster.asked(0, 0)
    assert roster.view([], LoadVector(), 0.0).reuse > 0.88
    for _ in range(200):
        roster.asked(1000, 0)
    assert roster.view([], LoadVector(), 0.0).reuse < 0.05
