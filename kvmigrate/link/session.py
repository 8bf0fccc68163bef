"""One engine process on the node's side of the link: its connection, and what it is owed.

A session never waits for its engine. What cannot be sent at once is buffered up to a limit; beyond it the connection
is cut, and the engine gets everything anew when it comes back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvmigrate.layout import FileHeader
from kvmigrate.pool_types import Block, Cleared, Committed, Evicted, PoolEvent, Slot

from . import messages as m
from .codec import encode

#: Bytes that an engine may leave unread. A mirror of a million blocks fits.
MAX_BUFFERED: Final = 96 << 20
#: Items of one Add or Drop: about 0.3 MiB.
MAX_BATCH: Final = 4096
#: Requests whose blocks were counted as used; forgetting one only counts a use twice.
MAX_REQUESTS: Final = 4096


class Session:
    """A connected half of a connector."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.hello: m.Hello | None = None
        self.told = False  # whether it has been sent the pool, and gets the changes
        self.instance = 0  # of the pool file that it was told of
        self.want = 0  # slots that a worker should have in stock
        self._counted: OrderedDict[str, int] = OrderedDict()
        self._out = writer
        writer.transport.set_write_buffer_limits(high=0)  # so that drain() waits for the last byte

    @property
    def name(self) -> str:
        """Who it is in the pool's books: a writer of granted slots."""
        return f"engine {self.number}"

    @property
    def role(self) -> m.Role | None:
        """Which half it is, None before its hello."""
        return self.hello.role if self.hello is not None else None

    def send(self, message: m.ToEngine) -> None:
        """Write a message now, as far as the socket takes it."""
        if self._out.transport.get_write_buffer_size() > MAX_BUFFERED:
            self.abort()
        if not self._out.transport.is_closing():
            self._out.write(encode(message))

    def send_pool(self, path: str, header: FileHeader, why: str = "") -> None:
        """Say where the pool is; an empty path says that there is none, and why."""
        g = header.geometry
        self.instance = header.instance
        self.send(m.Pool(path, header.instance, header.epoch, g.block_bytes, g.slots, g.ranks, why))

    def send_grant(self, slots: Sequence[Slot]) -> None:
        """Hand slots to a worker."""
        if slots:
            self.send(m.Grant(tuple(m.SlotGrant(slot.index, slot.generation) for slot in slots)))

    def send_blocks(self, blocks: Sequence[Block]) -> None:
        """Add blocks to a scheduler's mirror."""
        for start in range(0, len(blocks), MAX_BATCH):
            items = (m.AddItem(b.block_hash, b.rank, b.index, b.generation) for b in blocks[start : start + MAX_BATCH])
            self.send(m.Add(tuple(items)))

    def send_changes(self, events: Iterable[PoolEvent]) -> None:
        """Apply the pool's changes to a scheduler's mirror, in their order, in as few messages as that allows."""
        added: list[Block] = []
        dropped: list[bytes] = []
        for event in events:
            match event:
                case Committed():
                    self._send_drops(dropped)
                    added += event.blocks
                case Evicted():
                    self.send_blocks(added)
                    added = []
                    dropped.append(event.block_hash)
                case Cleared():
                    added, dropped = [], []
                    self.send(m.Clear(event.epoch))
        self.send_blocks(added)
        self._send_drops(dropped)

    def newly_filled(self, message: m.Filled) -> tuple[bytes, ...]:
        """Return the blocks of a request that were not counted as used yet: it reports its list more than once."""
        counted = self._counted.pop(message.rid, 0)
        self._counted[message.rid] = max(counted, len(message.hashes))
        if len(self._counted) > MAX_REQUESTS:
            self._counted.popitem(last=False)
        return message.hashes[counted:]

    def forget_request(self, rid: str) -> None:
        """A request is over."""
        self._counted.pop(rid, None)

    async def drain(self) -> None:
        """Wait until everything is with the kernel; raises ConnectionError when the engine is gone."""
        await self._out.drain()

    def abort(self) -> None:
        """Cut the connection; its reader ends."""
        self._out.transport.abort()

    def _send_drops(self, hashes: list[bytes]) -> None:
        for start in range(0, len(hashes), MAX_BATCH):
            self.send(m.Drop(tuple(hashes[start : start + MAX_BATCH])))
        hashes.clear()
