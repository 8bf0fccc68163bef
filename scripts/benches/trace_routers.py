"""The peer routers in front of a bench's engines, each as its own documentation says for many engines behind one model.

Every process is a group of its own and ends with the `async with` block.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import orjson
from localcluster import free_ports

from benches.emulated_cluster import MODEL, POLL_S
from benches.peers import PEERS

READY_LIMIT_S = 90.0
STOP_LIMIT_S = 10.0
ASK_LIMIT_S = 5.0


class NotStarted(Exception):
    """A router did not come up."""


@dataclass(frozen=True, slots=True)
class Router:
    """How a peer is started. `peer` is its name in `benches.peers`."""

    peer: str
    launch: Sequence[str]
    flags: Sequence[str]

    @property
    def ready(self) -> bool:
        """Whether it is installed."""
        return PEERS[self.peer].ready

    def command(self, port: int, metrics_port: int, engines: Sequence[str]) -> list[str]:
        """The command line."""
        program = str(PEERS[self.peer].venv / "bin" / self.launch[0])
        command = [program, *self.launch[1:], "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
        return [*command, "--prometheus-port", str(metrics_port), "--max-concurrent-requests", "4096", *self.flags]


#: Affinity gives way to the shortest queue from a difference of so many requests on: the default of 64 is for many
#: more requests at once than an engine has here, and is never reached.
_BALANCED = ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.5")


def _cache_aware(peer: str, launch: Sequence[str], level: str, *more: str) -> Router:
    return Router(peer, launch, ("--policy", "cache_aware", "--log-level", level, *more))


_SGLANG = ("python", "-m", "sglang_router.launch_router")
_SMG = ("smg", "launch")
#: By the name that figures use: with its defaults, and with affinity that gives way sooner.
ROUTERS = {
    "sglang": _cache_aware("sglang", _SGLANG, "warn"),
    "smg": _cache_aware("smg", _SMG, "warn"),
    "vllm_router": _cache_aware("vllm-router", ("vllm-router",), "warning"),
    "sglang_balanced": _cache_aware("sglang", _SGLANG, "warn", *_BALANCED),
    "smg_balanced": _cache_aware("smg", _SMG, "warn", *_BALANCED),
    "vllm_router_balanced": _cache_aware("vllm-router", ("vllm-router",), "warning", *_BALANCED),
    "smg_least_load": Router("smg", _SMG, ("--policy", "least_load", "--log-level", "warn")),
}


@asynccontextmanager
async def running(router: Router, engines: Sequence[str]) -> AsyncIterator[tuple[str, int]]:
    """Start it and wait until a request gets through: its base URL and process id.

    :raises NotStarted: it does not, with the end of its output.
    """
    port, metrics_port = free_ports(2)
    with TemporaryDirectory(prefix="gvb") as folder:
        log = Path(folder, "log")
        process = await asyncio.create_subprocess_exec(
            *router.command(port, metrics_port, engines),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=(output := os.open(log, os.O_WRONLY | os.O_CREAT)),
            stderr=output,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        os.close(output)
        try:
            url = f"http://127.0.0.1:{port}"
            await _wait(process, url, log)
            yield url, process.pid
        finally:
            await _end(process)


async def _wait(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    """Until a request gets through."""
    body = orjson.dumps({"model": MODEL, "prompt": "are you there", "max_tokens": 1})
    headers = {"Content-Type": "application/json"}
    limit = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
    try:
        async with asyncio.timeout(READY_LIMIT_S), aiohttp.ClientSession(timeout=limit) as session:
            while process.returncode is None:
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass
    raise NotStarted(f"no answer through it: {_last_line(log)}")


def _last_line(log: Path) -> str:
    told = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return told[-1][:200] if told else "it says nothing"


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
