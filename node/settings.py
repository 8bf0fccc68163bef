"""Everything a node is told, in one frozen value.

Rules:
1. One table. A field of `Settings` IS the key: `gossip_port` is `--gossip-port`, `GRAPEVINE_GOSSIP_PORT` and
   `gossip-port` in TOML. The command line (`node.cli.options`) and the file reader are made from the fields.
2. Flags win over the environment, that over the file, that over the default (click does the merging).
3. A `Settings` that exists is valid: `__post_init__` refuses the rest with a `SettingsError` that says what
   to do. It reads nothing outside its arguments; `make_settings` fills in what depends on the host.
4. Secrets are not in `repr` and not in `public()`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from node import addresses, dirs
from node.errors import SettingsError

T = TypeVar("T")

GIB = 1024**3
#: Policies by name; the routing core holds their code (`node.policy`).
GOSSIP_PRESETS = ("auto", "loopback", "lan", "wan")
POLICIES = ("cost", "latency_based", "least_connections", "round_robin")
LOG_FORMATS = ("auto", "console", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_POOL_GIB = 2.0
#: On a GPU host the pool should hold at least what the GPU's own KV cache holds: what leaves it is no longer announced.
GPU_POOL_GIB = 64.0
#: Most of the free shared memory that a pool takes unless told otherwise: nodes and engines share it.
POOL_SHARE_OF_FREE = 0.25
#: What stands for the two sockets in --engine-command.
UDS_MARK = "{uds}"
LINK_MARK = "{link}"
#: Range of each number: (least, most).
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, addresses.MAX_PORT),
    "gossip_port": (0, addresses.MAX_PORT),
    "kv_port": (0, addresses.MAX_PORT),
    "cluster_size": (1, 4096),
    "workers": (1, 64),
    "max_running": (1, 1_000_000),
    "max_queue": (0, 1_000_000),
    "max_body_mib": (1, 4096),
    "kv_pool_gib": (0, 16_384),
    "kv_spill_gib": (0.001, 16_384),
    "engine_start_timeout_s": (1, 86_400),
    "engine_nice": (0, 19),
    "stop_grace_s": (0, 3600),
    "drain_copy_s": (0, 3600),
}


def key(
    default: T,
    text: str,
    *,
    metavar: str = "",
    derived: str = "",
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> T:
    """A field of `Settings` with what the command line and the file reader must know about it.

    `derived` describes a default that is found at start instead of being a constant.
    """
    about = {"text": text, "metavar": metavar, "derived": derived, "choices": choices, "secret": secret}
    return field(default=default, metadata=about, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a node is told at start. Paths are absolute, ports are numbers (0 = any free port)."""

    model: str = key("", "Model to serve, a directory or a repository name. Default: SmolLM2-135M-Instruct.")
    served_model_name: tuple[str, ...] = key((), "Name that clients use for the model; may be repeated.")
    engine_url: str = key("", "Attach to this OpenAI-compatible server, start no engine.", metavar="URL")
    engine_api_key: str = key("", "API key of the server at --engine-url.", secret=True)
    engine_command: str = key(
        "",
        "Start this OpenAI-compatible server instead of vLLM. {uds} stands for the Unix socket that it has to listen "
        "on, {link} for the socket of the engine link.",
        metavar="COMMAND",
    )
    engine_args: tuple[str, ...] = key((), "Arguments for vLLM, quoted as in a shell; the same as everything after --.")
    engine_start_timeout_s: float = key(3600.0, "Seconds an engine may take to become ready.")
    engine_nice: int = key(
        5,
        "Steps of nice by which the engine's processes stand back while cores are short. 0: none; then an engine that "
        "keeps all cores busy can keep its node from answering.",
    )
    stop_grace_s: float = key(
        25.0, "Seconds that a stop or a drain waits for requests that cannot be moved to a peer; then they are cut."
    )
    name: str = key("", "Name of this node, unique in the cluster.", derived="host name and port")
    host: str = key("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = key(addresses.DEFAULT_PORT, "Port of the HTTP server.")
    advertise: str = key(
        "127.0.0.1",
        "Address at which peers reach this node.",
        derived="--host, or the default route's address",
    )
    gossip_port: int = key(addresses.DEFAULT_GOSSIP_PORT, "Port of gossip (UDP and TCP).", derived="--port + 10000")
    gossip_preset: str = key(
        "auto",
        "Timing of gossip: one host, one data centre, or sites far apart. auto: loopback or lan, by --advertise.",
        choices=GOSSIP_PRESETS,
    )
    cluster_size: int = key(1000, "Nodes that the tables of gossip leave room for, four times over.")
    kv_port: int = key(addresses.DEFAULT_KV_PORT, "Port of the transfer of KV blocks (TCP).", derived="--port + 20000")
    join: tuple[str, ...] = key((), "Gossip address of a node; may be repeated.", metavar="HOST:PORT")
    mdns: bool = key(True, "Find nodes of the local network by multicast DNS.")
    cluster: str = key("default", "Label of the cluster; nodes with another label are ignored.")
    cluster_key: str = key("", "Secret shared by the nodes. Best given in the environment or a file.", secret=True)
    policy: str = key("cost", "How a target is chosen.", choices=POLICIES)
    kv: bool = key(True, "Keep KV blocks in shared memory and exchange them with peers.")
    kv_pool_gib: float = key(
        DEFAULT_POOL_GIB,
        "Size of the pool of KV blocks, GiB.",
        derived="2, on a GPU host 64; at most a quarter of the free shared memory",
    )
    kv_tls: bool = key(
        False, "Exchange KV blocks over TLS only; on every node of the cluster or on none. Needs a cluster key."
    )
    kv_spill_dir: str = key(
        "",
        "Directory on a disk: the pool's blocks are written there when the node is stopped, and read back at its next "
        "start. Default: none, the pool of a stopped node is lost.",
        metavar="DIRECTORY",
    )
    drain_copy_s: float = key(
        10.0,
        "Most seconds of a stop or a drain, and at most half of its time, in which KV blocks that no other node holds "
        "are copied to peers. 0: none are.",
    )
    kv_spill_gib: float = key(16.0, "Largest file in --kv-spill-dir, GiB; the most used blocks are written first.")
    workers: int = key(
        1,
        "Processes that serve HTTP. More than one where relaying requests and streams keeps a core busy; state, "
        "decisions and limits stay in one.",
    )
    max_running: int = key(
        256,
        "Requests that run on this node's engine at once. One whose KV blocks are on their way counts only when they "
        "are there, so that there may be more for a while, twice as many at most.",
    )
    max_queue: int = key(1024, "Requests that wait on this node.")
    max_body_mib: int = key(64, "Largest request body, MiB.")
    api_key: tuple[str, ...] = key((), "Key that clients must send; may be repeated. Default: none.", secret=True)
    cors_origin: tuple[str, ...] = key(
        (),
        "Origin whose web pages may use the API from a browser, such as https://chat.example; may be repeated, * for "
        "all. Default: none.",
        metavar="ORIGIN",
    )
    clients_file: str = key(
        "",
        "File of clients with their API keys and limits (`grapevine clients`); read again when it changes.",
        metavar="FILE",
    )
    admin_token: str = key("", "Token of /admin. Default: /admin is closed.", secret=True)
    tls_cert: str = key(
        "",
        "Certificate of the HTTP port, with those that lead to its root (PEM): the port speaks TLS, peers too. Read "
        "again when it changes.",
        metavar="FILE",
    )
    tls_key: str = key("", "Key of --tls-cert (PEM). Default: it is in the same file.", metavar="FILE")
    otlp_traces_endpoint: str = key(
        "", "Send OpenTelemetry traces to this collector (OTLP over HTTP); needs vllm-grapevine[otel].", metavar="URL"
    )
    state_dir: Path = key(  # noqa: RUF009 - a Path never changes
        Path("/"), "Directory of what survives a restart.", derived="~/.local/state/grapevine"
    )
    run_dir: Path = key(  # noqa: RUF009
        Path("/"), "Directory of sockets, a short path.", derived="$XDG_RUNTIME_DIR/grapevine"
    )
    log_format: str = key(
        "auto", "Form of the node's own log. auto: console on a terminal, else json.", choices=LOG_FORMATS
    )
    log_level: str = key("info", "Least level of the node's own log.", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for name in ("name", "cluster"):
            if not addresses.NAME_PATTERN.fullmatch(getattr(self, name)):
                raise SettingsError(
                    f"{flag(name)} {getattr(self, name)!r}: use 1 to {addresses.MAX_NAME} letters, digits, "
                    "dots, underscores or dashes"
                )
        if self.name in (".", ".."):
            raise SettingsError(f"--name {self.name!r}: the name is also that of a directory, choose another one")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise SettingsError(f"{flag(name)} {getattr(self, name)}: use a number from {least} to {most}")
        for item in dataclasses.fields(self):
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in choices:
                raise SettingsError(f"{flag(item.name)} {getattr(self, item.name)!r}: use {' or '.join(choices)}")
        for address in self.join:
            addresses.split_address(address)
        if self.host == "::" and addresses.is_ipv4(self.advertise):
            # Its sockets speak IPv6 only (gossip, KV), so peers would find nobody at that address.
            raise SettingsError(
                f"--host :: listens for IPv6 and --advertise {self.advertise} is an IPv4 address: use --host 0.0.0.0, "
                "or advertise an IPv6 address"
            )
        if self.kv_tls and not self.cluster_key:
            raise SettingsError(
                "--kv-tls needs a cluster key, or nobody could tell who is at the other end: set GRAPEVINE_CLUSTER_KEY"
            )
        for origin in self.cors_origin:
            if not _is_origin(origin):
                raise SettingsError(f"--cors-origin {origin!r}: use * or an origin such as https://chat.example:8443")
        self._check_distinct_ports()
        self._check_security()
        self._check_engine_url()
        self._check_engine_command()
        self._check_paths()
        self._check_workers()

    def _check_workers(self) -> None:
        if self.workers > 1 and self.otlp_traces_endpoint:
            raise SettingsError(
                "--workers and --otlp-traces-endpoint do not go together yet: a trace is kept by one process. Leave "
                "one of them out"
            )

    def _check_distinct_ports(self) -> None:
        used: dict[int, str] = {}
        for name in ("port", "gossip_port", "kv_port"):
            number = getattr(self, name)
            if number and number in used:
                raise SettingsError(
                    f"{flag(used[number])} and {flag(name)} are both {number}: give them different ports"
                )
            used[number] = name

    def _check_security(self) -> None:
        if self.tls_key and not self.tls_cert:
            raise SettingsError("--tls-key is of no use without --tls-cert: give both, or neither")
        if self.otlp_traces_endpoint and not _is_http_url(self.otlp_traces_endpoint):
            raise SettingsError(
                f"--otlp-traces-endpoint {self.otlp_traces_endpoint!r}: use a URL such as http://127.0.0.1:4318"
            )

    def _check_engine_url(self) -> None:
        if not self.engine_url:
            return
        if not _is_http_url(self.engine_url):
            raise SettingsError(f"--engine-url {self.engine_url!r}: use a URL such as http://127.0.0.1:8000")
        for name, what in (("engine_args", "arguments after --"), ("model", "--model")):
            if getattr(self, name):
                raise SettingsError(f"--engine-url attaches to a server that already runs: leave {what} out")

    def _check_engine_command(self) -> None:
        if not self.engine_command:
            return
        for name, what in (("engine_url", "--engine-url"), ("engine_args", "arguments after --"), ("model", "--model")):
            if getattr(self, name):
                raise SettingsError(f"--engine-command is the whole command of the engine: leave {what} out")
        try:
            words = shlex.split(self.engine_command)
        except ValueError as error:
            raise SettingsError(f"--engine-command is not quoted as a shell wants it: {error}") from error
        if UDS_MARK not in " ".join(words[1:]):
            raise SettingsError(
                f"--engine-command must tell the server where to listen: put {UDS_MARK} where its option for a Unix "
                f"socket takes the path, as in 'my-server --uds {UDS_MARK}'"
            )

    def _check_paths(self) -> None:
        if not self.state_dir.is_absolute() or not self.run_dir.is_absolute():
            raise SettingsError("--state-dir and --run-dir must be absolute paths")
        for path in (self.engine_socket, self.link_socket):
            if len(os.fsencode(path)) > dirs.MAX_SOCKET_PATH:
                raise SettingsError(
                    f"--run-dir {self.run_dir} is too long: a socket in it has a path of "
                    f"{len(os.fsencode(path))} bytes, {dirs.MAX_SOCKET_PATH} fit; choose a shorter one"
                )

    @property
    def scheme(self) -> str:
        """What the HTTP port speaks: http or https."""
        return "https" if self.tls_cert else "http"

    @property
    def has_clients(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_key or self.clients_file)

    @property
    def node_dir(self) -> Path:
        """Directory of this node's own state (boot counter, engine log)."""
        return self.state_dir / "nodes" / self.name

    @property
    def engine_log(self) -> Path:
        """File of the engine's output."""
        return self.node_dir / "engine.log"

    @property
    def engine_socket(self) -> Path:
        """Unix socket that the engine's HTTP server listens on."""
        return self.run_dir / f"{self._short_name}.engine"

    @property
    def link_socket(self) -> Path:
        """Unix socket of the engine link (`kvmigrate.link`), that the node listens on."""
        return self.run_dir / f"{self._short_name}.link"

    @property
    def inner_socket(self) -> Path:
        """Unix socket on which the workers ask the main process (`node.workers`)."""
        return self.run_dir / f"{self._short_name}.inner"

    @property
    def pool_path(self) -> Path:
        """File of the pool of KV blocks: in shared memory where the host has it.

        A name is unique within a run directory (`node.runfiles`), so the file's name tells both.
        """
        if os.access(dirs.SHARED_MEMORY, os.W_OK):
            other = "" if self.run_dir == _absolute(dirs.default_run_dir()) else f"-{_short_digest(self.run_dir)}"
            return dirs.SHARED_MEMORY / f"grapevine-{os.getuid()}-{self.name}{other}.kv"
        return self.run_dir / f"{self._short_name}.kv"

    @property
    def spill_path(self) -> Path | None:
        """File that the pool's blocks are in while the node is stopped; None where they are not kept."""
        return _absolute(self.kv_spill_dir) / f"{self.name}.kvspill" if self.kv_spill_dir and self.kv else None

    @property
    def pool_bytes(self) -> int:
        """Size of the pool of KV blocks; 0 without one."""
        return int(self.kv_pool_gib * GIB) if self.kv else 0

    @property
    def _short_name(self) -> str:
        room = dirs.MAX_SOCKET_PATH - len(os.fsencode(self.run_dir)) - len("/.engine")
        if len(self.name) <= room:
            return self.name
        return _short_digest(self.name)

    def public(self) -> dict[str, object]:
        """All settings but the secrets, as plain JSON values."""
        shown = (item.name for item in dataclasses.fields(self) if not item.metadata["secret"])
        values = {name: getattr(self, name) for name in shown}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _is_http_url(url: str) -> bool:
    """Whether `url` names a host and port that can be asked over HTTP."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, a port or a label that cannot be one
        return False


def _is_origin(text: str) -> bool:
    """Whether a browser would write `text` as the origin of a page, or it stands for all of them."""
    try:
        parts = urlsplit(text)
        bare = parts.scheme and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return text == "*" or bool(bare and text == f"{parts.scheme}://{parts.netloc}" and "@" not in text)


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def make_settings(**given: Any) -> Settings:
    """Settings from what was `given`; None counts as not given, the rest is found on this host.

    Raises `SettingsError`.
    """
    values = {name: value for name, value in given.items() if value is not None}
    port = int(values.get("port", addresses.DEFAULT_PORT))
    values.setdefault("name", addresses.default_name(port))
    values.setdefault("gossip_port", addresses.beside(port, addresses.GOSSIP_OFFSET))
    values.setdefault("kv_port", addresses.beside(port, addresses.KV_OFFSET))
    values["state_dir"] = _absolute(values.get("state_dir") or dirs.default_state_dir())
    values["run_dir"] = _absolute(values.get("run_dir") or dirs.default_run_dir())
    for name in ("clients_file", "tls_cert", "tls_key"):
        if values.get(name):
            values[name] = str(_absolute(values[name]))
    values.setdefault("advertise", addresses.advertised(str(values.get("host", "127.0.0.1"))))
    if "kv_pool_gib" not in values:
        free = dirs.free_bytes(dirs.SHARED_MEMORY) or dirs.free_bytes(values["run_dir"].parent)
        wanted = GPU_POOL_GIB if dirs.has_gpu() else DEFAULT_POOL_GIB
        values["kv_pool_gib"] = min(wanted, round(free * POOL_SHARE_OF_FREE / GIB, 3))
    return Settings(**values)


def check_pool_fits(settings: Settings) -> None:
    """Raise `SettingsError` when the pool is larger than the memory its file system can give.

    Writing to a full shared memory ends a process by SIGBUS, so this is asked before the file is made.
    """
    path = settings.pool_path
    own = path.stat().st_blocks * 512 if path.exists() else 0
    free = dirs.free_bytes(path.parent) + own
    if settings.pool_bytes > free:
        raise SettingsError(
            f"--kv-pool-gib {settings.kv_pool_gib:g} does not fit: {path.parent} has {free / GIB:.2f} GiB "
            "free; give less, enlarge it, or use --no-kv"
        )


def _short_digest(text: str | Path) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=6).hexdigest()


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
