"""`grapevine drain`, `leave` and `join`: take a node out of service without anybody noticing, and back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from node.addresses import split_address
from node.cli.ask import TIMEOUT_S, Refused, Unreachable, ask, ask_text, find_node
from node.cli.number import NumberRange
from node.cli.pauses import Pauses, measured
from node.errors import SettingsError

#: Seconds between two looks at how a drain goes.
LOOK_EVERY_S = 0.3
#: Seconds that a leaving node gets above its deadline before we stop looking.
PATIENCE_S = 30.0


def member_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names for the shell to complete: those that the node knows which would be asked; none where there is none."""
    try:
        told = ask(find_node(ctx.params.get("node"), ctx.params.get("state_dir")), "/gossip/members")["members"]
        return [member["name"] for member in told if str(member["name"]).startswith(incomplete)]
    except (click.ClickException, LookupError, TypeError):
        return []


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of these commands, and the name of the node that is meant."""
    for option in (
        click.argument("name", shell_complete=member_names),
        click.option("--state-dir", type=click.Path(path_type=Path), envvar="GRAPEVINE_STATE_DIR", hidden=True),
        click.option("--admin-token", envvar="GRAPEVINE_ADMIN_TOKEN", help="Admin token of that node."),
        click.option(
            "--node",
            metavar="URL",
            envvar="GRAPEVINE_NODE",
            help="Any node, which is asked where NAME is.  [default: the first one that runs on this host]",
        ),
    ):
        command = option(command)
    return command


def waiting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of those that wait."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, once, at the end."),
        click.option(
            "--timeout",
            type=NumberRange(0, 3600),
            metavar="SECONDS",
            help="How long to wait for what cannot be moved.  [default: the node's --stop-grace-s]",
        ),
    ):
        command = option(command)
    return command


class Named:
    """A node found by name, and the others that can tell about it."""

    def __init__(self, *, name: str, node: str | None, admin_token: str | None, state_dir: Path | None) -> None:
        self.name = name
        self._token = admin_token
        self._asked = find_node(node, state_dir)
        self.members = self._members(self._asked)
        mine = self.members.get(name)
        if mine is None or mine["state"] in ("dead", "left"):
            up = sorted(other for other, member in self.members.items() if member["state"] in ("alive", "suspect"))
            what = "is not a node of this cluster" if mine is None else f"is {mine['state']}"
            raise click.ClickException(f"{name} {what}; running are {', '.join(up) or 'none'}")
        if not mine["url"]:
            raise click.ClickException(f"the HTTP address of {name} is not known yet: try again")
        self.url = str(mine["url"])

    def post(self, path: str, **body: float | list[str]) -> dict[str, Any]:
        """Ask the node to do something."""
        return dict(ask(self.url, path, json.dumps(body).encode(), self._token))

    def status(self) -> dict[str, Any]:
        """How its drain goes. Raises `Unreachable` when it has gone."""
        return dict(ask(self.url, "/admin/drain", token=self._token))

    def pauses(self, *, others: bool = False) -> Pauses:
        """How long streams were held up by being moved, as all nodes (or all others) have counted so far."""
        total = Pauses()
        for name, member in self.members.items():
            if others and name == self.name:
                continue
            if member["url"] and member["state"] == "alive":
                try:
                    total += measured(ask_text(member["url"], "/metrics"))
                except (Refused, Unreachable):
                    continue
        return total

    def state_elsewhere(self) -> str:
        """What another node says of it; empty when there is no other, or it knows nothing of it any more."""
        for name, member in self.members.items():
            if name != self.name and member["url"] and member["state"] == "alive":
                try:
                    told = self._members(member["url"]).get(self.name)
                    return str(told["state"]) if told else ""
                except (Refused, Unreachable):
                    continue
        return ""

    @staticmethod
    def _members(url: str) -> dict[str, dict[str, Any]]:
        return {member["name"]: member for member in ask(url, "/gossip/members")["members"]}


@click.command()
@node_options
@waiting_options
def drain(timeout: float | None, as_json: bool, **which: Any) -> None:
    """Let the node NAME take no new work, and hand what it runs to its peers.

    Streams move to peers; what cannot move is waited for. KV blocks that only this node holds are copied to peers. Then
    the node is idle, and stays a member: it still gives KV blocks to peers, and its own clients are served through it.
    `grapevine join NAME` undoes it.
    """
    meant = Named(**which)
    name, before = meant.name, meant.pauses()
    status = meant.post("/admin/drain", **_body(timeout))
    while status["phase"] == "draining":
        _progress(status, as_json)
        time.sleep(LOOK_EVERY_S)
        status = meant.status()
    _clear(as_json)
    moved = meant.pauses() - before
    if as_json:
        click.echo(json.dumps({**status, **moved.as_dict()}))
    elif status["phase"] == "drained":
        click.echo(f"{name} is drained after {status['since_s']:.1f} s; {moved}{_copied(status)}")
    if status["phase"] == "serving":
        raise Refused(f"somebody let {name} take work again")
    if status["phase"] == "overdue":
        raise Refused(
            f"{name} still runs {status['running']} requests that could not move; it takes nothing new. Wait and drain "
            f"it again, or undo it: `grapevine join {name}`"
        )


@click.command()
@node_options
@waiting_options
def leave(timeout: float | None, as_json: bool, **which: Any) -> None:
    """Drain the node NAME, let it leave the cluster, and end its process.

    The same as SIGTERM on its host. Its clients' answers are finished first, up to the deadline. `grapevine start`
    under the same name joins again.
    """
    meant = Named(**which)
    name, before, began = meant.name, meant.pauses(others=True), time.monotonic()
    status = meant.post("/admin/leave", **_body(timeout))
    until = began + status["left_s"] + PATIENCE_S + TIMEOUT_S
    while time.monotonic() < until:
        _progress(status, as_json)
        time.sleep(LOOK_EVERY_S)
        try:
            status = meant.status()
        except Unreachable:
            break
    else:
        raise Refused(f"{name} still answers; look at its log")
    _clear(as_json)
    moved, state = meant.pauses(others=True) - before, meant.state_elsewhere()
    seconds = time.monotonic() - began
    if as_json:
        told = {"name": name, "state": state or "unknown", "seconds": round(seconds, 1), **moved.as_dict()}
        told["kv"] = status.get("kv")
        click.echo(json.dumps(told))
    else:
        click.echo(f"{name} has left after {seconds:.1f} s; {moved}{_copied(status)}")


@click.command()
@node_options
@click.option("--address", "addresses", metavar="HOST:PORT", multiple=True, help="Gossip address to dial as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def join(addresses: tuple[str, ...], as_json: bool, **which: Any) -> None:
    """Let the drained node NAME take work again. With --address it also dials another cluster's node.

    With HOST:PORT, the gossip address of another cluster's node, in the place of NAME, the node that is asked joins
    that cluster. A node that has left is started again instead: `grapevine start` under the same name.
    """
    if ":" in which["name"]:  # no name of a node has one
        _dial([which["name"], *addresses], as_json=as_json, **which)
        return
    meant = Named(**which)
    if addresses:
        meant.post("/admin/join", addresses=list(addresses))
    status = meant.post("/admin/undrain")
    click.echo(json.dumps(status) if as_json else f"{meant.name} takes work")


def _dial(
    addresses: list[str],
    *,
    as_json: bool,
    node: str | None,
    admin_token: str | None,
    state_dir: Path | None,
    **_: Any,
) -> None:
    """Let the node that is asked dial addresses, and wait until it sees another one or says why not."""
    for address in addresses:
        try:
            split_address(address)
        except SettingsError as error:
            raise click.UsageError(str(error).removeprefix("--join ")) from error
    url = find_node(node, state_dir)
    ask(url, "/admin/join", json.dumps({"addresses": addresses}).encode(), admin_token)
    until = time.monotonic() + PATIENCE_S
    while True:
        told = ask(url, "/gossip/state")
        others = [m["name"] for m in told["members"] if m["name"] != told["self"] and m["state"] == "alive"]
        if others or time.monotonic() > until:
            break
        time.sleep(LOOK_EVERY_S)
    failed = (told.get("gossip") or {}).get("failed_dials") or {}
    if as_json:
        click.echo(json.dumps({"name": told["self"], "others": others, "failed_dials": failed}))
    elif others:
        click.echo(f"{told['self']} knows {', '.join(others)}")
    if not others:
        why = "; ".join(f"{address} {why}" for address, why in failed.items()) or "no answer yet"
        raise Refused(f"{told['self']} has found nobody in {PATIENCE_S:.0f} s: {why}. It goes on trying")


def _body(timeout: float | None) -> dict[str, float]:
    return {} if timeout is None else {"timeout_s": timeout}


def _progress(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return
    left = f", {status['left_s']:.0f} s left" if status["left_s"] else ""
    told = f"{status['name']}: {status['phase']}, {status['running']} run here, {status['movable']} can move{left}"
    if status.get("copying") and (copied := _blocks(status)):
        told += f", {copied} KV blocks copied"
    if status.get("leaving") and status.get("answering"):
        told += f"; {status['answering']} answers to finish"
    click.echo(f"\r\033[K{told}" if _terminal() else told, nl=not _terminal(), err=True)


def _blocks(status: dict[str, Any]) -> int:
    copied = (status.get("kv") or {}).get("copied") or {}
    return sum(one["blocks"] for one in copied.values())


def _copied(status: dict[str, Any]) -> str:
    """What became of the KV blocks that only this node held; empty where there were none."""
    kv = status.get("kv") or {}
    copied, left = kv.get("copied") or {}, kv.get("left") or {}
    lines = [
        f"{one['blocks']} KV blocks ({one['bytes'] / 1e6:.1f} MB) that nobody else held are at {heir} now"
        for heir, one in copied.items()
    ]
    lines += [f"{count} KV blocks that nobody else holds were not copied: {why}" for why, count in left.items()]
    if left:
        lines += [f"{heir} took none more: {why}" for heir, why in (kv.get("refused") or {}).items()]
    return "".join(f"\n{line}" for line in lines)


def _clear(as_json: bool) -> None:
    if not as_json and _terminal():
        click.echo("\r\033[K", nl=False, err=True)


def _terminal() -> bool:
    return sys.stderr.isatty()
