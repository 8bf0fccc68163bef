"""`grapevine explain`: costs, decisions that were made, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from node.policy.base import CandidateCost
from tests.node.cli.said import RECENT

REFUSED = {"refusal": {"status": 404, "code": "model_not_found", "message": "The model `x` does not exist."}}


def test_recent_decisions_are_a_table_with_what_came_of_them(
    run: Callable[..., Result], url: str, asked: list[tuple[str, Any]]
) -> None:
    result = run("explain", "--recent", "--node", url, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for shown in ("prefix 6 chunks", "40 ms", "45 ms", "768/800", "503", "10 %"):
        assert shown in result.output, result.output
    assert json.loads(run("explain", "--recent", "--json", "--node", url).output) == RECENT
    assert {path for path, _ in asked} == {"/route/recent?limit=20"}
    assert run("explain", "--recent", "hello", "--node", url).exit_code == 2


def test_no_number_of_a_recent_decision_is_cut_on_a_narrow_terminal(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    long = {
        "target": "host-a-8100", "reason": "pull from host-b-8100", "model": "meta-llama/Llama-3.3-70B-Instruct",
        "ago_s": 12, "status": 200, "predicted_ms": 1234, "ran_ms": 1330, "stream": True,
        "cached_tokens": 15360, "predicted_cached_tokens": 15376,
    }  # fmt: skip
    answers["/route/recent?limit=20"] = (200, {"decisions": [long]})
    output = run("explain", "--recent", "--node", url, env={"COLUMNS": "80"}).output
    for word in ("host-a-8100", "12 s", "200", "1234 ms", "1330 ms", "15360/15376"):
        assert word in output, output


def test_a_prompt_is_explained_for_the_first_model(
    run: Callable[..., Result], url: str, asked: list[tuple[str, Any]]
) -> None:
    result = run("explain", "hello", "--node", url)
    assert result.exit_code == 0, result.output
    assert asked[-1] == ("/route/explain", {"model": "SmolLM2", "messages": [{"role": "user", "content": "hello"}]})
    for word in ("target a", "pulled from b", "12.3", "99.0", "not c: not ready"):
        assert word in result.output


def test_totals_that_are_no_times_are_not_called_milliseconds(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    plan = {"target": "a", "policy": "least_connections", "reason": "least connections, 0 active", "unit": "requests"}
    costs = [CandidateCost(name, 0.0).as_dict() for name in "ab"]
    answers["/route/explain"] = (200, {"plan": plan, "candidates": costs})
    output = run("explain", "hello", "--node", url, env={"COLUMNS": "80"}).output
    assert "requests of each candidate" in output and ", ms" not in output
    assert "total" in output and output.count("0.0") == 2  # a total of nought is one, too


def test_a_body_is_explained_for_its_endpoint(
    run: Callable[..., Result], url: str, asked: list[tuple[str, Any]], answers: dict[str, tuple[int, object]]
) -> None:
    answers["/route/explain?path=%2Fv1%2Fresponses"] = answers["/route/explain"]
    body = {"model": "m", "input": "hello"}
    result = run("explain", "--path", "/v1/responses", "--body", "-", "--node", url, input=json.dumps(body))
    assert result.exit_code == 0 and asked[-1] == ("/route/explain?path=%2Fv1%2Fresponses", body)
    assert run("explain", "--path", "/v1/responses", "hello", "--node", url).exit_code == 2


def test_a_recent_answer_that_broke_off_is_marked(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    broken = {"target": "a", "status": 200, "broke": "its engine died"}
    answers["/route/recent?limit=20"] = (200, {"decisions": [broken, {"target": "a", "status": 200}]})
    assert run("explain", "--recent", "--node", url).output.count("200 broken") == 1


def test_the_costs_of_an_explanation_are_whole_on_a_narrow_terminal(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    cost = CandidateCost(
        "host-a-8100", 26087.9, hop_ms=11.8, queue_ms=1200.4, pull_ms=460.2, prefill_ms=3189.4, decode_ms=2602.1,
        matched_tokens=2560, matched_chunks=13, pulled_tokens=2560, source="host-b-8100", source_chunks=13, age_ms=2.8,
    )  # fmt: skip
    answers["/route/explain"] = (200, {"candidates": [cost.as_dict()], "promised_chunks": {"host-c": 7}})
    result = run("explain", "hello", "--node", url, env={"COLUMNS": "80"})
    for word in (
        "host-a-8100",
        "26088",
        "11.8",
        "1200",
        "460.2",
        "3189",
        "2602",
        "2560",
        "host-b-8100",
        "host-c",
        "7 chunks",
    ):
        assert word in result.output
    assert "…" not in result.output and "barrier" not in result.output


def test_who_gives_blocks_beside_the_source_is_told(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    sources = [{"node": name, "chunks": 9} for name in "bcd"]
    plan = {"target": "a", "source": "b", "sources": sources, "policy": "cost", "reason": "pull 9 chunks from b"}
    for helpers, told in (
        (("c", "d"), "pulled from b together with c and d ("),
        (("c",), "pulled from b together with c, where need be from d ("),
        ((), "pulled from b, where need be from c and d ("),
    ):
        cost = CandidateCost("a", 9.0, source="b", helpers=helpers).as_dict()
        answers["/route/explain"] = (200, {"plan": plan, "candidates": [{"node": "z", "helpers": ["e"]}, cost]})
        assert told in run("explain", "hello", "--node", url, env={"COLUMNS": "200"}).output


def test_a_whole_body_is_sent_as_it_is(run: Callable[..., Result], url: str, asked: list[tuple[str, Any]]) -> None:
    assert run("explain", "--body", "-", "--node", url, input='{"model": "m", "prompt": "p"}').exit_code == 0
    assert asked == [("/route/explain", {"model": "m", "prompt": "p"})]
    assert run("explain", "--node", url).exit_code == 2


def test_a_refusal_has_exit_status_1(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    answers["/route/explain"] = (200, REFUSED)
    result = run("explain", "x", "--node", url)
    assert result.exit_code == 1
    assert "refused with 404: The model `x` does not exist." in result.output
