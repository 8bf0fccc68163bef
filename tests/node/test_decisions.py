"""The log of decisions: bounded, without prompts, with what came of each."""

from __future__ import annotations

import json

import pytest

from node.decisions import MAX_DECISIONS, SHOWN, DecisionLog
from node.plan import Plan, RouteOptions
from node.policy import CandidateCost
from node.prompt import parse_request
from node.relay.call import Call
from node.relay.forward import CACHED_HEADER, PULLED_HEADER

SECRET = "the launch code is 0000"


def call(*, stream: bool = True, rid: str = "r") -> Call:
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": SECRET * 100}]}
    parsed = parse_request("/v1/chat/completions", json.dumps(body).encode())
    return Call("POST", "/v1/chat/completions", [("Authorization", SECRET)], parsed, rid, RouteOptions(), 10.0)


def plan(**fields: object) -> Plan:
    mine = CandidateCost("b", 99.0, hop_ms=1.0, queue_ms=20.0, prefill_ms=79.0)
    base: dict[str, object] = {"matched_tokens": 512, "prompt_tokens": 700, "decided_at": 10.5, "hops": 1}
    costs = (mine, CandidateCost("c", 120.0))
    return Plan("r", "m", "a", "b", costs=costs, **{**base, **fields})  # type: ignore[arg-type]


def test_an_entry_has_what_was_expected_beside_what_was_measured_and_no_text() -> None:
    log = DecisionLog()
    log.note(call(), plan(), 200, 10.7, first_byte_s=0.7, told={CACHED_HEADER: "480", PULLED_HEADER: "3"})
    told = log.recent(12.7)
    (entry,) = told["decisions"]  # type: ignore[misc]
    assert (entry["target"], entry["status"], entry["ago_s"]) == ("b", 200, 2.0)
    assert (entry["first_byte_ms"], entry["ran_ms"], entry["predicted_ms"]) == (700.0, pytest.approx(200.0), 100.0)
    assert (entry["cached_tokens"], entry["predicted_cached_tokens"], entry["pulled_blocks"]) == (480, 512, 3)
    assert entry["cost"]["queue_ms"] == 20.0
    assert told["forecast"] == {
        "streams": 1, "predicted_over_real_median": 0.5, "error_median": 0.5,
        "predicted_cached_tokens": 512, "cached_tokens": 480,
    }  # fmt: skip
    assert SECRET not in json.dumps(told) + repr(log._ring)


def test_a_refusal_and_an_answer_in_one_piece_are_logged_and_not_taken_for_forecasts() -> None:
    log = DecisionLog()
    log.note(call(), None, 503, 11.0, first_byte_s=None, told={})
    log.note(call(stream=False), plan(), 200, 40.0, first_byte_s=30.0, told={})
    log.note(call(), plan(), 500, 40.0, first_byte_s=30.0, told={PULLED_HEADER: "many"})
    told = log.recent(50.0)
    assert told["forecast"]["streams"] == 0  # type: ignore[index]
    newest, _, refused = told["decisions"]  # type: ignore[misc]
    assert (refused["target"], refused["status"], refused["ran_ms"]) == (None, 503, None)
    assert newest["pulled_blocks"] is None and newest["cached_tokens"] is None


def test_an_answer_that_broke_off_says_so_and_who_else_was_weighed_is_told() -> None:
    log, asked = DecisionLog(), call()
    log.note(asked, plan(), 200, 10.7, first_byte_s=0.7, told={})
    (entry,) = log.recent(12.7)["decisions"]  # type: ignore[misc]
    assert entry["broke"] is None and entry["others"] == [{"node": "c", "total_ms": 120.0}]
    log.broke(asked, "its engine died")
    (entry,) = log.recent(12.7)["decisions"]  # type: ignore[misc]
    assert entry["broke"] == "its engine died"


def test_it_is_bounded_and_shows_the_newest_first() -> None:
    log = DecisionLog()
    for number in range(MAX_DECISIONS + 50):
        log.note(call(rid=str(number)), plan(), 200, 20.0, first_byte_s=1.0, told={})
    decisions = log.recent(21.0)["decisions"]
    assert isinstance(decisions, list) and len(decisions) == MAX_DECISIONS
    assert decisions[0]["rid"] == str(MAX_DECISIONS + 49) and len(log.latest(21.0)) == SHOWN
    assert [d["rid"] for d in log.recent(21.0, 2)["decisions"]] == ["561", "560"]  # type: ignore[attr-defined]
    assert log.recent(21.0, 0)["decisions"] == []
    assert all(decision.plan is not None and len(decision.plan.costs) == 1 for decision in log._ring)
