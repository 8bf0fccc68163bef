"""The source of `benches.kv`, a process of its own: a pool that is served, and the minimal TCP program beside it.

Commands, one a line: `fill BLOCK_BYTES COUNT DIGESTS ENCRYPT`, `pace BYTES_S`, `cpu`, `watch` and `loop` (how late the
event loop was since then).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from kvmigrate.digest import DIGEST_BYTES, block_digest
from kvmigrate.pool import BlockPool
from kvmigrate.server import TransferServer

FINGERPRINT = b"bench fingerprin"
SECRET = b"the key of the bench"
LABEL = "bench"
#: What a puller asks the minimal program for: bytes of a message, messages, whether each comes from other memory.
ASK = struct.Struct("!QQ?")
#: A quarter of what a node has unless told otherwise: of a small pool a peer may pin little at a time.
LEAST_POOL = 512 << 20
NO_DIGEST = bytes(DIGEST_BYTES)
#: How often the event loop is looked at, seconds.
TICK_S = 0.001
IDLE_TICK_S = 0.05
SO_MAX_PACING_RATE = 47  # Linux; `socket` does not name it


@functools.cache
def _hash(chunk: int) -> bytes:
    return hashlib.sha256(b"%d" % chunk).digest()


def hashes(chunks: Sequence[int]) -> list[bytes]:
    """One block for each chunk, out of a table as in a node."""
    return [_hash(chunk) for chunk in chunks]


def make_pool(path: Path, block_bytes: int, blocks: int) -> BlockPool:
    """A pool for `blocks` blocks."""
    pool = BlockPool(path, 3 * 4096 + blocks * (block_bytes + 4096 + 64))
    pool.configure(FINGERPRINT, block_bytes, 1)
    return pool


def fill(pool: BlockPool, block_bytes: int, count: int, *, digests: bool) -> None:
    """Store blocks 0 to count - 1. Without digests they are stored under one that says nothing."""
    pattern = bytes(range(256)) * (block_bytes // 256)
    for number, block_hash in enumerate(hashes(range(count))):
        (slot,) = pool.grant(1)
        room = pool.writable(slot)
        assert room is not None
        room[:] = pattern
        room[:8] = number.to_bytes(8, "little")
        pool.commit(slot, block_hash, 0, block_bytes, block_digest(room) if digests else NO_DIGEST)


class Source:
    """What the commands work on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool: BlockPool | None = None
        self._server: TransferServer | None = None
        self._memory = memoryview(b"")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._late: list[tuple[float, float]] = []  # seconds late, and of them those in which it had a core
        self._watched = False
        threading.Thread(target=self._serve_plain, daemon=True).start()

    async def tick(self) -> None:
        """Note how late the loop is while it is watched: a timer costs CPU time that is not the transfer's."""
        while True:
            watched = self._watched
            due, waited = time.perf_counter() + TICK_S, _waited_for_a_core()
            await asyncio.sleep(TICK_S if watched else IDLE_TICK_S)
            if watched:
                late = time.perf_counter() - due
                self._late.append((late, max(0.0, late - (_waited_for_a_core() - waited))))

    def command(self, words: Sequence[str]) -> object:
        """Obey one line."""
        match words:
            case ["fill", block_bytes, count, digests, encrypt]:
                return self._fill(int(block_bytes), int(count), digests=digests == "1", encrypt=encrypt == "1")
            case ["pace", rate]:
                return self._pace(int(rate))
            case ["cpu"]:
                return time.process_time()
            case ["watch"]:
                self._watched = True
                time.sleep(2 * IDLE_TICK_S)  # until it looks
                return None
            case ["loop"]:
                self._watched = False
                late, self._late = sorted(self._late) or [(0.0, 0.0)], []
                return {"max": late[-1][0], "p99": late[int(len(late) * 0.99)][0], "own": max(own for _, own in late)}
            case _:
                raise ValueError(words)

    def close(self) -> None:
        """Remove what was made."""
        if self._server is not None:
            self._server.close()
        if self._pool is not None:
            self._pool.close()

    def _fill(self, block_bytes: int, count: int, *, digests: bool, encrypt: bool) -> dict[str, int]:
        self.close()
        slots = max(count + 8, LEAST_POOL // (block_bytes + 4096))  # a peer may hold only a part of a pool
        self._pool = make_pool(self._directory / "source.kvpool", block_bytes, slots)
        fill(self._pool, block_bytes, count, digests=digests)
        first = self._pool.lookup(hashes([0]), use=False)[0]
        lease = self._pool.lease(first.block_hash, 0, time.monotonic() + 1)
        assert lease is not None
        self._memory = self._pool._file.bytes[self._pool.header.geometry.data_offset :]
        self._pool.release(lease)
        self._server = TransferServer(self._pool, hashes, SECRET, LABEL, encrypt=encrypt)
        self._server.start()
        return {"port": self._server.port, "plain": int(self._listener.getsockname()[1])}

    def _pace(self, rate: int) -> None:
        """Have the kernel send no faster than so many bytes per second, on each connection."""
        assert self._server is not None and self._server._listener is not None
        self._server._listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)  # new ones inherit it
        for transport in list(self._server._open):
            transport.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)

    def _serve_plain(self) -> None:
        """The minimal program: sendall."""
        while True:
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock:
                while asked := sock.recv(ASK.size, socket.MSG_WAITALL):
                    size, count, other = ASK.unpack(asked)
                    stride = -(-size // 4096) * 4096
                    for number in range(count):
                        start = number * stride if other else 0
                        sock.sendall(self._memory[start : start + size])


def _waited_for_a_core() -> float:
    """Seconds that this thread was ready to run and did not, since it began; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


async def main(directory: Path) -> None:
    """Obey until the input ends."""
    source = Source(directory)
    ticking = asyncio.create_task(source.tick())
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await asyncio.to_thread(source.command, line.split())
            print(json.dumps(answer), flush=True)
    finally:
        ticking.cancel()
        source.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
