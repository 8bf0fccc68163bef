"""`grapevine models`: what the cluster serves, and who serves it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from node.cli.ask import ask, find_node
from node.cli.inspect import node_options


@click.command()
@node_options
def models(node: str | None, as_json: bool, state_dir: Path | None) -> None:
    """List the models of the cluster with the nodes that serve them."""
    answer = ask(find_node(node, state_dir), "/gossip/state")
    rows = served(answer)
    if as_json:
        click.echo(json.dumps({"models": rows}))
        return
    if not rows:
        click.echo("no node serves a model yet")
        return
    from rich.console import Console
    from rich.markup import escape

    from node.cli.render import plain_table

    table = plain_table("", ("model", "ready", "running", "waiting", "kinds", "nodes"), right=1)
    for row in rows:
        kinds = str(row["kinds"]) if row["kinds"] else "-"
        counts = (f"{len(row['ready'])} of {len(row['nodes'])}", str(row["running"]), str(row["waiting"]), kinds)
        table.add_row(escape(row["model"]), *counts, escape(", ".join(row["nodes"])))
    Console().print(table)
    if any(row["kinds"] > 1 for row in rows):
        click.echo("more than one kind: KV blocks move only among nodes of one; `grapevine doctor` names them")


def served(state: Any) -> list[dict[str, Any]]:
    """One row for each model in an answer of /gossip/state, by name; nodes that are gone do not count.

    ``kinds``: how many sets of nodes there are whose KV blocks do not fit each other's; 0 where none can move.
    """
    found: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"nodes": [], "ready": [], "running": 0, "waiting": 0, "prints": set()}
    )
    for member in state.get("members", []):
        if member.get("state") not in ("alive", "suspect"):
            continue
        load = member.get("load") or {}
        for model in member.get("models") or []:
            row = found[model]
            row["nodes"].append(member["name"])
            row["ready"] += [member["name"]] if load.get("ready") and not load.get("draining") else []
            row["running"] += load.get("running") or 0
            row["waiting"] += load.get("waiting") or 0
            row["prints"] |= {(member.get("fingerprints") or {}).get(model) or ""}
    for row in found.values():
        row["kinds"] = len(row.pop("prints") - {""})
    return [{"model": model, **row} for model, row in sorted(found.items())]
