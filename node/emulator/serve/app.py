"""The HTTP surface of the emulated engine: the paths of vLLM's server that a router or a client uses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from node import __version__
from node.emulator.config import EngineConfig
from node.emulator.serve import frames
from node.emulator.serve.asks import ApiError, Ask, check_length, checked_model, json_object, read
from node.emulator.serve.chat import BadChat, render
from node.emulator.serve.driver import Driver
from node.emulator.serve.figures import Figures
from node.emulator.serve.frames import Frames
from node.emulator.serve.generation import Generation
from node.emulator.serve.journal import Journal
from node.emulator.serve.kv_events import KvEvents
from node.emulator.serve.link import EmulatedConnector
from node.emulator.serve.script import write
from node.emulator.tokens import Tokenizer

MAX_BODY_BYTES = 64 << 20
#: Longest client's request id that becomes part of an answer's id.
MAX_ID = 128

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Surface:
    """Handlers over one driver. `models`: the names it answers to, the first one is shown as the model."""

    def __init__(
        self,
        driver: Driver,
        models: tuple[str, ...],
        *,
        connector: EmulatedConnector | None = None,
        journal: Journal | None = None,
        kv_events: KvEvents | None = None,
    ) -> None:
        self.driver = driver
        self._kv_events = kv_events
        self._journal = journal
        self._connector = connector
        self.models = models
        self.figures = Figures(driver.engine, models[0])
        self._tokenizer = Tokenizer()
        self._numbers = itertools.count(1)
        self._created = int(time.time())

    @property
    def config(self) -> EngineConfig:
        """What the engine is like."""
        return self.driver.engine.config

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._reset)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body = await request.read()
        ask = read(body, chat=chat, config=self.config, models=self.models, tokenizer=self._tokenizer)
        number = next(self._numbers)
        name = request.headers.get("X-Request-Id", f"{number:032x}")[:MAX_ID]
        scripts = [
            write(ask, prompt, choice, max_model_len=self.config.max_model_len, tokenizer=self._tokenizer)
            for prompt in ask.prompts
            for choice in range(ask.choices)
        ]
        # The node's id opens the job's: the connector finds it there.
        job = f"{ask.rid}\0{name}-{number}"
        if ask.hold_s and self._connector is not None:
            await self._connector.pulled(ask.rid, ask.hold_s)
        made = Frames(ask, f"{'chatcmpl' if chat else 'cmpl'}-{name}", int(time.time()))
        async with Generation(
            ask,
            scripts,
            driver=self.driver,
            figures=self.figures,
            name=job,
            connector=self._connector,
            journal=self._journal,
            kv_events=self._kv_events,
            client_id=name,
        ) as generation:
            if ask.stream:
                return await self._stream(request, ask, generation, made)
            async for _ in generation.pieces():
                pass
            return web.Response(body=made.body(scripts, generation.usage), content_type="application/json")

    async def _stream(self, request: web.Request, ask: Ask, generation: Generation, made: Frames) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        opened: set[int] = set()
        async for index, start, stop in generation.pieces():
            if not opened:
                await response.prepare(request)  # vLLM too sends nothing before it has something to say
            data = made.opening(index) if ask.chat and index not in opened else b""
            opened.add(index)
            await response.write(data + made.tokens(index, generation.scripts[index], start, stop))
        if ask.include_usage:
            await response.write(made.usage(generation.usage))
        await response.write(frames.DONE)
        await response.write_eof()
        return response

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = json_object(await request.read())
        checked_model(fields, self.models)
        prompt = fields.get("prompt")
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else render(fields, self._tokenizer)
        check_length(len(tokens), None, 1 << 31)
        strings = [self._tokenizer.piece(token) for token in tokens] if fields.get("return_token_strs") else None
        answer = {"count": len(tokens), "max_model_len": self.config.max_model_len, "tokens": tokens}
        return _json({**answer, "token_strs": strings})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = json_object(await request.read()).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ApiError(400, "tokens must be a list of token ids", param="tokens")
        return _json({"prompt": self._tokenizer.decode(tokens)})

    async def _models(self, _: web.Request) -> web.Response:
        cards = [
            {
                "id": model,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self.models[0],
                "parent": None,
                "max_model_len": self.config.max_model_len,
            }
            for model in self.models
        ]
        return _json({"object": "list", "data": cards})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": f"emulated-{__version__}"})

    async def _metrics(self, _: web.Request) -> web.Response:
        page = self.figures.page().encode()
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _reset(self, _: web.Request) -> web.Response:
        cache = self.driver.engine.cache
        cache.clear()
        if self._kv_events is not None:
            self._kv_events.removed(cache.take_evicted())
        return web.Response()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ApiError, BadChat) as failure:
        error = failure if isinstance(failure, ApiError) else ApiError(400, str(failure), param="messages")
        return web.Response(body=error.body(), status=error.status, content_type="application/json")
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        detail = orjson.dumps({"detail": error.reason})
        return web.Response(body=detail, status=error.status, content_type="application/json")


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
