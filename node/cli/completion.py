"""`grapevine completion`: what a shell reads to complete commands, options and names of nodes."""

from __future__ import annotations

import json

import click
from click.shell_completion import get_completion_class

#: The variable by which a shell asks for completions; click makes it of the command's name.
VARIABLE = "_GRAPEVINE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def completion(shell: str, as_json: bool) -> None:
    """Print the completion script of a SHELL, for its start-up file: eval "$(grapevine completion bash)".

    fish: grapevine completion fish | source
    """
    from node.cli.main import main

    known = get_completion_class(shell)
    assert known is not None  # click has the three of the choice
    script = known(main, {}, "grapevine", VARIABLE).source_template % {
        "complete_func": "_grapevine_completion",
        "complete_var": VARIABLE,
        "prog_name": "grapevine",
    }
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)
