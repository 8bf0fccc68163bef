"""A source of KV blocks in a process of its own, a puller here, and what they are compared with."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from benches.child import Child
from benches.kv_source import ASK, LABEL, NO_DIGEST, SECRET, make_pool
from kvmigrate import neighbour, transport
from kvmigrate.pool import BlockPool
from kvmigrate.pull_types import PullResult, Reason
from kvmigrate.puller import Puller

DEADLINE_S = 60.0


class Pair:
    """The source in its process, and a puller with a pool of its own here."""

    def __init__(
        self,
        source: Child,
        directory: Path,
        block_bytes: int,
        count: int,
        *,
        digests: bool = True,
        encrypt: bool = False,
    ) -> None:
        ports = source.ask(f"fill {block_bytes} {count} {int(digests)} {int(encrypt)}")
        self.count = count
        self.bytes = count * block_bytes
        self._address = f"127.0.0.1:{ports['port']}"
        self._block_bytes = block_bytes
        # A chain may fill half of a pool, and a quarter takes its memory ahead.
        self.pool: BlockPool = make_pool(directory / "target.kvpool", block_bytes, 4 * count + 8)
        self._pullers = [
            Puller(self.pool, SECRET, LABEL, name="bench", same_host=here, encrypt=encrypt) for here in (False, True)
        ]
        self._plain = socket.create_connection(("127.0.0.1", ports["plain"]))
        self._one = memoryview(bytearray(block_bytes))
        self._memory = memoryview(bytearray(self.bytes))

    async def pull(self, *, same_host: bool = False) -> float:
        """Bytes per second of a pull of all blocks into slots that were used before."""
        self.pool.clear()
        result = await self.ask(self.count, same_host=same_host)
        if (result.reason, result.blocks) != (Reason.COMPLETE, self.count):
            raise RuntimeError(f"the pull ended with {result}")
        return result.bytes / result.seconds

    def renew(self) -> None:
        """Replace the pool's file by a new one, whose memory is taken ahead as far as a node does."""
        header = self.pool.header
        for fingerprint in (header.fingerprint[::-1], header.fingerprint):
            self.pool.configure(fingerprint, self._block_bytes, 1)
        while self.pool.prepare(self.bytes):
            pass

    async def ask(self, count: int, *, first: int = 0, same_host: bool = False) -> PullResult:
        """Pull a chain of `count` chunks that begins with number `first`."""
        return await self._pullers[same_host].pull(self._address, range(first, first + count), DEADLINE_S)

    def plain(self, *, same_memory: bool = False) -> float:
        """Bytes per second of the minimal program."""
        started = time.perf_counter()
        self._plain.sendall(ASK.pack(self._block_bytes, self.count, same_memory))
        for number in range(self.count):
            start = number * self._block_bytes if same_memory else 0
            room = self._memory[start : start + self._block_bytes] if same_memory else self._one
            self._plain.recv_into(room, len(room), socket.MSG_WAITALL)
        return self.bytes / (time.perf_counter() - started)

    def memcpy(self) -> float:
        """Bytes per second of plain memmove through as much memory as the blocks take, in their sizes."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        stride, room = self._block_bytes, memoryview(self.pool._file.bytes)[self.pool.header.geometry.data_offset :]
        target = ctypes.addressof(ctypes.c_char.from_buffer(room))
        started = time.perf_counter()
        for number in range(self.count):
            ctypes.memmove(target + number * stride, source + number * stride, stride)
        return self.bytes / (time.perf_counter() - started)

    async def close(self) -> None:
        """Remove the pool."""
        self._plain.close()
        for puller in self._pullers:
            await puller.close()
        self.pool.close()


class NoDigest:
    """Stands for `RunningDigest` where a pull without digests is measured."""

    def update(self, piece: object) -> None:
        """Nothing."""

    def digest(self) -> bytes:
        """What the source stored."""
        return NO_DIGEST


@contextlib.contextmanager
def no_digests() -> Iterator[None]:
    """No product setting does this: a block without its digest is never taken."""
    kept = transport.RunningDigest
    for module in (transport, neighbour):
        vars(module)["RunningDigest"] = NoDigest
    try:
        yield
    finally:
        for module in (transport, neighbour):
            vars(module)["RunningDigest"] = kept
