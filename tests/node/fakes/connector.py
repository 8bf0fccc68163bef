"""Both halves of the connector inside a fake engine: what the real one would report, when the test says so."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvmigrate.digest import block_digest
from kvmigrate.link import FrameSplitter, Hello, Message, Role, encode
from kvmigrate.link import messages as m
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Slot

BLOCK_BYTES = 4096
BLOCK_TOKENS = 16
FINGERPRINT = b"f" * 16


class FakeConnector:
    """One scheduler half and one worker half, connected to a node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writers: dict[Role, asyncio.StreamWriter] = {}
        self._readers: list[asyncio.Task[None]] = []
        self.got: list[tuple[Role, Message]] = []
        self._changed = asyncio.Condition()

    async def connect(
        self, fingerprint: bytes = FINGERPRINT, fields: Mapping[str, str | int] | None = None, *, holds: bool = False
    ) -> None:
        for role in (Role.WORKER, Role.SCHEDULER):
            await self._meet(role, fingerprint, fields, holds=holds)
            await self.until(role, m.Pool)

    async def meet(self, fingerprint: bytes, fields: Mapping[str, str | int]) -> None:
        """Say hello, and wait for no pool."""
        for role in (Role.WORKER, Role.SCHEDULER):
            await self._meet(role, fingerprint, fields)

    async def _meet(
        self, role: Role, fingerprint: bytes, fields: Mapping[str, str | int] | None, *, holds: bool = False
    ) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        self._writers[role] = writer
        self._readers.append(asyncio.create_task(self._read(role, reader)))
        hello = Hello(role, 0, 1, 1, fingerprint, BLOCK_BYTES, BLOCK_TOKENS, fields=fields or {}, holds=holds)
        self.send(hello, role)

    def send(self, message: Message, role: Role = Role.SCHEDULER) -> None:
        self._writers[role].write(encode(message))

    async def until(self, role: Role, kind: type[Message]) -> None:
        await self.until_got(lambda r, g: r is role and isinstance(g, kind))

    async def until_got(self, wanted: Callable[[Role, Message], bool]) -> None:
        async with self._changed, asyncio.timeout(60):
            await self._changed.wait_for(lambda: any(wanted(*got) for got in self.got))

    def write_granted(self, pool: BlockPool, block_hash: bytes) -> m.StoredItem:
        """Compute a block into the first slot that the worker half was granted; nobody is told of it yet."""
        grant = next(got.slots[0] for role, got in self.got if role is Role.WORKER and isinstance(got, m.Grant))
        room = pool.writable(Slot(grant.slot, grant.generation))
        assert room is not None
        data = _data(block_hash)
        room[:BLOCK_BYTES] = data
        room.release()
        return m.StoredItem(grant.slot, grant.generation, block_hash, 0, BLOCK_BYTES, block_digest(data))

    async def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._writers.clear()

    async def _read(self, role: Role, reader: asyncio.StreamReader) -> None:
        splitter = FrameSplitter()
        while data := await reader.read(65536):
            async with self._changed:
                self.got += [(role, message) for message in splitter.feed(data)]
                self._changed.notify_all()


def hashes_of(text: bytes, count: int) -> tuple[bytes, ...]:
    """Chained block hashes of a prompt, as an engine would have them."""
    chain: list[bytes] = []
    last = b""
    size = max(1, len(text) // count)
    for index in range(count):
        last = hashlib.sha256(last + text[index * size : (index + 1) * size]).digest()
        chain.append(last)
    return tuple(chain)


def store(pool: BlockPool, hashes: Sequence[bytes]) -> None:
    """Put blocks into a pool, as a worker does with what it computed."""
    for block_hash in hashes:
        (slot,) = pool.grant(1)
        room = pool.writable(slot)
        assert room is not None
        data = _data(block_hash)
        room[:BLOCK_BYTES] = data
        room.release()
        assert pool.commit(slot, block_hash, 0, BLOCK_BYTES, block_digest(data))


def _data(block_hash: bytes) -> bytes:
    return (block_hash * (BLOCK_BYTES // len(block_hash)))[:BLOCK_BYTES]
