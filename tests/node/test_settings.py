"""Settings: precedence, the same keys everywhere, errors that say what to do."""

from __future__ import annotations

import dataclasses
import os
import socket
import string
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import node
from node import addresses, dirs
from node.cli.options import PREFIX, kinds, settings_options, split_arguments
from node.cli.start import StartCommand
from node.errors import PortTakenError, SettingsError
from node.settings import GIB, RANGES, Settings, check_pool_fits, make_settings

FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
FREE_TEXT = ("model", "engine_api_key", "cluster_key", "admin_token")


@click.command(cls=StartCommand, context_settings={"auto_envvar_prefix": PREFIX})
@settings_options
@click.pass_context
def probe(ctx: click.Context, /, **values: Any) -> None:
    """As `start`, without the node."""
    after = ctx.meta["grapevine.engine_args"]
    if after:
        values["engine_args"] = tuple(after)
    ctx.obj.append(make_settings(**values))


def resolve(args: list[str], env: dict[str, str | None] | None = None) -> Settings:
    found: list[Settings] = []
    result = CliRunner().invoke(probe, args, env=env, obj=found, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def refused(args: list[str], env: dict[str, str | None] | None = None) -> str:
    result = CliRunner().invoke(probe, args, env=env, obj=[], catch_exceptions=False)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


WORD = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=8).filter(
    lambda word: not word.startswith("-") and word not in (".", "..")
)


#: Settings whose text has a form of its own.
SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "cors_origin": st.lists(WORD.map("https://{}".format), min_size=1, max_size=3).map(tuple),
    "otlp_traces_endpoint": WORD.map("http://127.0.0.1/{}".format),
    "state_dir": WORD.map(Path("/tmp").joinpath),
    "run_dir": WORD.map(Path("/tmp").joinpath),
}


def value_of(name: str) -> st.SearchStrategy[Any]:
    kind, about = kinds()[name], FIELDS[name].metadata
    if about["choices"]:
        return st.sampled_from(about["choices"])
    if name == "join":
        return st.lists(st.builds("{}:{}".format, WORD, st.integers(1, 65535)), min_size=1, max_size=3).map(tuple)
    if name in SHAPES:
        return SHAPES[name]
    if kind is bool:
        return st.booleans()
    if kind is int:
        least, most = RANGES[name]
        # Three disjoint ranges keep the three ports apart.
        shift = {"port": 1, "gossip_port": 20_001, "kv_port": 40_001}.get(name)
        return st.integers(shift, shift + 19_999) if shift else st.integers(int(least), int(most))
    if kind is float:
        return st.integers(1, 1000).map(float)
    return st.lists(WORD, min_size=1, max_size=3).map(tuple) if kind is tuple else WORD


def as_flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if name == "engine_args":
        return [flag, " ".join(value)]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, item)]
    return [f"{flag}={value}"]


def as_variable(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value)


def as_toml(name: str, value: Any, dashed: bool) -> str:
    key = name.replace("_", "-") if dashed else name
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}"
    if isinstance(value, tuple):
        return f"{key} = [{', '.join(repr(word) for word in value)}]"
    return f"{key} = {value}" if isinstance(value, int | float) else f'{key} = "{value}"'


# These exclude or need other keys and have tests of their own; ports that are not given follow `port`.
KEYS = sorted(FIELDS.keys() - {"engine_url", "engine_command", "kv_tls", "tls_key", "workers"})


@given(st.data())
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flags_win_over_the_environment_over_the_file_over_the_default(tmp_path: Path, data: st.DataObject) -> None:
    sources: list[dict[str, Any]] = []
    for _ in range(3):
        names = data.draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=6))
        sources.append({name: data.draw(value_of(name)) for name in names})
    flags, variables, file = sources
    path = tmp_path / "grapevine.toml"
    path.write_text("\n".join(as_toml(name, value, data.draw(st.booleans())) for name, value in file.items()))
    args = [word for name, value in flags.items() for word in as_flags(name, value)]
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith(PREFIX)}
    env |= {f"{PREFIX}_{name.upper()}": as_variable(value) for name, value in variables.items()}
    args += ["--config", str(path)]
    expected = {**file, **variables, **flags}
    assert resolve(args, env) == make_settings(**expected)


def test_workers_are_a_number_like_any_other() -> None:
    assert resolve(["--workers", "3"], {"GRAPEVINE_WORKERS": "2"}).workers == 3
    assert resolve([], {"GRAPEVINE_WORKERS": "2"}).workers == 2
    assert resolve([]).workers == 1


def test_the_keys_are_the_same_everywhere() -> None:
    options = {parameter.name for parameter in probe.params} - {"config", "help"}
    assert options == set(FIELDS)


def test_what_comes_after_two_dashes_goes_to_vllm_untouched() -> None:
    words = ["--join", "--enforce-eager", "--", "--port", "1", "--x=--y"]
    told = resolve(["--port", "9000", "--engine-args", "--not-used", "--", *words])
    assert told.engine_args == tuple(words)
    assert (told.port, told.join) == (9000, ())


def test_a_list_takes_several_values_after_one_flag() -> None:
    told = resolve(["--join", "a:1", "b:2", "--name", "n", "--join", "c:3", "--served-model-name", "x", "y"])
    assert (told.join, told.name, told.served_model_name) == (("a:1", "b:2", "c:3"), "n", ("x", "y"))
    assert split_arguments(["--join=a:1", "b:2"])[0] == ["--join=a:1", "b:2"]


@pytest.mark.parametrize("text", ["a:1,b:2", "a:1 b:2", " a:1 , b:2 "])
def test_a_list_in_the_environment_is_separated_by_commas_or_blanks(text: str) -> None:
    assert resolve([], {"GRAPEVINE_JOIN": text}).join == ("a:1", "b:2")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "g.toml"
    path.write_text('engine-args = "--max-model-len 4096"\nmdns = false\n')
    told = resolve([], {"GRAPEVINE_CONFIG": str(path)})
    assert (told.engine_args, told.mdns) == (("--max-model-len", "4096"), False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gosip-port = 1", ["unknown key 'gosip-port'", "did you mean 'gossip-port'?"]),
        ("zzzzzz = 1", ["unknown key", "known keys:", "served-model-name"]),
        ("port = true", ["port must be a number"]),
        ('port = "80"', ["port must be a number"]),
        ("mdns = 1", ["mdns must be true or false"]),
        ("join = [1]", ["join must be a list of texts"]),
        ("name = 3", ["name must be a text"]),
        ("port = ", ["is no TOML"]),
        ("kv-port = 1\nkv_port = 2", ["'kv_port' is there twice"]),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "g.toml"
    path.write_text(text)
    told = refused(["--config", str(path)])
    for word in words:
        assert word in told


def test_a_file_that_is_not_there_is_refused() -> None:
    assert "cannot be read" in refused(["--config", "/nowhere/g.toml"])


def test_a_wrong_value_is_told_with_the_place_it_came_from(tmp_path: Path) -> None:
    assert "GRAPEVINE_PORT" in refused([], {"GRAPEVINE_PORT": "x"})
    path = tmp_path / "g.toml"
    path.write_text('policy = "fastest"')
    told = refused(["--config", str(path)])
    assert "(from " in told
    assert "latency_based" in told


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70000}, ["--port 70000", "0 to 65535"]),
        ({"name": "a b"}, ["--name 'a b'", "letters"]),
        ({"name": ""}, ["--name"]),
        ({"name": "x" * 65}, ["--name"]),
        ({"cluster": "a/b"}, ["--cluster"]),
        ({"policy": "fastest"}, ["--policy", "cost or latency_based"]),
        ({"join": ("host:port",)}, ["--join", "HOST:PORT"]),
        ({"join": ("h:0",)}, ["--join"]),
        ({"port": 9000, "gossip_port": 9000}, ["--port and --gossip-port are both 9000"]),
        ({"engine_url": "localhost:8000"}, ["--engine-url", "http://"]),
        ({"engine_url": "http://h", "model": "m"}, ["leave --model out"]),
        ({"engine_url": "http://h", "engine_args": ("--x",)}, ["leave arguments after -- out"]),
        ({"engine_command": "x --uds {uds}", "model": "m"}, ["leave --model out"]),
        ({"engine_command": "x --uds {uds}", "engine_url": "http://h"}, ["leave --engine-url out"]),
        ({"engine_command": "x '{uds}"}, ["quoted"]),
        ({"engine_command": "x --port 8000"}, ["put {uds} where"]),
        ({"max_running": 0}, ["--max-running"]),
        ({"cors_origin": ("chat.example",)}, ["--cors-origin", "https://chat.example"]),
        ({"cors_origin": ("https://chat.example/",)}, ["--cors-origin"]),
        ({"cors_origin": ("null",)}, ["--cors-origin"]),
        ({"kv_pool_gib": -1.0}, ["--kv-pool-gib"]),
        ({"kv_tls": True}, ["--kv-tls", "GRAPEVINE_CLUSTER_KEY"]),
        ({"run_dir": "/tmp/" + "x" * 110}, ["--run-dir", "107", "shorter"]),
    ],
)
def test_a_setting_that_cannot_work_says_what_to_do(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        make_settings(**values)
    for word in words:
        assert word in str(caught.value)


@given(st.text(max_size=80), st.integers(0, 65535))
def test_a_default_name_is_always_valid(host: str, port: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        name = addresses.default_name(port)
    assert addresses.NAME_PATTERN.fullmatch(name)
    if port:
        assert name.endswith(f"-{port}")


@given(
    st.text(string.ascii_letters + "._-", min_size=1, max_size=64).filter(lambda name: name not in (".", "..")),
    st.integers(1, 86),
)
def test_sockets_of_any_name_fit_their_limit(name: str, length: int) -> None:
    told = make_settings(name=name, run_dir="/" + "r" * length)
    for path in (told.engine_socket, told.link_socket):
        assert len(os.fsencode(path)) <= dirs.MAX_SOCKET_PATH
    assert (
        told.engine_socket
        != make_settings(name=name + "x" if len(name) < 64 else "y", run_dir=told.run_dir).engine_socket
    )


@given(st.integers(1, 65535))
def test_ports_that_are_not_given_follow_the_port(port: int) -> None:
    told = make_settings(port=port)
    assert len({told.port, told.gossip_port, told.kv_port}) == 3
    assert 0 < told.gossip_port <= 65535 and 0 < told.kv_port <= 65535


def test_port_zero_means_any_for_all() -> None:
    told = make_settings(port=0)
    assert (told.gossip_port, told.kv_port) == (0, 0)
    assert told.name != make_settings(port=0).name


def test_secrets_are_neither_shown_nor_told() -> None:
    secrets = {name: "s3cr3t" for name, item in FIELDS.items() if item.metadata["secret"] and name != "api_key"}
    told = make_settings(**secrets, api_key=("s3cr3t",))
    assert len(secrets) == 3
    assert "s3cr3t" not in repr(told)
    assert "s3cr3t" not in str(told.public())


@pytest.mark.parametrize(
    ("text", "address"),
    [("h:1", ("h", 1)), ("10.0.0.1", ("10.0.0.1", 18100)), ("[fe80::1]:7", ("fe80::1", 7)), ("[::1]", ("::1", 18100))],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    assert addresses.split_address(text) == address
    assert addresses.split_address(addresses.join_address(*address)) == address


@given(st.text(max_size=30))
def test_any_address_is_read_or_refused(text: str) -> None:
    try:
        _, port = addresses.split_address(text)
    except SettingsError:
        return
    assert 0 < port < 65536


def test_a_taken_port_is_told_before_anything_else_starts() -> None:
    with addresses.listen_http("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} .*--port"):
            addresses.listen_http("127.0.0.1", port)


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(SettingsError, match="--host"):
        addresses.listen_http("192.0.2.77", 0)


def test_a_pool_larger_than_the_memory_is_refused_before_it_is_made() -> None:
    with pytest.raises(SettingsError, match="--kv-pool-gib"):
        check_pool_fits(make_settings(kv_pool_gib=16_000))
    check_pool_fits(make_settings(kv_pool_gib=16_000, kv=False))


def test_the_pool_takes_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirs, "free_bytes", lambda path: GIB)
    assert make_settings().kv_pool_gib == 0.25
    monkeypatch.setattr(dirs, "free_bytes", lambda path: 100 * GIB)
    assert make_settings().kv_pool_gib == 2.0


def test_directories_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.delenv("GRAPEVINE_CACHE_DIR", raising=False)
    told = make_settings()
    assert (told.state_dir, told.run_dir) == (tmp_path / "s" / "grapevine", tmp_path / "grapevine")
    assert dirs.default_cache_dir() == tmp_path / "c" / "grapevine"
    monkeypatch.setenv("GRAPEVINE_CACHE_DIR", str(tmp_path / "x"))
    assert dirs.default_cache_dir() == tmp_path / "x"


def test_a_directory_for_sockets_is_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o777)
    dirs.private_dir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="choose another"):
        dirs.private_dir(tmp_path / "file")


def test_a_directory_that_stays_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_modes(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    path = tmp_path / "open"
    path.mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", without_modes)
    with pytest.raises(SettingsError, match=r"closed to other users: Operation not permitted; .* --state-dir"):
        dirs.private_dir(path, "--state-dir")


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(node.__file__).parents[1] / "pyproject.toml").read_text())
    assert node.__version__ == project["project"]["version"]


def test_listening_for_ipv6_alone_is_not_advertised_at_an_ipv4_address() -> None:
    assert ":" in resolve(["--host", "::"]).advertise
    with pytest.raises(SettingsError, match=r"--host 0\.0\.0\.0"):
        make_settings(host="::", advertise="10.0.0.1")
    assert resolve(["--host", "::", "--advertise", "host-a.example"]).advertise == "host-a.example"


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_is_a_directory_of_others_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="--name"):
        make_settings(name=name)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://h:99999", "http://h:x", "http://a..b:80", "http://h:0", "ftp://h"]
)
def test_an_engine_url_that_cannot_be_asked_is_refused_at_once(url: str) -> None:
    with pytest.raises(SettingsError, match="--engine-url"):
        make_settings(engine_url=url)
    assert make_settings(engine_url="http://[::1]:8000/v1").engine_url


def test_two_nodes_of_one_name_in_different_run_directories_never_share_a_pool(tmp_path: Path) -> None:
    usual = make_settings(name="a")
    first, second = (make_settings(name="a", run_dir=tmp_path / where) for where in ("x", "y"))
    assert len({usual.pool_path, first.pool_path, second.pool_path}) == 3
    assert make_settings(name="a", run_dir=tmp_path / "x").pool_path == first.pool_path, "a restart finds its pool"
