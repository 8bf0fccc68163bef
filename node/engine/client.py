"""HTTP sessions to the engine: over its Unix socket, or to a server that somebody else runs.

`EngineAddress` is plain data, so that it can be logged and compared; `open_session` makes the session. Paths
are joined with `EngineAddress.url`, because an attached server may live below a base path
(`https://host/gateway`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from node.engine.args import option
from node.relay.connection import MAX_HEAD
from node.relay.session import Session
from node.settings import Settings

#: Seconds to connect: the engine is on this host or near; slower means it is not there.
CONNECT_TIMEOUT_S = 5.0
#: Open connections to an engine; the node's admission is the real bound, this one only stops a leak.
MAX_CONNECTIONS = 4096
#: Seconds that a free connection is kept: servers of Python close theirs after 5 s, and ours must be gone before.
IDLE_S = 4.0


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where the engine's HTTP server is: `socket` for ours, else `base` for an attached one."""

    base: str = "http://engine"
    socket: Path | None = None
    api_key: str = field(default="", repr=False)

    def url(self, path: str) -> URL:
        """The URL of `path` (with its query string, already encoded) on the engine."""
        return URL(self.base.rstrip("/") + "/" + path.lstrip("/"), encoded=True)

    def headers(self) -> dict[str, str]:
        """Headers that every request to the engine needs."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.base


def engine_address(settings: Settings) -> EngineAddress:
    """Where the engine of these settings listens: at `--engine-url`, else on our own socket.

    A base path is kept; an ending `/v1` is dropped, since users paste what they give to OpenAI clients. What
    the user told vLLM after `--` holds: `--uds` moves the socket, `--api-key` is the key to send.
    """
    if not settings.engine_url:
        moved = option(settings.engine_args, "--uds")
        api_key = option(settings.engine_args, "--api-key") or os.environ.get("VLLM_API_KEY", "")
        return EngineAddress(socket=Path(moved).absolute() if moved else settings.engine_socket, api_key=api_key)
    parts = urlsplit(settings.engine_url)
    path = parts.path.rstrip("/").removesuffix("/v1")
    return EngineAddress(base=f"{parts.scheme}://{parts.netloc}{path}", api_key=settings.engine_api_key)


def open_session(address: EngineAddress) -> Session:
    """A session for requests to the engine; the caller closes it. Bodies are passed on as they come."""
    return Session(
        connect_s=CONNECT_TIMEOUT_S,
        idle_s=IDLE_S,
        limit=MAX_CONNECTIONS,
        socket=address.socket,
        headers=address.headers(),
    )


def open_probes(address: EngineAddress) -> aiohttp.ClientSession:
    """A session for our own short questions to the engine; the caller closes it.

    No total time limit, callers give deadlines of their own; no decompression.
    """
    connector: aiohttp.BaseConnector
    if address.socket is not None:
        connector = aiohttp.UnixConnector(path=str(address.socket))
    else:
        connector = aiohttp.TCPConnector()
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=address.headers(),
        max_line_size=MAX_HEAD,
        max_field_size=MAX_HEAD,
        trust_env=False,
    )
