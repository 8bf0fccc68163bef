"""The command line and environment of vLLM."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.args import flags_of, option
from node.engine.client import engine_address
from node.engine.command import EngineCommand, Host, build_command, own_command
from node.errors import SettingsError
from node.settings import GIB, Settings, make_settings

HOST = Host(env={"PATH": "/bin"}, cpu_build=True, cores=8, free_bytes=64 * GIB, python="/venv/bin/python")
GPU = replace(HOST, cpu_build=False)


def settings(*engine_args: str, **more: object) -> Settings:
    values = {"model": "org/model", "name": "n1", "run_dir": "/run/g", "state_dir": "/state", **more}
    return make_settings(engine_args=engine_args, **values)


def command(*engine_args: str, host: Host = HOST, model: str = "org/model", **more: object) -> EngineCommand:
    return build_command(settings(*engine_args, **more), model, host)


def test_vllm_is_started_as_a_module_on_our_socket_with_the_connector() -> None:
    made = command()
    assert made.argv[:3] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    assert option(made.argv, "--uds") == "/run/g/n1.engine"
    assert option(made.argv, "--model") == "org/model"
    assert option(made.argv, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert json.loads(option(made.argv, "--kv-transfer-config") or "") == {
        "kv_connector": "GrapevineConnector",
        "kv_connector_module_path": "kvmigrate.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"link": "/run/g/n1.link"},
    }
    assert made.address.socket == Path("/run/g/n1.engine")


def test_without_kv_there_is_no_connector() -> None:
    assert "--kv-transfer-config" not in command(kv=False).argv


@pytest.mark.parametrize("args", [("--data-parallel-size", "2"), ("--data_parallel_size=4",), ("-dp", "2")])
def test_engines_that_are_several_get_no_connector(args: tuple[str, ...]) -> None:
    """Their workers all have rank 0: each would take the other's place on the link, for ever."""
    assert "--kv-transfer-config" not in command(*args).argv
    assert "--kv-transfer-config" in command("--data-parallel-size", "1").argv


@pytest.mark.parametrize(
    ("user", "ours"),
    [
        (("--model", "other/model"), "--model"),
        (("--served_model_name=a",), "--served-model-name"),
        (("--uds", "/tmp/x"), "--uds"),
        (("--kv-transfer-config.kv_role", "kv_producer"), "--kv-transfer-config"),
        (("--no-enable-prompt-tokens-details",), "--enable-prompt-tokens-details"),
        (("--prefix-caching-hash-algo", "sha256"), "--prefix-caching-hash-algo"),
    ],
)
def test_a_flag_of_the_user_wins_over_ours(user: tuple[str, ...], ours: str) -> None:
    made = command(*user, served_model_name=("b",))
    assert made.argv[-len(user) :] == user
    assert ours not in made.argv[: -len(user)]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(st.lists(WORDS, max_size=8))
def test_what_the_user_writes_reaches_vllm_untouched_and_last(words: list[str]) -> None:
    words = [word for word in words if not word.startswith(("--ssl", "--grpc", "--headless"))]
    assert command(*words).argv[len(command(*words).argv) - len(words) :] == tuple(words)


@pytest.mark.parametrize("refused", ["--ssl-keyfile", "--ssl_certfile=x", "--grpc", "--headless"])
def test_a_flag_that_cannot_work_is_refused_with_the_reason(refused: str) -> None:
    with pytest.raises(SettingsError, match="leave it out"):
        command(refused)


def test_the_address_follows_what_the_user_told_vllm() -> None:
    address = engine_address(settings("--uds", "/tmp/x", "--api-key", "secret"))
    assert (address.socket, address.api_key) == (Path("/tmp/x"), "secret")
    assert address.headers() == {"authorization": "Bearer secret"}
    assert "secret" not in repr(address)


def test_a_directory_is_served_by_its_name_and_without_the_network(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    made = command(model=str(model))
    assert option(made.argv, "--served-model-name") == "my-model"
    assert made.env["HF_HUB_OFFLINE"] == "1"


def test_a_repository_keeps_its_name_and_the_network() -> None:
    made = command()
    assert "--served-model-name" not in made.argv
    assert "HF_HUB_OFFLINE" not in made.env


def test_the_default_model_has_its_public_name(tmp_path: Path) -> None:
    named = build_command(make_settings(name="n", run_dir="/r", state_dir="/s"), str(tmp_path), HOST)
    assert option(named.argv, "--served-model-name") == "SmolLM2-135M-Instruct"
    assert "--enforce-eager" in named.argv, "a newcomer does not wait minutes for a compiler"


def test_several_names_are_given_at_once() -> None:
    argv = command(served_model_name=("a", "b")).argv
    at = argv.index("--served-model-name")
    assert argv[at + 1 : at + 3] == ("a", "b")


def test_the_cpu_build_gets_threads_and_memory_that_leave_room() -> None:
    env = command("-tp", "2").env
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert env["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization", "--kv-cache-memory-bytes"])
def test_a_size_given_as_a_flag_is_not_overruled_by_the_environment(flag: str) -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in command(flag, "0.5").env


def test_the_environment_of_the_user_wins() -> None:
    mine = {"OMP_NUM_THREADS": "5", "VLLM_CPU_KVCACHE_SPACE": "3", "HF_HUB_OFFLINE": "0", "VLLM_NO_USAGE_STATS": "0"}
    env = command(host=replace(HOST, env=mine)).env
    assert {name: env[name] for name in mine} == mine


def test_another_build_of_vllm_gets_nothing_of_the_cpu() -> None:
    made = command(host=replace(GPU, can_compile=False))
    assert not {name for name in made.env if name.startswith(("VLLM_CPU", "OMP"))}
    assert "--enforce-eager" not in made.argv


def test_without_a_compiler_a_cpu_engine_does_not_try_to_compile() -> None:
    bare = replace(HOST, can_compile=False)
    assert "--enforce-eager" in command(host=bare).argv
    assert "--enforce-eager" not in command(host=HOST).argv
    for user in ("--no-enforce-eager", "-O3", "-cc.mode=3", "--compilation-config={}"):
        assert "--enforce-eager" not in command(user, host=bare).argv


def test_the_secrets_of_the_node_are_not_handed_to_the_engine() -> None:
    env = {"GRAPEVINE_CLUSTER_KEY": "a", "GRAPEVINE_ADMIN_TOKEN": "b", "GRAPEVINE_API_KEY": "c"}
    assert not env.keys() & command(host=replace(HOST, env=env)).env.keys()


def test_every_kind_of_engine_stands_back_as_far_as_the_settings_say() -> None:
    assert command().nice == make_settings(name="n", run_dir="/r", state_dir="/s").engine_nice > 0
    assert command(engine_nice=0).nice == 0
    own = make_settings(engine_command="serve {uds}", engine_nice=3, name="n", run_dir="/r", state_dir="/s")
    assert own_command(own, {}).nice == 3


def test_flags_are_read_in_all_their_spellings() -> None:
    args = ("--max_model_len=3", "-tp", "2", "--a.b", "1", "plain", "-O3")
    assert flags_of(args) == {"--max-model-len", "--tensor-parallel-size", "--a", "--optimization-level"}
    assert option(args, "--max-model-len") == "3"
    assert option(("--x", "1", "--x", "2"), "--x") == "2"
    assert option(("--x",), "--x") is None
