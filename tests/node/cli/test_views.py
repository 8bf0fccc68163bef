"""`grapevine state` and `members`: finding a node, tables, JSON, and what is said when nobody answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest
from click.testing import Result

from node import runfiles
from node.settings import Settings
from tests.node.cli.said import STATE


def test_the_state_of_the_node_of_this_host_is_shown_as_a_table(
    run: Callable[..., Result], told: Settings, url: str
) -> None:
    with runfiles.claim(told, url):
        result = run("state")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if "SmolLM2" in line)
    for word in ("a *", "alive 12 s", "2", "1", "26 %", "87 ms", "42", "0.2 s"):
        assert word in row
    assert "b[x]" in result.output
    assert "engine of this node: failed, the model /x does not exist" in result.output


def test_a_node_whose_engine_failed_is_not_shown_as_loading(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    members = [{"name": name, "state": "alive", "state_age_s": 4.0, "load": {"ready": False}} for name in "ab"]
    answers["/gossip/state"] = (200, {**STATE, "members": members})
    output = run("state", "--node", url).output
    assert "failed 4 s" in output  # of the node itself the engine is known, of a peer only that it is not ready
    assert "loading 4 s" in output


@pytest.mark.parametrize("command", ["state", "members"])
def test_json_is_what_the_node_said(
    run: Callable[..., Result], url: str, answers: Mapping[str, tuple[int, object]], command: str
) -> None:
    result = run(command, "--json", "--node", url)
    assert json.loads(result.output) == answers[f"/gossip/{command}"][1]


def test_members_are_listed_and_a_node_may_be_named_without_http(run: Callable[..., Result], url: str) -> None:
    result = run("members", "--node", url.removeprefix("http://"))
    assert result.exit_code == 0
    assert "alive" in result.output


def test_a_proxy_of_the_environment_is_not_asked(run: Callable[..., Result], url: str) -> None:
    assert run("members", "--node", url, env={"http_proxy": "http://127.0.0.1:1"}).exit_code == 0


def test_without_a_node_the_exit_status_is_3_and_the_message_says_what_to_do(run: Callable[..., Result]) -> None:
    result = run("state")
    assert result.exit_code == 3
    assert "grapevine start" in result.output


def test_a_node_that_cannot_be_reached_is_told(run: Callable[..., Result]) -> None:
    result = run("state", "--node", "http://127.0.0.1:1")
    assert result.exit_code == 3
    assert "cannot be reached" in result.output


def test_an_error_of_the_node_is_told(
    run: Callable[..., Result], url: str, answers: dict[str, tuple[int, object]]
) -> None:
    answers["/gossip/state"] = (401, {"error": {"message": "Send an API key."}})
    result = run("state", "--node", url)
    assert (result.exit_code, "Send an API key." in result.output) == (1, True)
    answers["/gossip/state"] = (200, b"<html>")
    result = run("state", "--node", url)
    assert (result.exit_code, "does not answer as a Grapevine node" in result.output) == (1, True)
