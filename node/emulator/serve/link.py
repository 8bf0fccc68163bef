"""The connector's part at the engine link, with the real connector's own link, mirror and slots.

The bytes of an emulated block are a function of its hash, so whoever loads a block can tell whether it is the right
one: `wrong` counts blocks whose bytes were others', and must stay 0.

Rules (kvmigrate.connector has them in full):
1. What is sent may be lost and what is held may be gone: both cost time only.
2. Completed blocks that the pool does not hold are stored into granted slots, those found in the cache too.
3. Of several sequences under one request id only the first one reports.
4. A request whose blocks are being pulled waits for them, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

from kvmigrate.connector.holds import Holds
from kvmigrate.connector.mirror import PoolMirror
from kvmigrate.connector.reports import LinkReports, PoolFeed
from kvmigrate.connector.slots import PoolSlots, stock_for
from kvmigrate.digest import block_digest
from kvmigrate.layout import HASH_BYTES
from kvmigrate.link import Hello, LinkClient, Role, SlotGrant
from node.emulator.config import EngineConfig
from node.emulator.job import Action, Done, Evicted, Job, Preempted, Started, Stored, Tokens
from node.emulator.serve.driver import Driver

#: Bytes that stand for a block in the pool. The real ones would be block_size * kv_token_bytes.
BLOCK_BYTES = 4096
#: Seconds between looks at the link: a real engine looks once a step.
POLL_S = 0.02


class EmulatedConnector:
    """Both halves. It is the engine's pool (`node.emulator.engine.Pool`) and hears of the engine's actions."""

    def __init__(self, path: Path, config: EngineConfig, model: str, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._config = config
        self._model = model
        self._block_bytes = block_bytes
        self._mirror = PoolMirror(1)
        self._saving: set[bytes] = set()
        self._scheduler = LinkClient(path, lambda: self._hello(Role.SCHEDULER))
        self._worker = LinkClient(path, lambda: self._hello(Role.WORKER))
        self._reports = LinkReports(self._scheduler, time.monotonic)
        self._holds = Holds(time.monotonic)
        self._looked = asyncio.Event()
        self._feed = PoolFeed(
            self._scheduler, self._mirror, on_saved=self._saved, on_lost=self._lost, on_pulled=self._holds.over
        )
        stock = stock_for(config.step_tokens, config.block_size)
        self._slots = PoolSlots(self._worker, 0, block_bytes, stock=stock)
        self._jobs: dict[str, Job] = {}
        self._started: dict[str, float] = {}
        self._driver: Driver | None = None
        self.loaded = 0
        self.wrong = 0

    @property
    def held(self) -> int:
        """Blocks in the node's pool, as far as we know."""
        return len(self._mirror)

    def attach(self, driver: Driver) -> None:
        """Hear of this driver's engine."""
        self._driver = driver
        driver.watch(self._on_action)

    async def run(self) -> None:
        """Keep the link alive for ever."""
        while True:
            self.poll()
            await asyncio.sleep(POLL_S)

    def poll(self) -> None:
        """Take what the node has sent, and tell it the load."""
        self._slots.poll()
        self._feed.poll()
        self._looked.set()
        if self._driver is not None:
            engine = self._driver.engine
            self._reports.load(engine.running, engine.waiting, engine.cache.use)

    def close(self) -> None:
        """Hang up."""
        self._slots.close()
        self._scheduler.close()

    async def pulled(self, rid: str, hold_s: float) -> None:
        """Wait until the node has pulled a request's blocks, as long as it says; others are computed meanwhile."""
        self._holds.begin(rid, rid, hold_s)
        try:
            while self._holds.waits(rid):
                self._looked.clear()
                await self._looked.wait()
        finally:
            self._holds.end(rid)

    # --- the engine's pool

    def find(self, job: Job, start: int, stop: int) -> int:
        """Blocks of this job that the node's pool holds from `start` on."""
        self.poll()
        return self._mirror.prefix(_hashes(job.keys), start, stop)

    def load(self, job: Job, start: int, count: int) -> int:
        """Read and check them; the first that fails ends it."""
        began = time.monotonic()
        for index, block_hash in enumerate(_hashes(job.keys)[start : start + count]):
            if not self._read(block_hash):
                count = index
                break
        self.loaded += count
        if count:
            self._slots.loaded(_rid(job.rid), count, time.monotonic() - began)
        return count

    def _read(self, block_hash: bytes) -> bool:
        refs = self._mirror.slots(block_hash)
        right = False

        def compare(data: memoryview) -> None:
            nonlocal right
            right = data == block_bytes(block_hash, self._block_bytes)

        if not refs or self._slots.read(refs[0], block_hash, compare) is not None:
            return False
        self.wrong += not right
        return right

    # --- what the engine does

    def begin(self, job: Job) -> None:
        """A sequence is about to be submitted: reports need its keys."""
        self._jobs[job.rid] = job

    def _on_action(self, action: Action) -> None:
        if isinstance(action, Evicted):
            return
        job = self._jobs.get(action.rid)
        if job is None:
            return
        rid = _rid(action.rid) if action.rid.endswith("-0") else ""
        match action:
            case Started():
                self._started[action.rid] = action.at
                if rid:
                    self._reports.started(rid, job.prompt_tokens, action.cached_tokens, action.external_tokens)
                self._store(job.keys[: action.cached_tokens // self._config.block_size])
            case Stored():
                self._store(action.keys)
            case Tokens(first=True) if rid:
                self._reports.prefilled(rid, self._real_s(action.at - self._started.get(action.rid, action.at)))
                self._filled(rid, job, job.prompt_tokens)
            case Done():
                if rid:
                    self._filled(rid, job, job.prompt_tokens + job.output_tokens)
                self.end(action.rid)
            case Tokens() | Preempted():
                pass

    def end(self, name: str) -> None:
        """A sequence is over, also when it was aborted."""
        self._started.pop(name, None)
        if self._jobs.pop(name, None) is not None and name.endswith("-0") and _rid(name):
            self._reports.finished(_rid(name))

    def _real_s(self, virtual_s: float) -> float:
        """The node measures in real time."""
        return virtual_s / self._driver.speedup if self._driver is not None else virtual_s

    def _filled(self, rid: str, job: Job, tokens: int) -> None:
        full = min(tokens // self._config.block_size, len(job.keys))
        if full:
            self._reports.filled(rid, _hashes(job.keys)[:full], full * self._config.block_size)

    def _store(self, keys: Sequence[Hashable]) -> None:
        items: list[tuple[SlotGrant, bytes, bytes]] = []
        self._slots.poll()
        for block_hash in _hashes(keys):
            if block_hash in self._mirror or block_hash in self._saving:
                continue
            place = self._slots.begin_write()
            if place is None:
                break  # later blocks are of no use without this one
            grant, room = place
            data = block_bytes(block_hash, self._block_bytes)
            room[: self._block_bytes] = data
            room.release()
            self._saving.add(block_hash)
            items.append((grant, block_hash, block_digest(data)))
        if items:
            self._slots.stored(items)

    def _saved(self, hashes: list[bytes]) -> None:
        self._saving.difference_update(hashes)

    def _lost(self) -> None:
        self._mirror.clear()
        self._holds.clear()
        self._saving.clear()

    def _hello(self, role: Role) -> Hello:
        config = self._config
        told = f"emulated {self._model} {config.name} {config.block_size} {self._block_bytes}"
        fingerprint = hashlib.sha256(told.encode()).digest()[:16]
        holds = role is Role.SCHEDULER
        return Hello(role, 0, 1, os.getpid(), fingerprint, self._block_bytes, config.block_size, holds=holds)


def block_bytes(block_hash: bytes, size: int) -> bytes:
    """The bytes that stand for the KV of a block."""
    return (block_hash * (size // HASH_BYTES + 1))[:size]


def _hashes(keys: Sequence[Hashable]) -> list[bytes]:
    return [key for key in keys if isinstance(key, bytes)]


def _rid(name: str) -> str:
    """The node's id in the name of a sequence."""
    return name.partition("\0")[0]
