"""`grapevine doctor`: what may be wrong on this host and in the cluster, and how to mend it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from node.addresses import DEFAULT_PORT
from node.cli.ask import Unreachable, ask, find_node
from node.cli.inspect import node_options

_COLOURS = {"fine": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@click.command()
@node_options
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, help="HTTP port that a node would get, where none runs yet."
)
@click.option("--mdns/--no-mdns", default=True, show_default=True, help="Ask multicast DNS too (2 seconds).")
def doctor(node: str | None, as_json: bool, state_dir: Path | None, port: int, mdns: bool) -> None:
    """Examine this host and the cluster: ports, clocks, packet sizes, multicast DNS, shared memory, GPUs and their
    links, versions, keys, models. Each finding comes with its mend. Nothing is changed.

    Exit status: 0 nothing is broken (warnings may be there), 1 a problem was found, 2 wrong usage, 3 the node given
    by --node cannot be reached.
    """
    from node.doctor.checks import examine, well
    from node.doctor.gather import gather

    try:
        state = ask(find_node(node, state_dir), "/gossip/state")
    except Unreachable:
        if node:
            raise
        state = None
    findings = examine(gather(state, port, mdns=mdns))
    if as_json:
        click.echo(json.dumps({"well": well(findings), "findings": [finding.as_dict() for finding in findings]}))
    else:
        for finding in findings:
            word = click.style(f"{finding.grade.value:8}", fg=_COLOURS[finding.grade.value])
            click.echo(f"{word} {finding.topic:14} {finding.text}")
            if finding.mend:
                click.echo(f"{'':8} {'':14} -> {finding.mend}")
    sys.exit(0 if well(findings) else 1)
