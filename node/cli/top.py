"""`grapevine top`: the cluster live in a terminal, fed by the same events as the page."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from node.cli.ask import Unreachable, find_node
from node.cli.cluster_view import ClusterView
from node.cli.inspect import node_options
from node.cli.number import NumberRange
from node.cli.stream import Stream

#: Seconds before a node that went away is asked again: doubled each time, up to the second.
AGAIN_S = (1.0, 10.0)


@click.command()
@node_options
@click.option("--once", is_flag=True, help="Show it once and end.")
@click.option(
    "--interval", type=NumberRange(0.5, 3600), default=2.0, show_default=True, help="Seconds between redraws."
)
def top(node: str | None, as_json: bool, state_dir: Path | None, once: bool, interval: float) -> None:
    """Watch the cluster: nodes, load, latency, prefix hits, transfers, requests. Ctrl-C ends it.

    The screen is drawn anew at most every --interval seconds, and only when there is news: over a slow line a longer
    one costs less. With --json each event of the node is one line. A node that restarts is found again.
    """
    url = find_node(node, state_dir)
    with Stream(url) as stream:
        first = next(iter(stream), None)
    if first is None:
        raise Unreachable(f"{url} ended the connection at once: it is stopping, or tells too many pages already")
    view = ClusterView()
    view.take(*first)
    if once:
        _show_once(view, first[1], as_json)
        return
    try:
        _watch(lambda: _messages(url), view, interval, as_json)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)


def _show_once(view: ClusterView, message: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(message))
        return
    from rich.console import Console

    from node.cli.top_screen import screen

    console = Console()
    console.print(screen(view, max(console.height, len(view.nodes) + 60), console.width))


def _messages(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Events for ever; ``lost`` with a reason while the node does not answer."""
    pause, most = AGAIN_S
    while True:
        try:
            with Stream(url) as stream:
                for event in stream:
                    pause = AGAIN_S[0]
                    yield event
            why = "the node ended the connection"
        except click.ClickException as error:
            why = error.message
        yield "lost", {"why": why}
        time.sleep(pause)
        pause = min(2 * pause, most)


def _watch(
    messages: Callable[[], Iterator[tuple[str, dict[str, Any]]]], view: ClusterView, interval: float, as_json: bool
) -> None:
    shown = float("-inf")
    if as_json:
        for kind, message in messages():
            click.echo(json.dumps({"kind": kind, **message}))
        return
    from rich.console import Console
    from rich.live import Live

    from node.cli.top_screen import screen

    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for kind, message in messages():
            lost = str(message.get("why")) if kind == "lost" else ""
            if not lost:
                view.take(kind, message)
            if lost or time.monotonic() - shown >= interval:
                shown = time.monotonic()
                live.update(screen(view, console.height, console.width, lost), refresh=True)
