"""`grapevine version`."""

from __future__ import annotations

import json
import platform

import click

from node import __version__


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Show the versions of Grapevine, vLLM and Python, and whether Grapevine is compiled."""
    from gossip.build import is_compiled
    from node.engine.command import is_cpu_build, vllm_version

    engine = vllm_version()
    told = {
        "grapevine": __version__,
        "compiled": is_compiled(),
        "vllm": engine,
        "vllm_cpu": is_cpu_build(),
        "python": platform.python_version(),
    }
    if as_json:
        click.echo(json.dumps(told))
        return
    build = " (CPU)" if told["vllm_cpu"] else ""
    ours = f"{__version__} (compiled)" if told["compiled"] else __version__
    click.echo(f"grapevine {ours}, vLLM {engine + build if engine else 'not installed'}, Python {told['python']}")
