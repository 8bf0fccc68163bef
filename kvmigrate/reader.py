"""A process's window on a pool file that another process owns (used inside the engine).

Reading is optimistic: no lock, no lease. `find` checks the header and the digest, the caller copies the bytes, and
`unchanged` says afterwards whether they were still that block's. `read` does all three. Any "no" means: recompute.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from . import layout
from .digest import block_digest
from .errors import LocalError, RemoteError
from .layout import FileHeader, SlotHeader


class ReadFault(Enum):
    """Why a block could not be read."""

    GONE = "gone"  #: evicted, overwritten or never there: normal
    CORRUPT = "corrupt"  #: the header still describes the block, and its bytes are others: report it


class PoolReader:
    """Map a pool file. Raises LocalError when it cannot be opened, RemoteError when it is no pool file of ours.

    `writable=True` maps it for writing granted slots too. One instance is used by one thread at a time.
    """

    def __init__(self, path: Path | str, *, writable: bool = False) -> None:
        self.path = Path(path)
        self._can_write = writable
        self._map = _map(self.path, writable)
        self._bytes = memoryview(self._map)
        try:
            self.file = layout.unpack_file_header(self._bytes)
            if self.file.capacity > len(self._bytes):
                raise RemoteError("KV pool file is shorter than its header says")
        except RemoteError:
            self.close()
            raise

    def refresh(self) -> FileHeader:
        """Read the file header again, after the owner said that it changed."""
        self.file = layout.unpack_file_header(self._bytes)
        return self.file

    def header(self, slot: int) -> SlotHeader:
        """Return a slot's header as it is now; IndexError when there is no such slot."""
        return layout.unpack_slot_header(self._bytes, self.file.geometry, slot)

    def view(self, slot: int) -> memoryview:
        """Return a read-only view of a slot's block_bytes. What it shows may change under you: see `unchanged`."""
        return self._slice(slot).toreadonly()

    def writable(self, slot: int, generation: int) -> memoryview | None:
        """Return a view of a granted slot to write a block into; None when the grant is void.

        Void: the slot's generation is no longer the granted one, or the pool was cleared since `refresh`.
        """
        if not self._can_write:
            raise LocalError("this reader was opened read-only")
        if generation % 2 == 0 or self._generation(slot) != generation or not self._current():
            return None
        return self._slice(slot)

    def find(self, slot: int, generation: int, block_hash: bytes, rank: int) -> memoryview | ReadFault:
        """Return the bytes of exactly that block, digest checked, or why not."""
        try:
            header = self.header(slot)
        except IndexError:
            return ReadFault.GONE
        if (header.generation, header.block_hash, header.rank) != (generation, block_hash, rank):
            return ReadFault.GONE
        if not header.valid or not self._current():
            return ReadFault.GONE
        if header.nbytes > self.file.geometry.block_bytes:
            return ReadFault.CORRUPT if self.unchanged(slot, generation) else ReadFault.GONE
        data = self.view(slot)[: header.nbytes]
        if block_digest(data) != header.digest:
            return ReadFault.CORRUPT if self.unchanged(slot, generation) else ReadFault.GONE
        return data

    def unchanged(self, slot: int, generation: int) -> bool:
        """Whether a slot still is what `find` returned; ask after the copy and before the copy is used."""
        return self._generation(slot) == generation and self._current()

    def read(
        self, slot: int, generation: int, block_hash: bytes, rank: int, copy: Callable[[memoryview], None]
    ) -> ReadFault | None:
        """Check, copy, check again. None = `copy` saw exactly that block; anything else = discard what it copied."""
        data = self.find(slot, generation, block_hash, rank)
        if isinstance(data, ReadFault):
            return data
        copy(data)
        return None if self.unchanged(slot, generation) else ReadFault.GONE

    def close(self) -> None:
        """Unmap. Idempotent; views that are still alive keep the mapping until they go."""
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            return  # a tensor or memoryview still points into it; the mapping goes with the last of them

    def _slice(self, slot: int) -> memoryview:
        geometry = self.file.geometry
        offset = geometry.slot_offset(slot)
        return self._bytes[offset : offset + geometry.block_bytes]

    def _generation(self, slot: int) -> int:
        return layout.read_generation(self._bytes, self.file.geometry, slot)

    def _current(self) -> bool:
        return layout.read_epoch(self._bytes) == self.file.epoch


def _map(path: Path, writable: bool) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise LocalError(f"cannot open KV pool {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if size < layout.PAGE_BYTES:
            raise RemoteError(f"{path} is no KV pool file")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, size, access=access)
    finally:
        os.close(fd)
