"""`grapevine state`, `members` and `explain`: what a running node sees and would do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from node.cli.ask import ask, find_node


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that asks a node."""
    for option in (
        click.option("--state-dir", type=click.Path(path_type=Path), envvar="GRAPEVINE_STATE_DIR", hidden=True),
        click.option("--json", "as_json", is_flag=True, help="Print the node's JSON."),
        click.option(
            "--node",
            metavar="URL",
            envvar="GRAPEVINE_NODE",
            help="Node to ask.  [default: the first one that runs on this host]",
        ),
    ):
        command = option(command)
    return command


@click.command()
@node_options
def state(node: str | None, as_json: bool, state_dir: Path | None) -> None:
    """Show every node of the cluster with its load, as one node sees it."""
    answer = ask(find_node(node, state_dir), "/gossip/state")
    if as_json:
        click.echo(json.dumps(answer))
        return
    from node.cli import render

    render.show_state(answer)


@click.command()
@node_options
def members(node: str | None, as_json: bool, state_dir: Path | None) -> None:
    """List the nodes of the cluster."""
    answer = ask(find_node(node, state_dir), "/gossip/members")
    if as_json:
        click.echo(json.dumps(answer))
        return
    from node.cli import render

    render.show_members(answer)


@click.command()
@node_options
@click.option("--model", help="Model of the request.  [default: the first one of the node]")
@click.option("--body", type=click.File("rb"), help="File with a whole request body (- for standard input).")
@click.option(
    "--path",
    metavar="PATH",
    help="Endpoint that the body of --body is for, such as /v1/responses.  [default: /v1/chat/completions]",
)
@click.option("--api-key", envvar="GRAPEVINE_API_KEY", help="Client API key, where the node wants one.")
@click.option("--recent", is_flag=True, help="Show the node's last decisions and what came of them instead.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1), help="How many, with --recent.")
@click.argument("prompt", required=False)
def explain(  # noqa: PLR0917 - click gives them by name
    node: str | None,
    as_json: bool,
    state_dir: Path | None,
    model: str | None,
    body: Any,
    path: str | None,
    api_key: str | None,
    recent: bool,
    limit: int,
    prompt: str | None,
) -> None:
    """Show where a chat request with PROMPT would go, and what each node would cost. Runs nothing.

    With --recent, show where the last requests went, and predicted against real times and cached tokens.
    """
    if recent:
        if prompt is not None or body is not None:
            raise click.UsageError("--recent takes no PROMPT and no --body")
        _show_recent(find_node(node, state_dir), limit, api_key, as_json=as_json)
        return
    if (prompt is None) == (body is None):
        raise click.UsageError("give either a PROMPT or a request body with --body FILE")
    if path is not None and body is None:
        raise click.UsageError("--path says what the body of --body FILE is for: a PROMPT is a chat")
    url = find_node(node, state_dir)
    if body is not None:
        content = body.read()
    else:
        name = model or _first_model(url, api_key)
        content = json.dumps({"model": name, "messages": [{"role": "user", "content": prompt}]}).encode()
    query = "" if path is None else "?" + urlencode({"path": path})
    answer = ask(url, f"/route/explain{query}", content, api_key)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        from node.cli import render

        render.show_explanation(answer)
    if "refusal" in answer:
        sys.exit(1)


def _show_recent(url: str, limit: int, api_key: str | None, *, as_json: bool) -> None:
    answer = ask(url, f"/route/recent?limit={limit}", token=api_key)
    if as_json:
        click.echo(json.dumps(answer))
        return
    from node.cli import render

    render.show_recent(answer)


def _first_model(url: str, api_key: str | None) -> str:
    models = ask(url, "/v1/models", token=api_key).get("data") or []
    if not models:
        raise click.ClickException("the cluster serves no model yet: wait for an engine, or name one with --model")
    return str(models[0]["id"])
