"""The command line: finding a node, tables, exit codes, and how fast `--help` is."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from node import dirs, runfiles
from node.cli import main
from node.cli.main import COMMANDS, EXIT_CODES
from node.errors import PortTakenError, SettingsError
from node.policy.base import CandidateCost
from node.settings import Settings, make_settings

ROOT = Path(__file__).parents[2]
STATE = {
    "self": "a",
    "cluster": "home",
    "members": [
        {
            "name": "a", "state": "alive", "incarnation": 3, "address": "127.0.0.1:18100", "state_age_s": 12.3,
            "rtt_ms": None, "models": ["SmolLM2"], "load_age_s": 0.21, "load_seq": 9, "digest_size": 42,
            "load": {"ready": True, "draining": False, "running": 2, "waiting": 1, "kv_use": 0.255, "ttft_p50_ms": 87},
        },
        {"name": "b[x]", "state": "dead", "state_age_s": 4.0, "models": [], "load": None},
        {"name": "c"},
    ],
    "engine": {"state": "failed", "reason": "the model /x does not exist"},
}  # fmt: skip
EXPLAINED = {
    "plan": {"target": "a", "source": "b", "policy": "cost", "reason": "prefix"},
    "candidates": [{"node": "a", "total_ms": 12.345, "source": None}, {"node": "b", "total_ms": 99.0, "source": "a"}],
    "excluded": [{"node": "c", "why": "not ready"}],
}
RECENT = {
    "decisions": [
        {"target": "a", "reason": "prefix 6 chunks", "model": "m", "ago_s": 3.0, "status": 200, "predicted_ms": 40.2,
         "ran_ms": 44.9, "stream": True, "cached_tokens": 768, "predicted_cached_tokens": 800},
        {"target": None, "reason": "refused", "status": 503},
    ],
    "forecast": {"streams": 1, "error_median": 0.105, "cached_tokens": 768, "predicted_cached_tokens": 800},
}  # fmt: skip
REFUSED = {"refusal": {"status": 404, "code": "model_not_found", "message": "The model `x` does not exist."}}


@pytest.fixture
def answers() -> dict[str, tuple[int, object]]:
    return {
        "/gossip/state": (200, STATE),
        "/gossip/members": (200, {"cluster": "home", "self": "a", "members": [{"name": "a", "state": "alive"}]}),
        "/v1/models": (200, {"data": [{"id": "SmolLM2"}]}),
        "/route/explain": (200, EXPLAINED),
        "/route/recent?limit=20": (200, RECENT),
    }


@pytest.fixture
def asked() -> list[tuple[str, Any]]:
    return []


@pytest.fixture
def url(answers: Mapping[str, tuple[int, object]], asked: list[tuple[str, Any]]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append((self.path, json.loads(body or b"null")))
            status, answer = answers[self.path]
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def told(tmp_path: Path) -> Settings:
    return make_settings(name="a", state_dir=tmp_path / "state", run_dir=tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    env: dict[str, str | None] = {
        "GRAPEVINE_STATE_DIR": str(tmp_path / "state"),
        "COLUMNS": "200",
        "GRAPEVINE_NODE": None,
    }

    def call(*args: str, **more: Any) -> Result:
        return CliRunner().invoke(main, list(args), env=env | more.pop("env", {}), prog_name="grapevine", **more)

    return call


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


def test_a_name_runs_once_on_a_host(told: Settings, tmp_path: Path) -> None:
    other_state = make_settings(name="a", state_dir=tmp_path / "other", run_dir=told.run_dir)
    with runfiles.claim(told, "http://x"):
        with pytest.raises(SettingsError, match="already runs"):
            runfiles.claim(other_state, "http://y")
        assert [(node.name, node.url, node.pid) for node in runfiles.running_nodes(told.state_dir)] == [
            ("a", "http://x", os.getpid())
        ]
    assert runfiles.running_nodes(told.state_dir) == []
    runfiles.claim(other_state, "http://y").release()


def test_a_run_file_of_a_killed_node_is_not_believed(told: Settings) -> None:
    code = f"""
import os, signal
from node import dirs, runfiles
from node.settings import make_settings
runfiles.claim(make_settings(name="a", state_dir={str(told.state_dir)!r}, run_dir={str(told.run_dir)!r}), "http://x")
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(runfiles.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
    assert (told.state_dir / "running" / "a.json").exists()
    assert runfiles.running_nodes(told.state_dir) == []
    with runfiles.claim(told, "http://y"):
        assert [node.url for node in runfiles.running_nodes(told.state_dir)] == ["http://y"]


def test_the_node_of_the_systems_service_is_found_by_other_users_while_it_runs(
    told: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dirs, "SERVICE_STATE_DIR", told.state_dir)
    monkeypatch.setattr(dirs, "default_state_dir", lambda: tmp_path / "mine")
    with runfiles.claim(told, "http://x"):
        assert [node.url for node in runfiles.running_nodes()] == ["http://x"]
        assert runfiles.running_nodes(tmp_path / "other") == []
        mine = make_settings(name="b", state_dir=tmp_path / "mine", run_dir=told.run_dir)
        with runfiles.claim(mine, "http://y"):
            assert [node.url for node in runfiles.running_nodes()] == ["http://y"]
        (record,) = (told.state_dir / "running").glob("*.json")
        gone = {**json.loads(record.read_text()), "pid": 2**22 + 1}
        record.write_text(json.dumps(gone))
        assert runfiles.running_nodes() == []


def test_a_broken_run_file_harms_nobody(told: Settings) -> None:
    directory = told.state_dir / "running"
    directory.mkdir(parents=True)
    (directory / "x.json").write_text("{")
    (directory / "y.json").write_text('{"name": "y"}')
    (directory / "z.json").write_text("[1]")
    assert runfiles.running_nodes(told.state_dir) == []


class FakeApp:
    """In place of `node.app`."""

    def __init__(self, outcome: int | BaseException) -> None:
        self.outcome = outcome
        self.settings: Settings | None = None
        self.as_json = False

    def run(self, settings: Settings, *, as_json: bool = False) -> int:
        self.settings, self.as_json = settings, as_json
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(0, 0), (1, 1), (PortTakenError("port 8100 is taken: choose another with --port"), 2), (KeyboardInterrupt(), 130)],
)
def test_start_hands_the_settings_to_the_node_and_exits_with_its_status(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException, status: int
) -> None:
    app = FakeApp(outcome)
    monkeypatch.setitem(sys.modules, "node.app", app)  # type: ignore[arg-type]
    result = run(
        "start", "--port", "9001", "--join", "a:1", "b:2", "--", "--max-model-len", "99", env={"GRAPEVINE_PROT": "1"}
    )
    assert result.exit_code == status
    assert app.settings is not None
    assert (app.settings.port, app.settings.join) == (9001, ("a:1", "b:2"))
    assert app.settings.engine_args == ("--max-model-len", "99")
    assert "GRAPEVINE_PROT is not known and is ignored: did you mean GRAPEVINE_PORT?" in result.output
    if isinstance(outcome, PortTakenError):
        assert "choose another with --port" in result.output


def test_a_wrong_setting_has_exit_status_2(run: Callable[..., Result]) -> None:
    result = run("start", "--name", "a b")
    assert result.exit_code == 2
    assert "letters" in result.output


def test_help_names_every_command_and_the_exit_codes(run: Callable[..., Result]) -> None:
    output = run("--help").output
    for word in ("start", "state", "members", "explain", "version", "Exit status:"):
        assert word in output
    assert "ARGUMENTS FOR VLLM" in run("start", "--help").output
    for name in ("state", "members", "explain", "version"):
        assert run(name, "--help").exit_code == 0
    assert run("strat").exit_code == 2


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from node.cli import main\nmain(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(Path(runfiles.__file__).parents[1])}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    loaded = set(re.findall(r"'([\w.]+)'", output))
    assert not loaded & {"aiohttp", "rich", "asyncio", "torch", "vllm", "node.settings", "node.app", "msgpack"}


def test_the_version_is_shown(run: Callable[..., Result]) -> None:
    from node import __version__

    assert json.loads(run("version", "--json").output)["grapevine"] == __version__
    assert run("version").output.startswith(f"grapevine {__version__}, vLLM ")


# --- keys

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


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("grapevine st", {"start", "state"}),
        ("grapevine doctor --m", {"--mdns"}),
        ("grapevine start --gossip-preset l", {"loopback", "lan"}),
    ],
)
def test_the_shell_completes_commands_options_and_choices(
    run: Callable[..., Result], line: str, completions: set[str]
) -> None:
    words = {"_GRAPEVINE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    told = {answer.partition(",")[2] for answer in run(env=words).output.split()}
    assert completions <= told


def test_every_command_is_documented_with_its_exit_statuses(run: Callable[..., Result]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    help_text = run("--help").output
    for command in COMMANDS:
        assert f"`{command}" in text, command
        assert command in help_text
    assert all(f"| {status} |" in text for status in range(4)) and "Exit status: 0 done" in help_text


def commands() -> dict[str, click.Command]:
    """Every command by what is typed, those of groups included."""
    found: dict[str, click.Command] = {}
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {}
        if not inner or command.invoke_without_command:  # type: ignore[attr-defined]
            found[name] = command
        found |= {f"{name} {sub}": one for sub, one in inner.items()}
    return found


def test_every_command_can_print_json() -> None:
    lacking = [name for name, one in commands().items() if "--json" not in {o for p in one.params for o in p.opts}]
    assert lacking == []


#: Commands that ask no node: the file of clients, a script, the versions of this host.
OF_NO_NODE = {"start", "clients add", "clients list", "clients remove", "emulate", "completion", "version"}


def test_every_command_that_asks_a_node_finds_it_or_takes_its_url() -> None:
    flags = {name: {o for p in one.params for o in p.opts} for name, one in commands().items()}
    assert {name for name, has in flags.items() if not {"--node", "--state-dir"} <= has} == OF_NO_NODE


def test_start_says_it_in_json_where_that_is_wanted(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FakeApp(0)
    monkeypatch.setitem(sys.modules, "node.app", app)  # type: ignore[arg-type]
    assert run("start", "--json").exit_code == 0 and app.as_json
    assert run("start", env={"GRAPEVINE_AS_JSON": "1"}).exit_code == 0 and not app.as_json


def test_every_command_and_exit_status_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in commands() if f"`{name.split()[0]}" not in text] == []
    numbers = re.findall(r"(\d+) ", EXIT_CODES.replace("\n", " "))
    assert numbers == ["0", "1", "2", "3", "130"]
    for number in numbers:
        assert f"| {number} |" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_learns_to_complete(shell: str) -> None:
    told = CliRunner().invoke(main, ["completion", shell])
    assert told.exit_code == 0 and "_GRAPEVINE_COMPLETE" in told.output and "grapevine" in told.output
    assert json.loads(CliRunner().invoke(main, ["completion", shell, "--json"]).output)["shell"] == shell


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("grapevine dr", "drain"), ("grapevine plan --gp", "--gpu"), ("grapevine completion f", "fish")],
)
def test_what_is_typed_is_completed(typed: str, wanted: str) -> None:
    env = {"_GRAPEVINE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    told = CliRunner().invoke(main, [], env=env, prog_name="grapevine")
    assert f"plain,{wanted}" in told.output.splitlines()
