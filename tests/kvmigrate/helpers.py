"""What the tests of kvmigrate share: a clock, block contents, filled pools, a served pool."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from kvmigrate.digest import block_digest
from kvmigrate.pool import BlockPool

FINGERPRINT = bytes(range(16))
OTHER_FINGERPRINT = bytes(range(1, 17))
BLOCK = 8192
SECRET = b"the cluster key"


class Clock:
    """Monotonic seconds that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def block_hash(n: int, chain: str = "a") -> bytes:
    return hashlib.sha256(f"{chain}:{n}".encode()).digest()


def chain(n: int, name: str = "a") -> list[bytes]:
    return [block_hash(i, name) for i in range(n)]


def content(hash_: bytes, rank: int = 0, size: int = BLOCK) -> bytes:
    """The bytes that belong to a block: a reader can tell from them which block it got."""
    return random.Random(hash_ + bytes([rank])).randbytes(size)


def make_pool(
    path: Path, blocks: int = 32, *, block: int = BLOCK, ranks: int = 1, clock: Clock | None = None
) -> BlockPool:
    pool = BlockPool(path / "test.kvpool", 3 * 4096 + blocks * ranks * (block + 64), clock or Clock())
    pool.configure(FINGERPRINT, block, ranks)
    return pool


def store(pool: BlockPool, hashes: Sequence[bytes], ranks: int = 1, writer: str = "node") -> int:
    """Write blocks as a worker does; returns how many could be stored."""
    stored = 0
    for h in hashes:
        for rank in range(ranks):
            granted = pool.grant(1, writer)
            if not granted:
                return stored
            data = content(h, rank, pool.header.geometry.block_bytes)
            view = pool.writable(granted[0])
            assert view is not None
            view[:] = data
            stored += pool.commit(granted[0], h, rank, len(data), block_digest(data))
    return stored


def flip(pool: BlockPool, hash_: bytes, rank: int = 0) -> None:
    """Flip one bit of a stored block behind the pool's back."""
    block = pool.lookup([hash_], rank, use=False)[0]
    offset = pool.header.geometry.slot_offset(block.index) + block.nbytes // 2
    with pool.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
