"""The pool file of another node on this host, read directly instead of through a socket.

How a puller knows that a source is its neighbour, and what a lying one gains:
1. The source names its file and the file's instance number (63 random bits, in the header of the file only) over the
   authenticated connection. A source on another host names a file that is not here, or another instance.
2. Only a bare name that ends as our own is opened, only in the directory of our own pool, never through a link, only a
   regular file of our own user that others cannot write, and only for reading. Its own pool is not opened.
3. The mapping is private: whatever this code does, no byte of the file changes.
4. A block counts only with the digest of the manifest, as if it had come over the wire. So a source that points at
   another pool of this user makes us read that, and gains nothing by it.

The file cannot shrink under the mapping: pool files never do (`pool_file`, rule 2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

from . import layout
from .copier import Helpers
from .digest import RunningDigest
from .errors import RemoteError
from .layout import Geometry

#: Copied at a time: still in the L2 cache when it is hashed.
COPY_BYTES: Final = 512 << 10
#: Files that stay mapped: more nodes than that on one host are rare, and the others only cost a mapping each time.
MAX_KEPT: Final = 16
_MAP_NORESERVE: Final = 0x4000  # Linux; `mmap` names it from Python 3.13 on


class NeighbourFile:
    """A mapped pool file of another process. `close` when nobody copies any more."""

    def __init__(self, mapped: mmap.mmap, geometry: Geometry, instance: int) -> None:
        self.geometry = geometry
        self.instance = instance
        self._map = mapped
        # Foreign calls release the interpreter's lock during the copy; slicing a memoryview would hold it.
        self._anchor = ctypes.c_char.from_buffer(mapped)
        self._address = ctypes.addressof(self._anchor)

    @classmethod
    def open(cls, own: Path, name: str, instance: int) -> NeighbourFile | None:
        """Map the file `name` beside our own pool; None when it is not there, not ours to read, or another one."""
        if name != os.path.basename(name) or not name.endswith(own.suffix) or name == own.name:  # noqa: PTH119 - no path
            return None
        try:
            fd = os.open(own.parent / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            return cls._mapped(fd, instance)
        except (OSError, RemoteError):
            return None
        finally:
            os.close(fd)

    @classmethod
    def _mapped(cls, fd: int, instance: int) -> NeighbourFile | None:
        found = os.fstat(fd)
        writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or writable_by_others:
            return None
        header = layout.unpack_file_header(memoryview(os.pread(fd, layout.PAGE_BYTES, 0)))
        geometry = header.geometry
        if header.instance != instance or not instance or not geometry.slots or geometry.total_bytes > found.st_size:
            return None
        # Writable, because only then its address can be had; private, so nothing that is written reaches the file.
        flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return cls(mmap.mmap(fd, geometry.total_bytes, flags=flags, prot=access), geometry, instance)

    def copy(self, slot: int, nbytes: int, target: memoryview) -> bytes:
        """Copy the first `nbytes` of a slot into writable memory; returns their digest.

        RemoteError when there is no such slot. The interpreter's lock is free during the copy.
        """
        if slot >= self.geometry.slots or nbytes > self.geometry.block_bytes:
            raise RemoteError("transfer: a place outside of the pool file")
        source = self._address + self.geometry.slot_offset(slot)
        view = ctypes.c_char.from_buffer(target)
        room = ctypes.addressof(view)
        digest = RunningDigest()
        for start in range(0, nbytes, COPY_BYTES):
            size = min(COPY_BYTES, nbytes - start)
            ctypes.memmove(room + start, source + start, size)
            digest.update(target[start : start + size])
        return digest.digest()

    def unchanged(self, slot: int, generation: int) -> bool:
        """Whether a slot still holds what the source said: tells a block that went away from one that is damaged."""
        return ctypes.c_uint64.from_address(self._address + self.geometry.header_offset(slot)).value == generation

    def close(self) -> None:
        """Unmap. Idempotent."""
        if not self._map.closed:
            del self._anchor
            self._map.close()


class Neighbours:
    """Mapped files that are kept, since the first touch of each page through a new mapping is slow. Thread-safe.

    `own`: our own pool's file. A file is lent to one thread at a time. One that was removed is let go of when the next
    is asked for: its memory would stay taken as long as we map it.
    """

    def __init__(self, own: Path) -> None:
        self.helpers = Helpers()
        self._own = own
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, NeighbourFile] = OrderedDict()
        self._closed = False

    def borrow(self, name: str, instance: int) -> NeighbourFile | None:
        """Return the file `name` if it is a neighbour's and has this instance; give it back afterwards."""
        with self._lock:
            kept = self._kept.pop(name, None)
            gone = [other for other in self._kept if not (self._own.parent / other).exists()]
            doomed = [self._kept.pop(other) for other in gone]
            if kept is not None and kept.instance != instance:
                doomed.append(kept)
                kept = None
        for file in doomed:
            file.close()
        return kept or NeighbourFile.open(self._own, name, instance)

    def give_back(self, name: str, file: NeighbourFile) -> None:
        """Keep a borrowed file for the next time."""
        surplus: NeighbourFile | None = file
        with self._lock:
            if not self._closed and name not in self._kept:
                self._kept[name] = file
                surplus = self._kept.popitem(last=False)[1] if len(self._kept) > MAX_KEPT else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Unmap all that is not lent; what is lent is unmapped when it comes back. Idempotent."""
        self.helpers.close()
        with self._lock:
            self._closed = True
            doomed = list(self._kept.values())
            self._kept.clear()
        for file in doomed:
            file.close()
