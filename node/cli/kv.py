"""`grapevine kv`: the pool of KV blocks of a node, its transfers, and warming it from another node."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from node.cli.ask import Refused, Unreachable, ask, find_node
from node.cli.inspect import node_options
from node.cli.number import NumberRange

#: Peers that are asked for their fingerprint when it differs from ours.
MAX_COMPARED = 8
GIB = 1 << 30
#: Most of `--max-gib`: what a node takes (`node.http.kv.MAX_BYTES`).
MAX_GIB = 1 << 20
#: Ends of a step after which the next one may bring more.
PASSING = frozenset({"busy", "gone", "corrupt", "stalled", "deadline", "broken", "unreachable"})


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@node_options
@click.pass_context
def kv(context: click.Context, node: str | None, as_json: bool, state_dir: Path | None) -> None:
    """Show the KV blocks of a node: pool, hit rates, hottest prefixes (hashes), transfers, and whose blocks differ.

    `grapevine kv warm --from NODE` copies the hottest prefixes of another node.
    """
    if context.invoked_subcommand is not None:
        context.obj = {"node": node, "as_json": as_json, "state_dir": state_dir}  # may stand before the subcommand too
        return
    url = find_node(node, state_dir)
    state = ask(url, "/gossip/state")
    section = state.get("kv") or {}
    section["unlike"] = {**(section.get("unlike") or {}), **_differences(state, section)}
    if as_json:
        click.echo(json.dumps({"node": state.get("self"), **section}))
        return
    from node.cli import render_kv

    render_kv.show(str(state.get("self")), section)


@kv.command()
@node_options
@click.option("--from", "source", metavar="NODE", required=True, help="Name of the node to copy from.")
@click.option(
    "--max-gib", type=NumberRange(0, MAX_GIB, min_open=True), help="Most to copy.  [default: half of the pool]"
)
@click.option(
    "--deadline", type=NumberRange(0, 86_400, min_open=True), default=60.0, show_default=True, help="Most seconds."
)
@click.option("--admin-token", envvar="GRAPEVINE_ADMIN_TOKEN", help="Admin token of the node.")
@click.pass_obj
def warm(  # noqa: PLR0917 - click gives them by name
    before: Mapping[str, Any],
    node: str | None,
    as_json: bool,
    state_dir: Path | None,
    source: str,
    max_gib: float | None,
    deadline: float,
    admin_token: str | None,
) -> None:
    """Copy what another node uses most into the pool of a node, so that it need not begin cold.

    It may be cut short and repeated: what is here already is not copied again.
    """
    url = find_node(node or before["node"], state_dir or before["state_dir"])
    as_json = as_json or before["as_json"]
    body: dict[str, object] = {"from": source}
    if max_gib is not None:
        body["max_bytes"] = max(1, int(max_gib * GIB))
    total = {"from": source, "whole": False, "reason": "deadline", "blocks": 0, "bytes": 0, "seconds": 0.0}
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        step = ask(url, "/admin/kv/warm", json.dumps(body).encode(), admin_token)
        for name in ("blocks", "bytes", "seconds"):
            total[name] += step[name]
        total |= {name: step[name] for name in ("whole", "reason", "detail", "prefixes")}
        if step["whole"] or step["reason"] != "deadline":
            break
    click.echo(json.dumps(total) if as_json else _sentence(total, max_gib))
    if not total["whole"]:
        sys.exit(1)


def _sentence(total: Mapping[str, Any], max_gib: float | None) -> str:
    rate = total["bytes"] / total["seconds"] / 1e9 if total["seconds"] else 0.0
    came = f"{total['blocks']} blocks, {total['bytes'] / 1e6:.1f} MB, {rate:.2f} GB/s"
    if total["whole"]:
        most = "all that" if max_gib is None else f"up to {max_gib:g} GiB of what"
        return f"warm: {most} {total['from']} uses most is here ({came} copied now)"
    detail = f": {total['detail']}" if total.get("detail") else ""
    again = "; run it again to go on" if total["reason"] in PASSING else ""
    return f"ended early ({total['reason']}{detail}) after {came}{again}"


def _differences(state: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, str]:
    """Ask the peers whose blocks differ for their fingerprints, and say which fields differ."""
    ours, told = section.get("fingerprint") or {}, {}
    urls = {member.get("name"): member.get("url") for member in state.get("members", [])}
    for name in list(section.get("unlike") or {})[:MAX_COMPARED]:
        url = urls.get(name)
        if not ours or not url:
            continue
        try:
            theirs = (ask(url, "/gossip/state").get("kv") or {}).get("fingerprint") or {}
        except (Refused, Unreachable):
            continue
        from kvmigrate.fingerprint import differences

        told[name] = differences(ours, theirs)
    return told
