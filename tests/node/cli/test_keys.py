"""`grapevine keys`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

RING = {"keys": [{"id": "aa", "seals": True, "opened": 7}, {"id": "bb", "seals": False, "opened": 0}]}


@pytest.fixture
def with_keys(answers: dict[str, tuple[int, object]], url: str) -> str:
    answers["/admin/keys"] = (200, RING)
    me = {"name": "a", "state": "alive", "http": url.removeprefix("http://"), "url": url}
    gone = {"name": "b", "state": "dead", "http": "127.0.0.1:1", "url": "http://127.0.0.1:1"}
    answers["/gossip/members"] = (200, {"members": [me, gone]})
    return url


def test_keys_are_listed_by_id(run: Callable[..., Result], with_keys: str) -> None:
    result = run("keys", "list", "--node", with_keys)
    assert "aa (in use) opened 7, bb opened 0" in result.output
    assert json.loads(run("keys", "list", "--node", with_keys, "--json").output) == {with_keys: RING["keys"]}


def test_a_key_is_read_from_a_file_or_made_and_goes_to_every_node_that_is_up(
    run: Callable[..., Result], with_keys: str, asked: list[tuple[str, Any]]
) -> None:
    assert run("keys", "add", "-", "--node", with_keys, input="my secret\nmore").exit_code == 0
    assert asked[-1] == ("/admin/keys", {"add": "my secret"})
    result = run("keys", "add", "--generate", "--all", "--node", with_keys)
    assert result.exit_code == 0, result.output
    assert asked[-1][1]["add"] in result.stderr
    assert len(asked[-1][1]["add"]) >= 40
    assert run("keys", "add", "--node", with_keys, input="typed secret\n").exit_code == 0
    assert asked[-1] == ("/admin/keys", {"add": "typed secret"})


def test_a_key_that_a_node_lacks_is_not_used_and_one_in_use_is_not_removed(
    run: Callable[..., Result], with_keys: str, asked: list[tuple[str, Any]]
) -> None:
    lacking = run("keys", "use", "--all", "--node", with_keys, "cc")
    assert (lacking.exit_code, "lacks the key cc" in lacking.output) == (1, True)
    sealing = run("keys", "remove", "--node", with_keys, "aa")
    assert (sealing.exit_code, "still seals with aa" in sealing.output) == (1, True)
    assert not [body for path, body in asked if path == "/admin/keys" and body]
    assert run("keys", "use", "--node", with_keys, "bb").exit_code == 0
    assert run("keys", "remove", "--node", with_keys, "bb").exit_code == 0
    assert [body for path, body in asked if path == "/admin/keys" and body] == [{"use": "bb"}, {"remove": "bb"}]
