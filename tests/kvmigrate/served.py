"""What tests of the transfer share: bounds, who is where, and what a pool must hold afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from kvmigrate.pool import BlockPool
from kvmigrate.puller import PullLimits
from kvmigrate.server import TransferServer

from .helpers import BLOCK, block_hash, chain, content

#: Bounds of the tests' pulls: shorter than those of the bad sources' patience, and windows of four blocks.
LIMITS = PullLimits(stall_s=1.0, connect_s=3.0, lookup_s=3.0, window_bytes=4 * BLOCK)


def resolve(chunks: Sequence[int]) -> list[bytes]:
    return [block_hash(chunk) for chunk in chunks]


def at(server: TransferServer) -> str:
    return f"127.0.0.1:{server.port}"


def holds(pool: BlockPool, n: int) -> None:
    """The pool has exactly the first n blocks of the chain, with the right bytes."""
    assert len(pool.lookup(chain(40), use=False)) == n
    assert pool.check_slots(range(pool.header.geometry.slots)) == 0
    for h in chain(n):
        lease = pool.lease(h, 0, 1e9)
        assert lease is not None
        found = pool.leased(lease)
        assert found is not None and bytes(found[1]) == content(h)
        pool.release(lease)
