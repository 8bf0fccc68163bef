"""What a starting node tells the person at the terminal, or the script that reads its JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable

from node.addresses import MAX_PORT, WILDCARD_HOSTS, join_address
from node.engine.events import EngineReady
from node.settings import Settings

Say = Callable[[str], None]
#: The label that a node has unless told otherwise.
DEFAULT_CLUSTER = next(item.default for item in dataclasses.fields(Settings) if item.name == "cluster")
#: Arguments of vLLM whose values are nobody's business.
_SECRET = re.compile(r"--(api-key|hf-token|\S*secret\S*|\S*password\S*)")
_HIDDEN = "..."


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A node that has just come up."""

    name: str
    cluster: str
    policy: str
    #: Where clients of this host or of others reach it, without a slash at the end.
    url: str
    gossip: str
    #: 0 where no KV blocks are exchanged.
    kv_port: int
    kv_encrypted: bool
    engine: str
    #: The one command that the next host needs, and what it needs besides.
    join: str
    join_needs: str
    others_can_join: bool
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        tls = " over TLS" if self.kv_encrypted else ""
        kv = f", KV blocks{tls} on port {self.kv_port}" if self.kv_port else ", no exchange of KV blocks"
        told = [
            f"grapevine node {self.name}, cluster {self.cluster}, policy {self.policy}",
            f"  API      {self.url}/v1        (any OpenAI client)",
            f"  page     {self.url}/          state {self.url}/gossip/state",
            f"  gossip   {self.gossip}{kv}",
            f"  engine   {self.engine}",
            f"  join     {self.join}        ({self.join_needs})",
        ]
        if not self.others_can_join:
            told.append("           only this host can reach it: start with --host 0.0.0.0 to let others join")
        return told + ["  WARNING  " + warning.replace("\n", "\n           ") for warning in self.warnings]

    def as_json(self) -> str:
        """For scripts: one line."""
        return json.dumps({"event": "started", **dataclasses.asdict(self)})


def started(settings: Settings, *, http_port: int, gossip_address: tuple[str, int], kv_port: int) -> Started:
    """What runs where, and the one command that another host needs."""
    # At the wildcard address everybody reaches it by the one that its peers are told.
    host = settings.advertise if settings.host in WILDCARD_HOSTS else settings.host
    alone = gossip_address[0].startswith("127.") or gossip_address[0] == "::1"
    where = f"--port {_next(http_port)}" if alone else "--host 0.0.0.0"
    return Started(
        name=settings.name,
        cluster=settings.cluster,
        policy=settings.policy,
        url=f"{settings.scheme}://{join_address(host, http_port)}",
        gossip=join_address(*gossip_address),
        kv_port=kv_port,
        kv_encrypted=settings.kv_tls,
        engine=_engine(settings),
        join=_join(settings, where, join_address(*gossip_address)),
        join_needs=_needs(settings, "on this host" if alone else "on any other host"),
        others_can_join=not alone,
        warnings=tuple(_warnings(settings)),
    )


def told_json(line: str) -> str:
    """A later line for people, for scripts."""
    return json.dumps({"event": "told", "text": line})


def ready(event: EngineReady) -> str:
    """What to say when the engine begins to serve."""
    models = ", ".join(f"{model.id} (context {model.max_model_len or '?'})" for model in event.models)
    return f"the engine is ready and serves {models or 'no model'}" + (
        f", version {event.version}" if event.version else ""
    )


def _join(settings: Settings, where: str, address: str) -> str:
    """What makes the next host one like this: the same model under the same names, the same cluster."""
    words: list[str] = []
    if settings.model:
        words += ["--model", settings.model]
        words += [word for name in settings.served_model_name for word in ("--served-model-name", name)]
    words += ["--join", address]
    if settings.cluster != DEFAULT_CLUSTER:
        words += ["--cluster", settings.cluster]
    if settings.kv_tls:
        words.append("--kv-tls")
    if settings.engine_args:
        words += ["--", *_shown(settings.engine_args)]
    return f"grapevine start {where} {shlex.join(words)}"


def _shown(arguments: tuple[str, ...]) -> list[str]:
    """Arguments without secrets: the command may go to a log."""
    shown: list[str] = []
    hide = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        secret = _SECRET.fullmatch(name) is not None
        shown.append(_HIDDEN if hide else f"{name}={_HIDDEN}" if secret and equals else word)
        hide = secret and not equals
    return shown


def _needs(settings: Settings, where: str) -> str:
    needs = [where]
    if settings.cluster_key:
        needs.append("with the same GRAPEVINE_CLUSTER_KEY")
    if settings.engine_url:
        needs.append("with the --engine-url of a server of its own")
    if settings.engine_command:
        needs.append("with the same --engine-command")
    if settings.tls_cert:
        needs.append("with a --tls-cert of its own")
    return ", ".join(needs)


def _next(port: int) -> int:
    """A port for another node of this host, whose neighbours (`node.addresses`) are not ours."""
    return port + 1 if port < MAX_PORT else port - 1


def _engine(settings: Settings) -> str:
    if settings.engine_url:
        return f"attached to {settings.engine_url}"
    if settings.engine_command:
        return f"{shlex.split(settings.engine_command)[0]} is starting, log in {settings.engine_log}"
    return f"{settings.model or 'SmolLM2-135M-Instruct (default)'} is starting, log in {settings.engine_log}"


def _warnings(settings: Settings) -> list[str]:
    """What is open to whoever reaches the ports."""
    reachable = settings.host not in ("127.0.0.1", "::1", "localhost")
    told = []
    if not settings.cluster_key:
        text = "no cluster key: whoever reaches the gossip port can join and read prompts."
        if settings.tls_cert:
            text += "\nWithout it TLS between nodes keeps listeners out, and nobody who poses as a node."
        if reachable:
            text += "\nSet the same GRAPEVINE_CLUSTER_KEY on every node, or keep these ports private."
        told.append(text)
    if reachable and not settings.has_clients:
        told.append("no client API keys: whoever reaches the HTTP port can use the engines (--clients-file).")
    return told
