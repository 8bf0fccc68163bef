"""An OpenAI-shaped engine under the test's control: no model, no GPU, every byte decided by the test.

It listens on a Unix socket as a supervised engine does. Each request is recorded as it was received; the
answer comes from a script: a fixed reply, a stream whose chunks wait for the test, silence, a reset, or a
refusal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from multidict import CIMultiDict

Headers = tuple[tuple[str, str], ...]
Script = Callable[["Exchange"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Received:
    """A request exactly as it reached the engine."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


@dataclass(frozen=True, slots=True)
class Reply:
    """A fixed answer. ``chunks`` are written one by one; with ``length`` a Content-Length is sent."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    chunks: tuple[bytes, ...] = (b"{}",)
    length: bool = True
    reason: str | None = None


class BareResponse(web.StreamResponse):
    """A response that sends the test's headers and nothing of aiohttp's own except the framing."""

    async def _prepare_headers(self) -> None:
        kept = CIMultiDict(self._headers)
        await super()._prepare_headers()
        for name in ("Date", "Server", "Content-Type"):
            if name not in kept:
                self._headers.popall(name, None)


class Exchange:
    """One request in progress, as a script sees it."""

    def __init__(self, engine: FakeEngine, request: web.BaseRequest, received: Received) -> None:
        self.engine = engine
        self.request = request
        self.received = received
        self.response: web.StreamResponse | None = None

    async def start(self, reply: Reply) -> None:
        response = BareResponse(status=reply.status, reason=reply.reason, headers=CIMultiDict(reply.headers))
        if reply.length and "Content-Length" not in response.headers:
            response.content_length = sum(map(len, reply.chunks))
        self.response = response
        await response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        await self.response.write(data)

    async def send(self, reply: Reply) -> None:
        await self.start(reply)
        for chunk in reply.chunks:
            await self.write(chunk)
        assert self.response is not None
        await self.response.write_eof()

    def reset(self) -> None:
        """Cut the connection hard, as a killed process does."""
        assert self.request.transport is not None
        self.request.transport.abort()


@dataclass
class Gate:
    """Lets a stream go on one chunk at a time: the test calls ``open``, the script awaits ``passed``."""

    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def open(self, n: int = 1) -> None:
        for _ in range(n):
            self.semaphore.release()

    async def passed(self) -> None:
        await self.semaphore.acquire()


class FakeEngine:
    """The engine. ``script`` answers everything outside /health, /v1/models and /metrics."""

    def __init__(self, path: Path, models: Sequence[str] = ("m",), *, max_model_len: int = 4096) -> None:
        self.path = path
        self.models = list(models)
        self.max_model_len = max_model_len
        self.healthy = True
        self.metrics_text = "# HELP vllm:demo A demo.\n# TYPE vllm:demo counter\nvllm:demo 1.0\n"
        self.received: list[Received] = []
        self.script: Script = answer_chat
        self.active = 0
        self.disconnects = 0
        self.url = ""
        self._changed = asyncio.Condition()
        self._runner: web.ServerRunner | None = None

    async def start(self, *, tcp: bool = False) -> FakeEngine:
        server = web.Server(self._handle, handler_cancellation=True, auto_decompress=False, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        self.path.unlink(missing_ok=True)
        if tcp:
            site: web.BaseSite = web.TCPSite(self._runner, "127.0.0.1", 0)
        else:
            site = web.UnixSite(self._runner, str(self.path))
        await site.start()
        if tcp:
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def close(self) -> None:
        """Refuse connections from now on and cut the open ones."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.path.unlink(missing_ok=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at whenever the engine receives or loses a request."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(condition), 60)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (fixed := self._fixed(request)) is not None:
            return fixed
        headers = tuple((k.decode("utf-8"), v.decode("utf-8")) for k, v in request.raw_headers)
        body = await _read_all(request)
        self.received.append(Received(request.method, request.raw_path, headers, body))
        self.active += 1
        exchange = Exchange(self, request, self.received[-1])
        await self._note()
        try:
            await self.script(exchange)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnects += 1
            raise
        finally:
            self.active -= 1
            await asyncio.shield(asyncio.ensure_future(self._note()))
        return exchange.response or web.Response(status=500)

    def _fixed(self, request: web.BaseRequest) -> web.Response | None:
        if request.method != "GET":
            return None
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [self._card(m) for m in self.models]})
        if request.path == "/metrics":
            return web.Response(text=self.metrics_text)
        return None

    def _card(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "owned_by": "vllm", "created": 1, "root": model,
                "parent": None, "max_model_len": self.max_model_len}  # fmt: skip


async def _read_all(request: web.BaseRequest) -> bytes:
    parts = [part async for part in request.content.iter_any()]
    return b"".join(parts)


def completion(model: str, text: str) -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    kind = "chat.completion"
    return {
        "id": "chatcmpl-x",
        "object": kind,
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


def sse(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}}
    event = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


SSE_HEADERS = (("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache"))
DONE = b"data: [DONE]\n\n"


async def answer_chat(exchange: Exchange) -> None:
    """Answer any POST with a small completion, streamed when the request asks for a stream."""
    body = exchange.received.json if exchange.received.body.lstrip().startswith(b"{") else {}
    if body.get("stream"):
        await exchange.send(Reply(headers=SSE_HEADERS, chunks=(sse("one"), sse("two"), DONE), length=False))
        return
    text = json.dumps(completion(str(body.get("model")), exchange.engine.path.stem)).encode()
    await exchange.send(Reply(chunks=(text,)))


def reply(fixed: Reply) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.send(fixed)

    return script


def gated(gate: Gate, chunks: Sequence[bytes], headers: Headers = SSE_HEADERS) -> Script:
    """Send headers at once, then one chunk for each time the gate opens."""

    async def script(exchange: Exchange) -> None:
        await exchange.start(Reply(headers=headers, chunks=(), length=False))
        for chunk in chunks:
            await gate.passed()
            await exchange.write(chunk)
        assert exchange.response is not None
        await exchange.response.write_eof()

    return script


async def stall(exchange: Exchange) -> None:
    """Accept the request and never answer."""
    await asyncio.Event().wait()


async def reset(exchange: Exchange) -> None:
    """Accept the request and cut the connection before the first byte."""
    exchange.reset()


def reset_after(chunks: Sequence[bytes], *, length: int | None = None) -> Script:
    """Start a stream, send ``chunks``, then cut the connection."""

    async def script(exchange: Exchange) -> None:
        headers = SSE_HEADERS if length is None else (("Content-Length", str(length)),)
        await exchange.start(Reply(headers=headers, chunks=(), length=False))
        for chunk in chunks:
            await exchange.write(chunk)
        exchange.reset()

    return script


def hold(gate: Gate, then: Script = answer_chat) -> Script:
    """Answer only after the gate opened: the request occupies the engine meanwhile."""

    async def script(exchange: Exchange) -> None:
        await gate.passed()
        await then(exchange)

    return script
