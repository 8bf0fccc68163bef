"""`grapevine keys`: the cluster keys of running nodes, and their rotation without downtime."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from node.cli.ask import ask, find_node

PATH = "/admin/keys"
_LOOPBACK = ("http://127.", "http://localhost", "http://[::1]")
Ring = list[dict[str, Any]]


class Nodes:
    """The nodes that a command is for."""

    def __init__(self, urls: Sequence[str], token: str | None) -> None:
        self.urls = list(urls)
        self.token = token

    def rings(self) -> dict[str, Ring]:
        """What each of them holds."""
        return {url: ask(url, PATH, token=self.token)["keys"] for url in self.urls}

    def change(self, as_json: bool, **step: str) -> None:
        """Take one step of a rotation at each, and show what they hold then."""
        body = json.dumps(step).encode()
        show({url: ask(url, PATH, body, self.token)["keys"] for url in self.urls}, as_json)


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say which nodes are meant and that they may be asked."""
    for option in (
        click.option("--state-dir", type=click.Path(path_type=Path), envvar="GRAPEVINE_STATE_DIR", hidden=True),
        click.option("--admin-token", envvar="GRAPEVINE_ADMIN_TOKEN", help="Admin token of the nodes."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--all", "everywhere", is_flag=True, help="All nodes of the cluster that the asked one knows."),
        click.option(
            "--node",
            "urls",
            metavar="URL",
            multiple=True,
            envvar="GRAPEVINE_NODE",
            help="Node to ask; may be repeated.  [default: the first one that runs on this host]",
        ),
    ):
        command = option(command)
    return command


def meant(urls: tuple[str, ...], everywhere: bool, admin_token: str | None, state_dir: Path | None) -> Nodes:
    """The nodes that the options mean."""
    found = [find_node(url, state_dir) for url in urls] or [find_node(None, state_dir)]
    if everywhere:
        members = ask(found[0], "/gossip/members")["members"]
        up = [member for member in members if member["state"] in ("alive", "suspect")]
        hidden = [member["name"] for member in up if not member["url"]]
        if hidden:
            raise click.ClickException(f"the HTTP address of {', '.join(hidden)} is not known yet: try again")
        found = [member["url"] for member in up]
    return Nodes(found, admin_token)


def show(rings: dict[str, Ring], as_json: bool) -> None:
    """Print one line for each node, or what a script can read."""
    if as_json:
        click.echo(json.dumps(rings))
        return
    for url, ring in rings.items():
        told = ", ".join(f"{key['id']}{' (in use)' if key['seals'] else ''} opened {key['opened']}" for key in ring)
        click.echo(f"{url}  {told or 'no key: this cluster talks in clear'}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Show and rotate the cluster keys of running nodes.

    A rotation is: `keys add --all`, then `keys use --all ID`, then `keys remove --all OLD`. Each step has to reach
    every node before the next one. Afterwards set the new key where the nodes are started from.
    """


@keys.command(name="list")
@node_options
def list_keys(as_json: bool, **which: Any) -> None:
    """Show the ids of the keys that nodes hold, and how many packets of peers each has opened."""
    show(meant(**which).rings(), as_json)


@keys.command()
@node_options
@click.argument("file", type=click.File("rb"), required=False)
@click.option("--generate", is_flag=True, help="Make a new random key and print it, on standard error.")
def add(file: BinaryIO | None, generate: bool, as_json: bool, **which: Any) -> None:
    """Let nodes open what is sealed with a further key: the first line of FILE (- for standard input).

    Without FILE you are asked for it. Where a node does not speak TLS the key travels in clear: if that network is not
    yours, run this on each host, for the node of that host.
    """
    nodes = meant(**which)
    text = _text(file, generate)
    for url in nodes.urls:
        if url.startswith("http:") and not url.startswith(_LOOPBACK):
            click.echo(f"warning: the key goes to {url} without encryption", err=True)
    nodes.change(as_json, add=text)


@keys.command()
@node_options
@click.argument("key_id", metavar="ID")
def use(key_id: str, as_json: bool, **which: Any) -> None:
    """Let nodes seal and sign with the key ID. Refused while one of the nodes does not have it."""
    nodes = meant(**which)
    lacking = [url for url, ring in nodes.rings().items() if key_id not in {key["id"] for key in ring}]
    if lacking:
        raise click.ClickException(f"{', '.join(lacking)} lacks the key {key_id}: `grapevine keys add` it there first")
    nodes.change(as_json, use=key_id)


@keys.command()
@node_options
@click.argument("key_id", metavar="ID")
def remove(key_id: str, as_json: bool, **which: Any) -> None:
    """Let nodes forget the key ID. Refused while one of the nodes seals with it."""
    nodes = meant(**which)
    using = [url for url, ring in nodes.rings().items() if key_id in {key["id"] for key in ring if key["seals"]}]
    if using:
        raise click.ClickException(f"{', '.join(using)} still seals with {key_id}: `grapevine keys use` another first")
    nodes.change(as_json, remove=key_id)


def _text(file: BinaryIO | None, generate: bool) -> str:
    if generate:
        if file is not None:
            raise click.UsageError("give either FILE or --generate")
        text = secrets.token_urlsafe(32)
        click.echo(text, err=True)
        return text
    if file is None:
        return str(click.prompt("New cluster key", hide_input=True))
    lines = file.read(4096).decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else ""
