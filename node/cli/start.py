"""`grapevine start`: settings from all their sources, then the node."""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any

import click

from node.cli.options import PREFIX, kinds, origin_of, settings_options, split_arguments
from node.errors import LocalError
from node.settings import make_settings

#: Variables with the prefix that are no keys.
OTHER_VARIABLES = ("CONFIG", "CACHE_DIR", "NODE")


class StartCommand(click.Command):
    """Sets apart what comes after `--` and tells where a wrong value came from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse our own arguments; those for vLLM are kept untouched."""
        own, ctx.meta["grapevine.engine_args"] = split_arguments(args)
        try:
            return super().parse_args(ctx, own)
        except click.BadParameter as error:
            told = error.message + origin_of(ctx, error)
            raise click.BadParameter(told, error.ctx, error.param, error.param_hint) from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line, with the part for vLLM."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS FOR VLLM]"]


def _note_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Of this command, and no setting of the node."""
    ctx.meta["grapevine.json"] = value


@click.command(
    cls=StartCommand,
    context_settings={"auto_envvar_prefix": PREFIX, "max_content_width": 110, "help_option_names": ["-h", "--help"]},
    epilog="Each option may also stand in the environment (GRAPEVINE_GOSSIP_PORT=7000) or in the file of --config "
    "(gossip-port = 7000). Lists are separated by commas or blanks in the environment. Flags win over the "
    "environment, that wins over the file.",
)
@settings_options
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_note_json,
    help="Say what is up, and how others join, as one JSON object a line.",
)
@click.pass_context
def start(ctx: click.Context, /, **values: Any) -> None:
    """Run a node on this host until it is stopped (Ctrl-C or SIGTERM).

    Without --model it serves SmolLM2-135M-Instruct, fetched on first use.
    """
    _warn_of_unknown_variables()
    after = ctx.meta["grapevine.engine_args"]
    if after:
        values["engine_args"] = tuple(after)
    try:
        settings = make_settings(**values)
        from node.app import run

        status = run(settings, as_json=ctx.meta["grapevine.json"])
    except LocalError as error:
        raise click.UsageError(str(error), ctx) from error
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _warn_of_unknown_variables() -> None:
    known = [name.upper() for name in kinds()]
    for variable in sorted(os.environ):
        name = variable.removeprefix(f"{PREFIX}_")
        if name == variable or name in known or name in OTHER_VARIABLES:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {PREFIX}_{near[0]}?" if near else ""
        click.echo(f"warning: the environment variable {variable} is not known and is ignored{hint}", err=True)
