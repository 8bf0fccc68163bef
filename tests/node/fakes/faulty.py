"""An emulated engine behind a proxy that breaks its streams where the test says.

Every token of an answer is a function of those before it, so a carried answer can be compared byte for byte with one
that nobody disturbed. The proxy stands where a supervised engine listens; it also sees how many exchanges of one
request are open at a time, over all engines that share its `Decodes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from node.emulator import EngineConfig, Timing
from node.emulator.serve.server import EmulatedServer, ServeOptions
from node.relay.carry.events import EventSplitter

FAST = EngineConfig(
    name="fast",
    timing=Timing(step_s=0.0005, prefill_s=1e-6),
    block_size=16,
    kv_tokens=1 << 16,
    step_tokens=2048,
    max_model_len=4096,
)

ENGINE_DEAD = (
    b'data: {"error":{"message":"EngineCore encountered an issue. See stack trace for the root cause.",'
    b'"type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
)


#: How long a slow engine takes for one event, seconds: several times what the tests set as patience.
SLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a stream in place of its event number `at` (from 0)."""

    at: int
    kind: str
    #: Bytes of that event that still come (kind `half`), 0..1 of its length.
    share: float = 0.5


@dataclass
class Decodes:
    """Exchanges that generate, by request id."""

    open: dict[str, int] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)

    def begin(self, rid: str) -> None:
        self.open[rid] = self.open.get(rid, 0) + 1
        if self.open[rid] > 1:
            self.doubled.append(rid)

    def end(self, rid: str) -> None:
        self.open[rid] -= 1
        if not self.open[rid]:
            del self.open[rid]


class FaultyEngine:
    """Has what `FakeSupervisor` needs of a `FakeEngine`."""

    def __init__(
        self, path: Path, models: Sequence[str] = ("m",), *, config: EngineConfig = FAST, decodes: Decodes | None = None
    ) -> None:
        self.path = path
        self.models = list(models)
        self.max_model_len = config.max_model_len
        self.decodes = decodes or Decodes()
        #: One for each streamed request, in order; None = undisturbed. Empty: all undisturbed.
        self.faults: list[Fault | None] = []
        self.bodies: list[tuple[str, bytes]] = []
        #: Bytes of a stream's events are cut into pieces of this size; 0 = an event a piece.
        self.piece = 0
        #: So many of the next answers in one piece are cut in the middle.
        self.cut_bodies = 0
        #: Changes each event.
        self.rewrite: Callable[[bytes], bytes] = bytes
        self._stalled = asyncio.Event()
        self._resumed = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._exchanges = 0
        self._config = config
        self._server: EmulatedServer | None = None
        self._runner: web.ServerRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> FaultyEngine:
        inner = self.path.with_suffix(".inner")
        self._server = EmulatedServer(self._config, ServeOptions(models=tuple(self.models), uds=inner))
        await self._server.__aenter__()
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(inner), limit=0))
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        self.path.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self.path)).start()
        return self

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._server is not None:
            await self._server.__aexit__()
            self._server = None

    @property
    def running(self) -> int:
        assert self._server is not None
        return self._server.engine.running

    async def until_stalled(self) -> None:
        """Until a stream has come to a fault that waits."""
        async with asyncio.timeout(60):
            await self._stalled.wait()

    async def until_quiet(self) -> None:
        """Until no exchange is open."""
        async with asyncio.timeout(60):
            await self._quiet.wait()

    def resume(self) -> None:
        """Let a stream that pauses go on."""
        self._resumed.set()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        if request.method == "POST":
            self.bodies.append((request.path, body))
        assert self._session is not None
        rid = request.headers.get("X-Request-Id", "")
        generates = request.path.endswith("completions")
        self._exchanges += 1
        self._quiet.clear()
        if generates:
            self.decodes.begin(rid)
        try:
            sent = {"X-Request-Id": rid}
            url = f"http://engine{request.path}"
            async with self._session.request(request.method, url, data=body, headers=sent) as answer:
                if not answer.content_type.startswith("text/event-stream"):
                    whole = await answer.read()
                    if self.cut_bodies and generates:
                        self.cut_bodies -= 1
                        return await _cut(request, whole)
                    return web.Response(body=whole, status=answer.status, content_type=answer.content_type)
                return await self._stream(request, answer)
        finally:
            if generates:
                self.decodes.end(rid)
            self._exchanges -= 1
            if not self._exchanges:
                self._quiet.set()

    async def _stream(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        number = 0
        async for given in _events(answer):
            event = self.rewrite(given)
            if fault is not None and number == fault.at and fault.kind not in ("pause", "slow"):
                await self._break(request, response, fault, event)
                return response
            if fault is not None and number == fault.at:
                self._stalled.set()
                await (self._resumed.wait() if fault.kind == "pause" else asyncio.sleep(SLOW_S))
            size = self.piece or len(event)
            for start in range(0, len(event), size):
                await response.write(event[start : start + size])
            number += 1
        await response.write_eof()
        return response

    async def _break(self, request: web.BaseRequest, response: web.StreamResponse, fault: Fault, event: bytes) -> None:
        assert request.transport is not None
        match fault.kind:
            case "reset":
                request.transport.abort()
            case "half":
                await response.write(event[: int(len(event) * fault.share)])
                request.transport.abort()
            case "garbage":
                await response.write(b"data: {garbage\n\n")
                await asyncio.Event().wait()
            case "no answer":
                await response.write(b'data: {"choices": 7}\n\n')
                await asyncio.Event().wait()
            case "error":
                await response.write(ENGINE_DEAD)
                await response.write_eof()
            case "end":
                await response.write_eof()
            case "stall":
                self._stalled.set()
                await asyncio.Event().wait()
            case _:
                raise AssertionError(fault.kind)


async def _cut(request: web.BaseRequest, whole: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(whole)
    await response.prepare(request)
    await response.write(whole[: len(whole) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    splitter = EventSplitter()
    async for piece in answer.content.iter_any():
        for event in splitter.feed(piece):
            yield event
