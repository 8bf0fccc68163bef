"""The `grapevine` command: a group whose commands are imported when they run."""

from __future__ import annotations

import importlib
from typing import Any

import click

#: Command -> (module, one line of help). The help is here so that `--help` imports nothing.
COMMANDS = {
    "start": ("node.cli.start", "Run a node on this host."),
    "state": ("node.cli.inspect", "Show every node of the cluster with its load, as one node sees it."),
    "members": ("node.cli.inspect", "List the nodes of the cluster."),
    "top": ("node.cli.top", "Watch the cluster live in a terminal."),
    "explain": ("node.cli.inspect", "Show where a prompt would go and why; runs nothing."),
    "drain": ("node.cli.drain", "Let a node take nothing new and hand what it runs to its peers."),
    "leave": ("node.cli.drain", "Drain a node, let it leave the cluster and end."),
    "join": ("node.cli.drain", "Let a drained node take work again."),
    "plan": ("node.cli.plan", "Which stage of scaling a model and a load need, and how many GPUs."),
    "models": ("node.cli.models", "List the models of the cluster with the nodes that serve them."),
    "doctor": ("node.cli.doctor", "Examine this host and the cluster; each finding with its mend."),
    "clients": ("node.cli.clients", "Give API keys to clients, with limits, and take them back."),
    "keys": ("node.cli.keys", "Show and rotate the cluster keys of running nodes."),
    "kv": ("node.cli.kv", "Show the KV blocks of a node and its transfers; warm a node from another."),
    "emulate": ("node.cli.emulate", "Serve an emulated engine: no model, the behaviour of vLLM."),
    "completion": ("node.cli.completion", "Print what makes a shell complete commands, options and names of nodes."),
    "version": ("node.cli.version", "Show the versions of Grapevine, vLLM and Python."),
}
EXIT_CODES = """\
Exit status: 0 done, a node that was asked to stop included; 1 the node could not start, a request was refused,
doctor found a problem, or plan found no way; 2 a flag, variable or key of the file is wrong; 3 no node could be
reached; 130 Ctrl-C before a node or an engine was up.
"""


class LazyGroup(click.Group):
    """Knows its commands by name, imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of the help, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
def main(**_: Any) -> None:
    """Grapevine: vLLM servers as one cluster, without a central router.

    Start a node on each host, send requests to any of them.
    """
