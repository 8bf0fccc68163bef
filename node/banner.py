"""What a starting node tells the person at the terminal."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable

from node.addresses import MAX_PORT, WILDCARD_HOSTS, join_address
from node.engine.events import EngineReady
from node.settings import Settings

Say = Callable[[str], None]
#: The label that a node has unless told otherwise.
DEFAULT_CLUSTER = next(item.default for item in dataclasses.fields(Settings) if item.name == "cluster")


def started(say: Say, settings: Settings, *, http_port: int, gossip_address: tuple[str, int], kv_port: int) -> None:
    """Say what runs where, and the one command that another host needs."""
    shown = "127.0.0.1" if settings.host in WILDCARD_HOSTS else settings.host
    url = f"{settings.scheme}://{join_address(shown, http_port)}"
    join = join_address(*gossip_address)
    tls = " over TLS" if settings.kv_tls else ""
    say(f"grapevine node {settings.name}, cluster {settings.cluster}, policy {settings.policy}")
    say(f"  API      {url}/v1        (any OpenAI client)")
    say(f"  page     {url}/          state {url}/gossip/state")
    say(f"  gossip   {join}" + (f", KV blocks{tls} on port {kv_port}" if kv_port else ", no exchange of KV blocks"))
    say(f"  engine   {_engine(settings)}")
    label = "" if settings.cluster == DEFAULT_CLUSTER else f" --cluster {settings.cluster}"
    key = ", with the same GRAPEVINE_CLUSTER_KEY" if settings.cluster_key else ""
    if gossip_address[0].startswith("127.") or gossip_address[0] == "::1":
        say(f"  join     grapevine start --port {_next(http_port)} --join {join}{label}        (on this host{key})")
        say("           only this host can reach it: start with --host 0.0.0.0 to let others join")
    else:
        say(f"  join     grapevine start --host 0.0.0.0 --join {join}{label}        (on any other host{key})")
    _warn(say, settings)


def ready(event: EngineReady) -> str:
    """What to say when the engine begins to serve."""
    models = ", ".join(f"{model.id} (context {model.max_model_len or '?'})" for model in event.models)
    return f"the engine is ready and serves {models or 'no model'}" + (
        f", version {event.version}" if event.version else ""
    )


def _next(port: int) -> int:
    """A port for another node of this host, whose neighbours (`node.addresses`) are not ours."""
    return port + 1 if port < MAX_PORT else port - 1


def _engine(settings: Settings) -> str:
    if settings.engine_url:
        return f"attached to {settings.engine_url}"
    if settings.engine_command:
        return f"{shlex.split(settings.engine_command)[0]} is starting, log in {settings.engine_log}"
    return f"{settings.model or 'SmolLM2-135M-Instruct (default)'} is starting, log in {settings.engine_log}"


def _warn(say: Say, settings: Settings) -> None:
    """Say what is open to whoever reaches the ports."""
    reachable = settings.host not in ("127.0.0.1", "::1", "localhost")
    if not settings.cluster_key:
        say("  WARNING  no cluster key: whoever reaches the gossip port can join and read prompts.")
        if settings.tls_cert:
            say("           Without it TLS between nodes keeps listeners out, and nobody who poses as a node.")
        if reachable:
            say("           Set the same GRAPEVINE_CLUSTER_KEY on every node, or keep these ports private.")
    if reachable and not settings.has_clients:
        say("  WARNING  no client API keys: whoever reaches the HTTP port can use the engines (--clients-file).")
