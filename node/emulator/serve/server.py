"""Listening: the emulated engine behind a TCP port or a Unix socket, until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from node.emulator.config import EngineConfig
from node.emulator.engine import EmulatedEngine
from node.emulator.serve.app import Surface
from node.emulator.serve.driver import Driver
from node.emulator.serve.journal import Journal
from node.emulator.serve.kv_events import KvEvents
from node.emulator.serve.link import BLOCK_BYTES, EmulatedConnector


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve. Either `uds` or `host` and `port` (0 = any free one)."""

    models: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    uds: Path | None = None
    #: Virtual seconds per real second.
    speedup: float = 1.0
    #: The engine link of a node, to play the connector's part; and the bytes that stand for a block in its pool.
    link: Path | None = None
    block_bytes: int = BLOCK_BYTES
    #: Where KV events are published over ZMQ, and under which topic; None = nowhere.
    kv_events: str | None = None
    kv_events_topic: str = ""
    #: File in which to note who was computed when (`node.emulator.serve.journal`).
    journal: Path | None = None


class EmulatedServer:
    """Use as `async with`. One server, one engine."""

    def __init__(self, config: EngineConfig, options: ServeOptions) -> None:
        self._config = config
        self._options = options
        self.connector: EmulatedConnector | None = None
        self.engine: EmulatedEngine
        self.port = 0
        self._runner: web.AppRunner | None = None
        self.driver: Driver | None = None
        self._linking: asyncio.Task[None] | None = None
        self._journal: Journal | None = None
        self._kv_events: KvEvents | None = None

    async def __aenter__(self) -> EmulatedServer:
        options = self._options
        if options.link is not None:
            self.connector = EmulatedConnector(
                options.link, self._config, options.models[0], block_bytes=options.block_bytes
            )
        self.engine = EmulatedEngine(self._config, every_step=True, pool=self.connector)
        self.driver = Driver(self.engine, speedup=options.speedup)
        if self.connector is not None:
            self.connector.attach(self.driver)
            self._linking = asyncio.create_task(self.connector.run(), name="emulated-link")
        if options.kv_events is not None:
            self._kv_events = KvEvents(options.kv_events, self._config.block_size, topic=options.kv_events_topic)
            self.driver.watch(self._kv_events.on_action)
        if options.journal is not None:
            self._journal = Journal(options.journal)
        surface = Surface(
            self.driver, options.models, connector=self.connector, journal=self._journal, kv_events=self._kv_events
        )
        self._runner = web.AppRunner(surface.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await self._listen(self._runner)
        return self

    async def _listen(self, runner: web.AppRunner) -> None:
        options = self._options
        if options.uds is not None:
            options.uds.unlink(missing_ok=True)
            await web.UnixSite(runner, str(options.uds)).start()
            return
        await web.TCPSite(runner, options.host, options.port).start()
        self.port = int(runner.addresses[0][1])

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self.driver is not None:
            self.driver.close()
        if self._linking is not None:
            self._linking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._linking
        if self.connector is not None:
            self.connector.close()
        if self._journal is not None:
            self._journal.close()
        if self._kv_events is not None:
            self._kv_events.close()
        if self._options.uds is not None:
            self._options.uds.unlink(missing_ok=True)
