"""What a starting node prints: above all the one command that another host needs, and must be able to run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from node import banner
from node.cli.options import split_arguments
from node.cli.start import start
from node.settings import make_settings


def up(tmp_path: Path, address: str = "10.0.0.5", **given: Any) -> banner.Started:
    settings = make_settings(state_dir=tmp_path / "s", run_dir=tmp_path / "r", **given)
    return banner.started(settings, http_port=8100, gossip_address=(address, 18100), kv_port=28100)


def told(tmp_path: Path, address: str = "10.0.0.5", **given: Any) -> str:
    return "\n".join(up(tmp_path, address, **given).lines())


def joining(text: str) -> dict[str, Any]:
    """The settings of a node that is started with the printed command."""
    line = next(line for line in text.splitlines() if line.startswith("  join"))
    words = shlex.split(line.partition("join")[2].partition("(")[0])
    assert words[:2] == ["grapevine", "start"]
    own, after = split_arguments(words[2:])
    return {**start.make_context("start", own).params, "engine_args": tuple(after)}


def test_the_printed_command_joins_from_another_host(tmp_path: Path) -> None:
    params = joining(told(tmp_path, host="0.0.0.0", advertise="10.0.0.5"))
    assert params["join"] == ("10.0.0.5:18100",) and params["host"] == "0.0.0.0" and params["cluster"] == "default"


def test_a_cluster_with_a_label_is_joined_by_its_label_and_the_key_is_named_not_shown(tmp_path: Path) -> None:
    text = told(tmp_path, host="0.0.0.0", advertise="10.0.0.5", cluster="prod", cluster_key="a long enough secret")
    assert joining(text)["cluster"] == "prod"
    assert "with the same GRAPEVINE_CLUSTER_KEY" in text and "secret" not in text


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_node_on_loopback_says_that_only_this_host_can_join(tmp_path: Path, address: str) -> None:
    text = told(tmp_path, address)
    params = joining(text)
    assert params["port"] == 8101 and "start with --host 0.0.0.0 to let others join" in text


def test_what_is_open_is_told_where_others_can_reach_it(tmp_path: Path) -> None:
    reachable = {"host": "0.0.0.0", "advertise": "10.0.0.5"}
    assert "no client API keys" in told(tmp_path, **reachable) and "no client API keys" not in told(tmp_path)
    closed = told(tmp_path, **reachable, clients_file="c", cluster_key="a long enough secret", tls_cert="t")
    assert "WARNING" not in closed and "https://10.0.0.5:8100/v1" in closed
    assert "poses as a node" in told(tmp_path, tls_cert="t")


def test_the_next_host_serves_the_same_model_in_the_same_way(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "served_model_name": ("big one", "b"),
        "kv_tls": True,
        "cluster_key": "a long enough secret",
        "engine_args": ("--tensor-parallel-size", "2", "--override", '{"a": 1}'),
    }
    params = joining(told(tmp_path, host="0.0.0.0", advertise="10.0.0.5", **given))
    assert {name: params[name] for name in given} == given | {"cluster_key": ""}


@pytest.mark.parametrize("secret", [("--api-key", "hush"), ("--hf-token=hush",), ("--some-password", "hush")])
def test_secrets_among_the_arguments_of_vllm_are_not_printed(tmp_path: Path, secret: tuple[str, ...]) -> None:
    text = told(tmp_path, engine_args=(*secret, "--max-num-batched-tokens", "4096"))
    assert "hush" not in text and "--max-num-batched-tokens 4096" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine_url": "http://10.0.0.9:8000"}, "with the --engine-url of a server of its own"),
        ({"engine_command": "mine --uds {uds} --api-key hush"}, "with the same --engine-command"),
        ({"tls_cert": "c.pem"}, "with a --tls-cert of its own"),
    ],
)
def test_what_the_next_host_must_bring_itself_is_said(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    text = told(tmp_path, host="0.0.0.0", advertise="10.0.0.5", **given)
    assert words in text and "hush" not in text and joining(text)["join"] == ("10.0.0.5:18100",)


def test_a_script_is_told_the_same_in_one_line(tmp_path: Path) -> None:
    shown = json.loads(up(tmp_path, host="0.0.0.0", advertise="10.0.0.5").as_json())
    assert shown["event"] == "started" and shown["url"] == "http://10.0.0.5:8100"
    assert shown["join"] == "grapevine start --host 0.0.0.0 --join 10.0.0.5:18100" and shown["others_can_join"] is True
    assert json.loads(banner.told_json("ready")) == {"event": "told", "text": "ready"}
