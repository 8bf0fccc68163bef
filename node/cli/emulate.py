"""`grapevine emulate`: an engine without a model, for tests, benchmarks and sizing."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import click

from node.cli.number import NumberRange
from node.emulator import profile
from node.emulator.config import PRESETS, EngineConfig, adjusted, coarser, preset
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.errors import LocalError


@click.command(context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]})
@click.option("--preset", "name", type=click.Choice(sorted(PRESETS)), default="8b-gpu", show_default=True)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="Instead of a preset: a file that `scripts/bench fit --save` wrote for an engine of yours.",
)
@click.option("--served-model-name", "models", multiple=True, help="Name that clients use; may be repeated.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 = any free one.")
@click.option("--uds", type=click.Path(path_type=Path), help="Listen on this Unix socket instead.")
@click.option("--speedup", type=NumberRange(0.01, 1000), default=1.0, show_default=True)
@click.option("--max-model-len", type=click.IntRange(1), help="Longest prompt and answer together, tokens.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Requests computed at once.")
@click.option("--max-num-batched-tokens", "step_tokens", type=click.IntRange(1), help="Tokens computed in a step.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens in a KV block.")
@click.option("--kv-tokens", type=click.IntRange(1), help="Tokens that the KV cache holds.")
@click.option(
    "--coarse",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="One token stands for so many of the preset's, and of the limits given here: long traces, small machine.",
)
@click.option("--link-socket", type=click.Path(path_type=Path), help="Engine link of a node: RUN_DIR/NAME.link.")
@click.option(
    "--kv-block-bytes", type=click.IntRange(32), default=4096, show_default=True, help="Size of a block in the pool."
)
@click.option(
    "--kv-events-endpoint",
    metavar="ENDPOINT",
    help="Publish KV events over ZMQ, in vLLM's form; tcp://*:5557 is vLLM's default. Needs pyzmq.",
)
@click.option("--kv-events-topic", default="", help="Topic of the KV events.  [default: empty]")
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as JSON, on standard output.")
@click.option("--journal", type=click.Path(path_type=Path), help="File in which to note who was computed when.")
def emulate(
    *,
    name: str,
    profile_file: Path | None,
    models: tuple[str, ...],
    host: str,
    port: int,
    uds: Path | None,
    speedup: float,
    coarse: int,
    link_socket: Path | None,
    kv_block_bytes: int,
    kv_events_endpoint: str | None,
    kv_events_topic: str,
    journal: Path | None,
    as_json: bool,
    **changed: int | None,
) -> None:
    """Serve an emulated engine: OpenAI's protocol, vLLM's cache and batching, no model.

    Answers are made-up words, a function of the prompt. Put it behind a node with `grapevine start --engine-url`.
    """
    try:
        base = profile.read(profile_file) if profile_file is not None else preset(name)
        config = coarser(adjusted(base, **changed), coarse)
        options = ServeOptions(
            models=models or (config.name,),
            host=host,
            port=port,
            uds=uds,
            speedup=speedup,
            link=link_socket,
            block_bytes=kv_block_bytes,
            kv_events=kv_events_endpoint,
            kv_events_topic=kv_events_topic,
            journal=journal,
        )
        asyncio.run(_serve(config, options, as_json=as_json))
    except (LocalError, OSError) as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


async def _serve(config: EngineConfig, options: ServeOptions, *, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with EmulatedServer(config, options) as server:
        where = f"unix:{options.uds}" if options.uds is not None else f"http://{options.host}:{server.port}"
        if as_json:
            click.echo(json.dumps({"event": "started", "engine": config.name, "models": options.models, "url": where}))
        else:
            click.echo(f"emulated engine {config.name} listens at {where}", err=True)
        await stop.wait()
