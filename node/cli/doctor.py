"""`grapevine doctor`: what may be wrong on this host and in the cluster, and how to mend it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from node.addresses import DEFAULT_PORT
from node.cli.ask import Unreachable, ask, find_node
from node.cli.inspect import node_options
from node.runfiles import running_nodes

_COLOURS = {"fine": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@click.command()
@node_options
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, help="HTTP port that a node would get, where none runs yet."
)
@click.option(
    "--tls-cert",
    envvar="GRAPEVINE_TLS_CERT",
    default="",
    metavar="FILE",
    help="Certificate that it would get, likewise.",
)
@click.option("--tls-key", envvar="GRAPEVINE_TLS_KEY", default="", metavar="FILE", help="Key of --tls-cert.")
@click.option("--mdns/--no-mdns", default=True, show_default=True, help="Ask multicast DNS too (2 seconds).")
def doctor(  # noqa: PLR0917 - click gives them by name
    node: str | None, as_json: bool, state_dir: Path | None, port: int, tls_cert: str, tls_key: str, mdns: bool
) -> None:
    """Examine this host and the cluster: ports, clocks, packet sizes, multicast DNS, shared memory, GPUs and their
    links, versions, keys, certificates and who encrypts, models. Each finding comes with its mend. Nothing is changed.

    Exit status: 0 nothing is broken (warnings may be there), 1 a problem was found, 2 wrong usage, 3 the node given
    by --node cannot be reached.
    """
    from node.doctor.checks import examine, well
    from node.doctor.gather import gather

    files = (tls_cert, tls_key)
    try:
        url = find_node(node, state_dir)
        state = ask(url, "/gossip/state")
        files = next(((one.tls_cert, one.tls_key) for one in running_nodes(state_dir) if one.url == url), ("", ""))
    except Unreachable:
        if node:
            raise
        state = None
    findings = examine(gather(state, port, tls_files=files, mdns=mdns))
    if as_json:
        click.echo(json.dumps({"well": well(findings), "findings": [finding.as_dict() for finding in findings]}))
    else:
        for finding in findings:
            word = click.style(f"{finding.grade.value:8}", fg=_COLOURS[finding.grade.value])
            click.echo(f"{word} {finding.topic:14} {finding.text}")
            if finding.mend:
                click.echo(f"{'':8} {'':14} -> {finding.mend}")
    sys.exit(0 if well(findings) else 1)
