"""What the command line says of itself: help, documents, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from node import runfiles
from node.cli import main
from node.cli.main import COMMANDS, EXIT_CODES

ROOT = Path(__file__).parents[3]


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


def test_every_command_and_exit_status_is_documented(run: Callable[..., Result]) -> None:
    text, told = (ROOT / "docs" / "cli.md").read_text(), run("--help").output
    assert [name for name in commands() if f"`{name.split()[0]}" not in text] == []
    assert [name for name in COMMANDS if name not in told] == []
    numbers = re.findall(r"(\d+) ", EXIT_CODES.replace("\n", " "))
    assert numbers == ["0", "1", "2", "3", "130"] and "Exit status: 0 done" in told
    assert [number for number in numbers if f"| {number} |" not in text] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_learns_to_complete(shell: str) -> None:
    told = CliRunner().invoke(main, ["completion", shell])
    assert told.exit_code == 0 and "_GRAPEVINE_COMPLETE" in told.output and "grapevine" in told.output
    assert json.loads(CliRunner().invoke(main, ["completion", shell, "--json"]).output)["shell"] == shell


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("grapevine st", {"start", "state"}),
        ("grapevine dr", {"drain"}),
        ("grapevine doctor --m", {"--mdns"}),
        ("grapevine plan --gp", {"--gpu"}),
        ("grapevine start --gossip-preset l", {"loopback", "lan"}),
        ("grapevine completion f", {"fish"}),
    ],
)
def test_what_is_typed_is_completed(run: Callable[..., Result], typed: str, wanted: set[str]) -> None:
    words = {"_GRAPEVINE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert {f"plain,{word}" for word in wanted} <= set(run(env=words).output.splitlines())
