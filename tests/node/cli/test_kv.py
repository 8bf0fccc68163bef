"""`grapevine kv` and `grapevine kv warm`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

Answers = dict[str, tuple[int, object]]
KV = {
    "enabled": True,
    "connected": True,
    "encrypted": True,
    "why": "",
    "fingerprint": {"block_size": 16, "isa": "amx"},
    "unlike": {"b": "another fingerprint of m", "c": "another fingerprint of m"},
    "corrupt": 0,
    "copy_bytes_s": 3_400_000_000,
    "tokens": {"prompt": 1000, "engine": 250, "pool": 500},
    "top": [{"prefix": "00ff00ff00ff00ff", "blocks": 7, "chunks": 3, "uses": 12}],
    "peers": {
        "b": {
            "pulls": 3, "blocks": 40, "bytes": 120_000_000, "bytes_s": 2_500_000_000, "ways": {"same host": 40},
            "failures": {"stalled": 2}, "last_failure": "it stopped sending",
        }
    },
    "pool": {
        "capacity_bytes": 2_000_000_000, "used_bytes": 500_000_000, "blocks": 160, "protected": 40, "evictions": 3,
        "recalled": 1, "hits": 30, "misses": 10, "hit_ratio": 0.75,
    },
    "served": {"bytes": 1_000_000_000, "pinned_bytes": 0, "busy": 1},
}  # fmt: skip


def test_pool_transfers_prefixes_and_differences_are_shown(
    run: Callable[..., Result], url: str, answers: Answers
) -> None:
    members = [{"name": "a"}, {"name": "b", "url": url}, {"name": "c", "url": "http://127.0.0.1:1"}]
    answers["/gossip/state"] = (200, {"self": "a", "members": members, "kv": KV})
    result = run("kv", "--node", url)
    assert result.exit_code == 0, result.output
    for words in (
        "pool 0.50 of 2.00 GB, 160 blocks (40 used again), 3 evicted (1 of them came back)",
        "25 % found in the engine's cache, 50 % in the pool",
        "the engine copies blocks out of the pool at 3.40 GB/s",
        "40 blocks, 75 % were here",
        "blocks travel over TLS",
        "00ff00ff00ff00ff",
        "last failure of b: it stopped sending",
        "blocks of c cannot be used here: another fingerprint of m",
    ):
        assert words in result.output
    row = next(line for line in result.output.splitlines() if line.startswith("b "))
    for cell in ("same host", "3", "40", "0.12", "2.50", "2"):
        assert cell in row
    shown = json.loads(run("kv", "--json", "--node", url).output)
    assert shown["node"] == "a" and shown["pool"] == KV["pool"]


def test_fingerprints_of_nodes_that_differ_are_compared_field_by_field(
    run: Callable[..., Result], url: str, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [{"name": "b", "url": "http://peer:1"}]
    answers["/gossip/state"] = (200, {"self": "a", "members": members, "kv": {**KV, "unlike": {"b": "?"}}})
    from node.cli import kv as command

    asked_of = command.ask

    def ask(where: str, path: str, *rest: Any) -> Any:
        if where == "http://peer:1":
            return {"kv": {"fingerprint": {"block_size": 32, "isa": "amx"}}}
        return asked_of(where, path, *rest)

    monkeypatch.setattr(command, "ask", ask)
    assert "blocks of b cannot be used here: block_size is 32 there and 16 here" in run("kv", "--node", url).output


@pytest.mark.parametrize("connected", [True, False])
def test_why_no_block_moves_is_shown(run: Callable[..., Result], url: str, answers: Answers, connected: bool) -> None:
    """Also where the connector is there, and only its blocks match nothing."""
    answers["/gossip/state"] = (200, {"self": "a", "kv": {**KV, "connected": connected, "why": "rope is unknown"}})
    assert "no block moves: rope is unknown" in run("kv", "--node", url).output


@pytest.mark.parametrize("kv", [None, {"enabled": False}, {}, {"enabled": True}])
def test_a_node_without_a_pool_or_of_another_version_is_shown_too(
    run: Callable[..., Result], url: str, answers: Answers, kv: object
) -> None:
    answers["/gossip/state"] = (200, {"self": "a", "kv": kv})
    result = run("kv", "--node", url)
    assert result.exit_code == 0 and "a" in result.output


def step(**more: object) -> tuple[int, object]:
    told = {"from": "b", "whole": True, "reason": "complete", "detail": "", "prefixes": 2, "blocks": 5}
    return 200, {**told, "bytes": 5_000_000, "seconds": 0.005, **more}


def test_warming_says_what_came(
    run: Callable[..., Result], url: str, answers: Answers, asked: list[tuple[str, Any]]
) -> None:
    answers["/admin/kv/warm"] = step()
    result = run("kv", "warm", "--from", "b", "--max-gib", "0.5", "--node", url)
    assert result.exit_code == 0, result.output
    assert "up to 0.5 GiB of what b uses most is here (5 blocks, 5.0 MB, 1.00 GB/s" in result.output
    assert asked == [("/admin/kv/warm", {"from": "b", "max_bytes": 1 << 29})]


@pytest.mark.parametrize("option", ["--max-gib", "--deadline"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "much", "1e300"])
def test_amounts_that_are_none_are_refused_before_anybody_is_asked(
    run: Callable[..., Result], url: str, asked: list[tuple[str, Any]], option: str, value: str
) -> None:
    result = run("kv", "warm", "--from", "b", option, value, "--node", url)
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.output
    assert not asked


def test_the_node_may_be_named_before_the_subcommand(run: Callable[..., Result], url: str, answers: Answers) -> None:
    answers["/admin/kv/warm"] = step()
    result = run("kv", "--node", url, "--json", "warm", "--from", "b")
    assert result.exit_code == 0 and json.loads(result.output)["whole"] is True


def test_warming_goes_on_until_its_deadline(
    run: Callable[..., Result], url: str, answers: Answers, asked: list[tuple[str, Any]]
) -> None:
    answers["/admin/kv/warm"] = step(whole=False, reason="deadline")
    result = run("kv", "warm", "--from", "b", "--deadline", "0.2", "--json", "--node", url)
    assert result.exit_code == 1
    total = json.loads(result.output)
    assert len(asked) >= 1 and total["blocks"] == 5 * len(asked) and not total["whole"]


def test_warming_that_fails_is_told_with_its_reason(run: Callable[..., Result], url: str, answers: Answers) -> None:
    answers["/admin/kv/warm"] = step(whole=False, reason="mismatch", detail="isa is vec there and amx here", blocks=0)
    result = run("kv", "warm", "--from", "b", "--node", url)
    assert result.exit_code == 1 and "mismatch: isa is vec there and amx here" in result.output
    assert "again" not in result.output, "the engines will not be any more alike"
    answers["/admin/kv/warm"] = step(whole=False, reason="broken", detail="it went away")
    assert "run it again to go on" in run("kv", "warm", "--from", "b", "--node", url).output
    answers["/admin/kv/warm"] = (409, {"error": {"message": "no live node named b serves KV blocks"}})
    result = run("kv", "warm", "--from", "b", "--node", url)
    assert result.exit_code == 1 and "no live node named b" in result.output
