"""The worker's access to the pool: the link for grants and reports, shared memory for the bytes.

The engine's main thread owns the link and the writing side; the load thread only calls `read`. Each has a map of its
own, and a new map replaces the old one whenever the node says that the pool changed, so neither sees the other's.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from kvmigrate.connector.metadata import SlotRef
from kvmigrate.errors import KvError
from kvmigrate.link import (
    Clear,
    Corrupt,
    Disconnected,
    Failed,
    Grant,
    LinkClient,
    Loaded,
    Message,
    Pool,
    SlotGrant,
    Stored,
    StoredItem,
    Want,
)
from kvmigrate.reader import PoolReader, ReadFault

logger = logging.getLogger("vllm.grapevine")

STOCK_STEPS = 2
"""Steps full of prompt tokens whose blocks find a slot before the node has granted more."""


def stock_for(step_tokens: int, block_size: int) -> int:
    """Slots that an engine of so many tokens a step should have at hand."""
    return STOCK_STEPS * -(-step_tokens // block_size)


class PoolSlots:
    """Implements `worker.SlotAccess` over a link and a pool file.

    `stock`: granted slots that should be at hand. A step that completes more blocks than there are saves the first ones
    only, and what comes behind a missing block is of no use to anybody.
    """

    def __init__(self, link: LinkClient, rank: int, block_bytes: int, *, stock: int = 0, pinned: bool = False) -> None:
        self._link = link
        # CUDA pins only memory that may be written. Nobody writes through what `read` shows.
        self._pinned = pinned
        self._rank = rank
        self._block_bytes = block_bytes
        self._stock = stock
        self._writer: PoolReader | None = None
        self._reader: PoolReader | None = None
        self._grants: deque[SlotGrant] = deque()
        self._short = 0

    def poll(self) -> None:
        """Take what the node has sent. Call it once a step, before loads and saves."""
        for message in self._link.poll():
            self._handle(message)
        if self._short:
            self._link.send(Want(self._stock + self._short))
            self._short = 0

    def begin_write(self) -> tuple[SlotGrant, memoryview] | None:
        """Take a granted slot and its writable bytes, or None when the node has granted none."""
        while self._grants and self._writer is not None:
            grant = self._grants.popleft()
            view = self._writer.writable(grant.slot, grant.generation)
            if view is not None:
                return grant, view
        self._short += 1
        return None

    def stored(self, items: Sequence[tuple[SlotGrant, bytes, bytes]]) -> None:
        """Hand written slots to the node. It drops those that are no longer ours."""
        self._link.send(
            Stored(
                tuple(
                    StoredItem(grant.slot, grant.generation, block_hash, self._rank, self._block_bytes, digest)
                    for grant, block_hash, digest in items
                )
            )
        )

    def unused(self, grants: Sequence[SlotGrant]) -> None:
        """Give slots back that nothing came of."""
        self._link.send(Failed(tuple(grant.slot for grant in grants)))

    def read(self, ref: SlotRef, block_hash: bytes, copy: Callable[[memoryview], None]) -> ReadFault | None:
        """Copy a block out of the pool (load thread)."""
        reader = self._reader
        if reader is None:
            return ReadFault.GONE
        return reader.read(ref.slot, ref.generation, block_hash, ref.rank, copy)

    def loaded(self, rid: str, blocks: int, seconds: float) -> None:
        """Report a finished load."""
        self._link.send(Loaded(rid, blocks, blocks * self._block_bytes, seconds))

    def corrupt(self, slots: Sequence[int]) -> None:
        """Report slots whose bytes do not match their digest."""
        logger.warning("KV blocks in pool slots %s are corrupt; they are recomputed", list(slots))
        self._link.send(Corrupt(tuple(slots)))

    def close(self) -> None:
        """Close the link; the maps go with their last user."""
        self._link.close()
        self._forget()

    def _handle(self, message: Message | Disconnected) -> None:
        match message:
            case Pool():
                self._open(message)
            case Grant():
                self._grants.extend(message.slots)
            case Clear():
                self._grants.clear()
                self._refresh()
            case Disconnected():
                logger.warning("no link to the node (%s); serving without the KV pool until it is back", message.why)
                self._forget()
            case _:
                pass

    def _open(self, pool: Pool) -> None:
        self._forget()
        if not pool.path:
            logger.warning("the node has no KV pool: %s", pool.why)
            return
        try:
            self._writer = PoolReader(pool.path, writable=True)
            self._reader = PoolReader(pool.path, writable=self._pinned)
        except KvError as error:
            logger.warning("cannot use the node's KV pool: %s", error)
            self._forget()
        else:
            self._link.send(Want(self._stock))

    def _refresh(self) -> None:
        if self._writer is not None:
            path = self._writer.path
            try:
                self._writer.refresh()
                self._reader = PoolReader(path, writable=self._pinned)
                self._link.send(Want(self._stock))
            except KvError as error:
                logger.warning("cannot use the node's KV pool any more: %s", error)
                self._forget()

    def _forget(self) -> None:
        # Dropped, not closed: the load thread may be inside one of them.
        self._grants.clear()
        self._writer = None
        self._reader = None
