"""What is measured: routers and our own nodes, each started as a user would, in front of the same two backends.

Every process is a group of its own and ends with the `with` block, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from localcluster import free_ports

from benches.child import PACKAGES
from benches.peers import PEERS
from benches.proxy.backend import MODEL
from benches.proxy.procs import family

ROOT = Path(__file__).resolve().parents[3]
#: Seconds for a subject to answer a chat request through to a backend, and the time between two tries.
READY_S = 60.0
TRY_S = 0.2
STOP_S = 10.0
#: What a node is told in all cases: requests and bodies of the loads fit.
NODE = ("--no-mdns", "--no-kv", "--max-running", "4096", "--policy", "cost", "--log-level", "warning")
#: A model that the entry's own engine serves in the forwarded case, so that every request has to go on.
OTHER_MODEL = "other"


class NotStarted(Exception):
    """A subject did not come up."""


@dataclass(slots=True)
class Subject:
    """Something that takes requests at `ports`; `pids` are its processes, without the backends."""

    name: str
    ports: list[int]
    pids: list[int] = field(default_factory=list)

    def family(self) -> list[int]:
        """All its processes, now."""
        return family(self.pids)


class Stage:
    """The backends, and whatever is started in front of them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="grapevine-bench-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}

    def __enter__(self) -> Self:
        a, b, other = free_ports(3)
        for name, port, model in (("a", a, MODEL), ("b", b, MODEL), ("c", other, OTHER_MODEL)):
            arguments = ["-m", "benches.proxy.backend", "--port", str(port), "--name", name, "--model", model]
            self.start(f"backend-{name}", [sys.executable, *arguments])
        self.backends = [f"http://127.0.0.1:{port}" for port in (a, b)]
        self.other = f"http://127.0.0.1:{other}"
        self.direct = Subject("direct", [a, b])
        self.ready(self.direct)
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._processes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self, subject: Subject) -> None:
        """End a subject before the others."""
        self._end([process for process in self._processes if process.pid in subject.pids])

    @staticmethod
    def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(self, name: str, command: Sequence[str], **variables: str) -> int:
        """Start a process. Returns its id."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        self._logs[process.pid] = log
        return process.pid

    def _environment(self) -> dict[str, str]:
        """Ours; modules are compiled once, as they are where a node is installed."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return inherited | {
            "PYTHONPATH": f"{PACKAGES}:{ROOT / 'scripts'}",
            "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"),
        }

    def ready(self, subject: Subject) -> Subject:
        """Wait until a chat request gets through at each port.

        :raises NotStarted: it does not, with the end of its log.
        """
        deadline = time.monotonic() + READY_S
        for port in subject.ports:
            while not _answers(port):
                ended = [p for p in self._processes if p.pid in subject.pids and p.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise NotStarted(self._why(subject, bool(ended)))
                time.sleep(TRY_S)
        return subject

    def _why(self, subject: Subject, ended: bool) -> str:
        lines = [line for pid in subject.pids for line in self._logs[pid].read_text(errors="replace").splitlines()]
        told = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
        return f"{'it ended' if ended else f'no answer within {READY_S:.0f} s'}: {told[:200]}"

    # --- ourselves

    def node(self, name: str, engine: str, *, join: int = 0, workers: int = 1) -> Subject:
        """Start a real node in front of an engine. `join` is another node's HTTP port."""
        (port,) = free_ports(1)
        folder = self.folder / name
        command = [sys.executable, "-c", "from node.cli import main; main()", "start", "--name", name]
        command += ["--port", str(port), "--engine-url", engine, *NODE]
        command += ["--state-dir", str(folder / "state"), "--run-dir", str(folder)]
        command += ["--join", f"127.0.0.1:{join + 10000}"] if join else []
        command += ["--workers", str(workers)] if workers > 1 else []
        return Subject(name, [port], [self.start(name, command)])

    def local(self) -> Subject:
        """One node: entry and target are the same."""
        node = self.node("local", self.backends[0])
        return Subject("local", node.ports, node.pids)

    def workers(self) -> Subject:
        """The same with two workers."""
        node = self.node("workers", self.backends[0], workers=2)
        return Subject("workers", node.ports, node.pids)

    def forwarded(self) -> Subject:
        """Two nodes; the engine of the entry serves another model, so that every request is forwarded."""
        target = self.ready(self.node("target", self.backends[1]))
        entry = self.node("entry", self.other, join=target.ports[0])
        return Subject("forwarded", entry.ports, entry.pids + target.pids)

    def cluster(self) -> Subject:
        """Two nodes with an engine each; clients talk to both."""
        first = self.ready(self.node("first", self.backends[0]))
        second = self.ready(self.node("second", self.backends[1], join=first.ports[0]))
        return Subject("cluster", first.ports + second.ports, first.pids + second.pids)

    # --- the peers

    def plain(self) -> Subject:
        """The plain aiohttp proxy."""
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "benches.proxy.plain", str(port), *self.backends]
        return Subject("plain", [port], [self.start("plain", command)])

    def peer(self, name: str) -> Subject:
        """Start a peer by name; it is ready when `ready` says so."""
        port, other = free_ports(2)
        command, variables = _COMMANDS[name](self, port, other)
        return Subject(name, [port], [self.start(name, command, **variables)])


_Command = tuple[list[str], dict[str, str]]


def _router(stage: Stage, port: int, other: int, *, launch: list[str], policy: str, level: str) -> _Command:
    command = [*launch, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *stage.backends]
    command += ["--policy", policy, "--prometheus-port", str(other), "--log-level", level]
    return [*command, "--max-concurrent-requests", "4096"], {}


def _sglang(stage: Stage, port: int, other: int) -> _Command:
    launch = [str(PEERS["sglang"].python), "-m", "sglang_router.launch_router"]
    return _router(stage, port, other, launch=launch, policy="cache_aware", level="warn")


def _smg(stage: Stage, port: int, other: int) -> _Command:
    launch = [str(PEERS["smg"].venv / "bin" / "smg"), "launch"]
    return _router(stage, port, other, launch=launch, policy="cache_aware", level="warn")


def _vllm_router(stage: Stage, port: int, other: int) -> _Command:
    launch = [str(PEERS["vllm-router"].venv / "bin" / "vllm-router")]
    return _router(stage, port, other, launch=launch, policy="round_robin", level="warning")


def _litellm(stage: Stage, port: int, other: int) -> _Command:
    config = stage.folder / "litellm.yaml"
    entry = '  - model_name: {m}\n    litellm_params: {{model: "openai/{m}", api_base: "{url}/v1", api_key: none}}\n'
    config.write_text("model_list:\n" + "".join(entry.format(m=MODEL, url=url) for url in stage.backends))
    program = str(PEERS["litellm"].venv / "bin" / "litellm")
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return command, {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }


def _haproxy(stage: Stage, port: int, other: int) -> _Command:
    config = stage.folder / "haproxy.cfg"
    servers = "".join(f"  server s{i} {url.removeprefix('http://')}\n" for i, url in enumerate(stage.backends))
    config.write_text(
        "global\n  nbthread 2\n  maxconn 4096\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n"
        "  timeout server 60s\n  http-reuse always\n"
        f"frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n  balance leastconn\n{servers}"
    )
    return [str(shutil.which("haproxy")), "-db", "-f", str(config)], {}


def _nginx(stage: Stage, port: int, other: int) -> _Command:
    config = stage.folder / "nginx.conf"
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in stage.backends)
    config.write_text(
        f"daemon off; worker_processes 2; pid {stage.folder}/nginx.pid; error_log stderr; events {{ worker_connections"
        f" 8192; }} http {{ access_log off; client_body_temp_path {stage.folder}/body; client_max_body_size 64m;"
        f" client_body_buffer_size 1m; upstream b {{ {servers} keepalive 256; }} server {{ listen 127.0.0.1:{port};"
        f" keepalive_requests 1000000; location / {{ proxy_pass http://b; proxy_http_version 1.1;"
        f' proxy_set_header Connection ""; proxy_buffering off; }} }} }}'
    )
    return [str(shutil.which("nginx")), "-c", str(config)], {}


_COMMANDS: dict[str, Callable[[Stage, int, int], _Command]] = {
    "haproxy": _haproxy,
    "nginx": _nginx,
    "sglang": _sglang,
    "smg": _smg,
    "vllm-router": _vllm_router,
    "litellm": _litellm,
}


def _answers(port: int) -> bool:
    body = b'{"model":"%s","messages":[{"role":"user","content":"are you there"}],"max_tokens":1}' % MODEL.encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json", "authorization": "Bearer none"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
