"""`grapevine clients`: the file of API keys for clients. Nodes read it again by themselves when it changes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from node.clients import file
from node.clients.client import Limits
from node.errors import SettingsError

#: Bytes of chance in a key that is made here.
KEY_BYTES = 32
KEY_BEGINS = "gv-"

_file = click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="GRAPEVINE_CLIENTS_FILE",
    required=True,
    help="The file that nodes have as --clients-file.  [env: GRAPEVINE_CLIENTS_FILE]",
)


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def clients() -> None:
    """Give API keys to clients, with limits, and take them back.

    Start nodes with --clients-file FILE; the same file can lie on every host. A running node reads it again within
    seconds. Limits count at each node by itself. (The cluster key, which nodes share, is `grapevine keys`.)
    """


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(file.LIMITS):
        kind = click.IntRange(1, file.MAX_LIMIT)
        command = click.option(f"--{name}", file.LIMITS[name], type=kind, help="Limit at one node.")(command)
    return command


@clients.command()
@_file
@_limit_options
@_json
@click.argument("name")
def add(path: Path, name: str, as_json: bool, **limits: int | None) -> None:
    """Make a key for the client NAME and print it, once: the file keeps its digest alone.

    For a client that has a key already the new one is good beside it: `remove --but-newest` ends the old ones.
    """
    key = KEY_BEGINS + secrets.token_urlsafe(KEY_BYTES)
    given = Limits(**{what: limit for what, limit in limits.items() if limit is not None})
    line = file.line_of(file.Entry(name, file.digest_of(key), given))
    lines = _lines(path)
    _replace(path, [*lines, line])
    click.echo(json.dumps({"name": name, "key": key}) if as_json else key)


@clients.command(name="list")
@_file
@_json
def list_clients(path: Path, as_json: bool) -> None:
    """Show the clients of the file with their limits; never a key."""
    told: dict[str, dict[str, int]] = {}
    for entry in _read(path):
        shown = told.setdefault(entry.name, {"keys": 0})
        shown["keys"] += 1
        shown |= {name: value for name, key in file.LIMITS.items() if (value := getattr(entry.limits, key))}
    if as_json:
        click.echo(json.dumps(told))
        return
    for name, shown in told.items():
        click.echo("  ".join([name, *(f"{what}={value}" for what, value in shown.items())]))


@clients.command()
@_file
@click.option("--but-newest", is_flag=True, help="Keep the key that was added last.")
@_json
@click.argument("name")
def remove(path: Path, name: str, but_newest: bool, as_json: bool) -> None:
    """Take the keys of the client NAME back. Requests that run are finished."""
    lines = _lines(path)
    own = [number for number, line in enumerate(lines) if line.split()[:1] == [name]]
    if not own:
        raise click.ClickException(f"{path} has no client {name}")
    kept = own[-1] if but_newest else -1
    limits = next((entry.limits for entry in _read(path) if entry.name == name and entry.limits != Limits()), Limits())
    if but_newest:
        (entry,) = file.parse([lines[kept]], str(path))
        lines[kept] = file.line_of(file.Entry(name, entry.digest, limits))
    _replace(path, [line for number, line in enumerate(lines) if number == kept or number not in own])
    if as_json:
        click.echo(json.dumps({"name": name, "keys_removed": len(own) - but_newest}))


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    _read(path)
    return path.read_text("utf-8").splitlines()


def _read(path: Path) -> list[file.Entry]:
    try:
        return file.read(path)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error


def _replace(path: Path, lines: list[str]) -> None:
    try:
        file.parse(lines, str(path))
        file.write(path, lines)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
