"""Stored responses: what passed through a node is asked for where it was stored."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.plan import Plan, Refusal
from node.prompt import ParsedRequest, parse_request
from node.stored import StoredResponses
from node.view import NodeState
from tests.node.routing.building import ask, info, node, planned, refused, view

CREATE = ParsedRequest(path="/v1/responses", model="m")
WHOLE = b'{"id":"resp_1","created_at":1,"object":"response"}'
EVENT = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_2","object":"response"}}\n\n'


def asking(response: str) -> ParsedRequest:
    return parse_request(f"/v1/responses/{response}", b"")


@pytest.mark.parametrize("first", [WHOLE, EVENT, b'{ "id" : "resp_2" }'])
def test_the_id_of_a_whole_answer_and_of_a_stream_is_learnt(first: bytes) -> None:
    stored = StoredResponses()
    stored.answered(CREATE, "b", first)
    assert stored.owner(asking("resp_1" if b"resp_1" in first else "resp_2")) == "b"
    assert stored.owner(asking("resp_9")) is None and stored.owner(CREATE) is None


def test_answers_of_other_endpoints_and_without_an_id_teach_nothing() -> None:
    stored = StoredResponses()
    stored.answered(ParsedRequest(path="/v1/chat/completions", model="m"), "b", WHOLE)
    stored.answered(ParsedRequest(path="/v1/responses/resp_1/cancel", model="m"), "b", WHOLE)
    stored.answered(CREATE, "b", b'{"id":"chatcmpl-1"}')
    stored.answered(CREATE, "b", b" " * 5000 + WHOLE)
    assert not len(stored)


def test_the_memory_is_bounded_and_keeps_what_is_asked_for() -> None:
    stored = StoredResponses(limit=3)
    for number in range(3):
        stored.answered(CREATE, f"n{number}", json.dumps({"id": f"resp_{number}"}).encode())
    assert stored.owner(asking("resp_0")) == "n0"
    stored.answered(CREATE, "n3", b'{"id": "resp_3"}')
    assert len(stored) == 3 and stored.owner(asking("resp_1")) is None and stored.owner(asking("resp_0")) == "n0"


@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer(first: bytes) -> None:
    StoredResponses().answered(CREATE, "b", first)


def decided(owner: str | None, asked: ParsedRequest, **of_b: object) -> Plan | Refusal:
    a, b = node("a", info("m"), info("n"), is_self=True), node("b", info("n"), queued_ms=9e9, **of_b)  # type: ignore[arg-type]
    seen = view(a, b)
    return ask(type(seen)(candidates=seen.candidates, owner=owner), asked)


def test_a_request_for_a_stored_response_goes_to_its_node_whatever_that_costs() -> None:
    assert planned(decided("b", asking("resp_1"))).target == "b"
    body = json.dumps({"model": "n", "input": "and then?", "previous_response_id": "resp_1"}).encode()
    assert planned(decided("b", parse_request("/v1/responses", body))).target == "b"
    assert planned(decided(None, parse_request("/v1/responses", body))).target == "a"


def test_a_response_whose_node_is_gone_or_that_nobody_knows_is_a_clear_404() -> None:
    for state, why in ((NodeState.DEAD, "dead"), (NodeState.LEFT, "left the cluster")):
        lost = refused(decided("b", asking("resp_1"), state=state))
        assert (
            (lost.status, lost.code) == (404, "response_not_found") and why in lost.message and "resp_1" in lost.message
        )
    gone = refused(decided("c", asking("resp_1")))
    assert (gone.status, gone.code) == (404, "response_not_found")
    unknown = refused(decided(None, asking("resp_1")))  # several models, none named
    assert (unknown.status, unknown.code) == (404, "response_not_found")


def test_a_node_that_is_only_busy_or_draining_is_waited_for() -> None:
    assert refused(decided("b", asking("resp_1"), draining=True)).status == 503
