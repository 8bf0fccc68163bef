"""The pool's file, as its owner sees it: created, locked, mapped, backed with memory, removed.

Rules:
1. The owner holds an exclusive flock for the life of the file. A file that can be locked has no owner.
2. A file is never truncated or reused: a process that still maps a dead owner's file cannot be killed by SIGBUS. A new
   owner, or whoever sweeps up, unlinks the old file and takes its memory away: it reads as zeros then, which have no
   block's digest.
3. A page is backed by memory before anybody is told to write it: a full file system is an error here and not a
   SIGBUS in the engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Final

from .errors import LocalError, PoolOwnedError, PoolSizeError
from .layout import MAGIC, PAGE_BYTES

#: Looks at a file that is locked before it is believed to have an owner, and seconds between them.
TRIES: Final = 5
TRY_AGAIN_S: Final = 0.02
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
#: Files that one sweep looks at.
MAX_SWEPT: Final = 1024


class PoolFile:
    """Create and own a pool file of `capacity` bytes at `path` (sparse: memory is taken as it is used).

    Raises PoolOwnedError when a live process owns the path, PoolSizeError when the file system is too small.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        for _ in range(TRIES):
            remove_if_stale(path)
            if not path.exists():
                break
            time.sleep(TRY_AGAIN_S)  # another node may be about to sweep it up
        else:
            raise PoolOwnedError(f"KV pool {path} belongs to another running process; give this node its own name")
        _check_space(path, capacity)
        self._fd = _create(path, capacity)
        self._map = mmap.mmap(self._fd, capacity)
        self.bytes = memoryview(self._map)
        self.is_open = True

    def back(self, offset: int, length: int) -> bool:
        """Give a range memory; False when the file system is full."""
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                return False
            raise LocalError(f"cannot back KV pool {self.path} with memory: {error.strerror}") from error
        return True

    def populate(self, offset: int, length: int) -> None:
        """Map a range of whole pages that has memory, so that the first write need not find each page."""
        with contextlib.suppress(OSError):  # an older kernel: it does
            self._map.madvise(_MADV_POPULATE_WRITE, offset, length)

    def give_up_memory(self) -> None:
        """Return all memory but the first page's to the system (it reads as zeros), where the system can do that."""
        try:
            whole_pages = len(self.bytes) // PAGE_BYTES * PAGE_BYTES
            self._map.madvise(mmap.MADV_REMOVE, PAGE_BYTES, whole_pages - PAGE_BYTES)
        except OSError:
            return

    def close(self) -> None:
        """Unmap, remove and unlock. Idempotent; a view in use by another thread keeps the memory until it goes."""
        if not self.is_open:
            return
        self.is_open = False
        self.path.unlink(missing_ok=True)
        try:
            self.bytes.release()
            self._map.close()
        except BufferError:
            pass  # a transfer still holds a view; its thread ends by its deadline
        os.close(self._fd)


def remove_if_stale(path: Path) -> bool:
    """Remove a pool file whose owner is dead. False: there is none, or it has a living owner.

    Raises LocalError for a file that is no pool of ours, rather than deleting what somebody else put there.
    """
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LocalError(f"cannot open {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = os.pread(fd, len(MAGIC), 0)
        if head and head.strip(b"\0") and head != MAGIC:
            raise LocalError(f"{path} exists and is no KV pool; remove it or choose another path")
        gone = _unlink_same(path, fd)
        if gone:
            _give_up(fd)  # after the name is free: this takes a while, and its next owner may be starting
        return gone
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def remove_stale_files(own: Path) -> list[Path]:
    """Remove the pool files beside our own (of the same ending) whose owners are dead, and return their paths.

    A node that was killed leaves its file, and with it the memory, until its name starts again: any node of the host
    and user sweeps it up.
    """
    removed = []
    for path in sorted(own.parent.glob(f"*{own.suffix}"))[:MAX_SWEPT]:
        try:
            if remove_if_stale(path):
                removed.append(path)
        except LocalError:
            continue  # another user's file, or no pool: not ours to judge
    return removed


def _give_up(fd: int) -> None:
    """Return a dead owner's memory although others may still map the file: they find zeros, which have no digest."""
    size = os.fstat(fd).st_size // PAGE_BYTES * PAGE_BYTES
    if size <= PAGE_BYTES:
        return
    try:
        with mmap.mmap(fd, size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE, PAGE_BYTES, size - PAGE_BYTES)
    except (OSError, ValueError):
        return


def _unlink_same(path: Path, fd: int) -> bool:
    """Unlink a path if it still names the file that was locked."""
    try:
        if not os.path.samestat(os.stat(path), os.fstat(fd)):  # noqa: PTH116 - compared with an fd's
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _create(path: Path, capacity: int) -> int:
    # Made and locked under a private name, then linked: nobody can see the file without its owner's lock.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise LocalError(f"cannot create KV pool in {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, capacity)
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        os.pwrite(fd, MAGIC, 0)
        os.link(draft, path)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EEXIST:
            raise PoolOwnedError(f"KV pool {path} was taken by another process just now") from error
        raise LocalError(f"cannot create KV pool {path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return fd


def _check_space(path: Path, capacity: int) -> None:
    try:
        stat = os.statvfs(path.parent)
    except OSError as error:
        raise LocalError(f"no directory {path.parent} for the KV pool: {error.strerror}") from error
    free = stat.f_bavail * stat.f_frsize
    if capacity > free:
        raise PoolSizeError(
            f"{path.parent} has {free >> 20} MiB free and the KV pool wants {capacity >> 20} MiB: make the pool "
            f"smaller, or enlarge it (mount -o remount,size=... {path.parent}; in a container --shm-size)"
        )
