"""Spill: a pool's blocks go to a file when their node is stopped, and come back when it starts.

Promises:
1. A file appears under its name whole or not at all. It is not forced to the disk: what a power failure leaves of it
   does not have its digests.
2. Writing stops at its limit of bytes or of time, the most wanted blocks first; what is written by then is a file.
3. A block that is read back has the bytes that its digest was taken of when it was stored, and goes into a pool of
   exactly its fingerprint. The first thing that is not as it should be ends the reading.
4. Reading never pushes out a block that is in the pool already.

Blocking; for threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from .digest import block_digest
from .errors import LocalError, RemoteError
from .lru import USES_TO_PROTECT
from .messages import Chain
from .pool import BlockPool
from .pool_types import Block
from .spill_file import HEAD_BYTES, ROW_BYTES, Head, Row, pack_chains, pack_table, read_table, unpack

#: Slots of a pool that reading leaves free for the engine, one in so many.
LEFT_FREE: Final = 8
#: Part of the file system's free space that a file may take.
SHARE_OF_FREE: Final = 0.9
_WRITER: Final = "spill"
_LEASE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Spilled:
    """What was written or read. `why`: what ended it early, empty when nothing did."""

    blocks: int = 0  #: on all ranks
    nbytes: int = 0
    seconds: float = 0.0
    why: str = ""
    fingerprint: bytes = b""
    chains: tuple[Chain, ...] = ()


def write(
    pool: BlockPool, path: Path, chains: Sequence[Chain], *, max_bytes: int, limit_s: float, clock: Callable[[], float]
) -> Spilled:
    """Write a pool's blocks. Raises LocalError where no file can be made. Nothing else may evict meanwhile."""
    began = clock()
    _remove_drafts(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        room = os.statvfs(path.parent)
        most = min(max_bytes, int(room.f_bavail * room.f_frsize * SHARE_OF_FREE))
        groups = list(_fitting(pool, most))
        if not groups:
            return Spilled(seconds=clock() - began)
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with FileIO(fd, "r+", closefd=True) as file:
            result = _Writing(pool, file, groups, pack_chains(chains)).run(began + limit_s, clock)
        if not result.blocks:
            return result
        draft.replace(path)
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return result


def read(pool: BlockPool, path: Path, *, limit_s: float, clock: Callable[[], float]) -> Spilled | None:
    """Read blocks back; None when there is no file. It is removed when all that it held is in the pool.

    Raises LocalError or RemoteError for a file that is refused as a whole.
    """
    began = clock()
    _remove_drafts(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalError(f"it cannot be opened: {error.strerror}") from error
    with FileIO(fd, "r", closefd=True) as file:
        _check_owner(fd)
        try:
            result = _Reading(pool, file).run(began + limit_s, clock)
        except OSError as error:
            raise LocalError(f"it cannot be read: {error.strerror}") from error
    if not result.why:
        path.unlink(missing_ok=True)
    return result


class _Writing:
    def __init__(self, pool: BlockPool, file: FileIO, groups: Sequence[Sequence[Block]], chains: bytes) -> None:
        self._pool = pool
        self._file = file
        self._groups = groups
        self._chains = chains
        self._rows: list[Row] = []
        self._bytes = 0

    def run(self, until: float, clock: Callable[[], float]) -> Spilled:
        began = clock()
        header = self._pool.header
        room = sum(map(len, self._groups)) * ROW_BYTES
        offset = HEAD_BYTES + room + len(self._chains)
        self._file.truncate(offset)
        self._file.seek(offset)
        why, done = "", 0
        try:
            for group in self._groups:
                if clock() >= until:
                    why = "its time was over"
                    break
                if not self._write_group(group):
                    why = "the pool dropped blocks meanwhile"
                    break
                done += 1
        except OSError as error:  # the disk is full: what was written before is good
            why = str(error.strerror)
        rows = self._rows[: done * header.geometry.ranks]
        table = pack_table(rows, room)
        head = Head(
            header.fingerprint, header.geometry.block_bytes, header.geometry.ranks, len(rows), room,
            len(self._chains),
        )  # fmt: skip
        self._file.truncate(offset + sum(row.nbytes for row in rows))
        self._file.seek(0)
        _write_all(self._file, memoryview(head.pack(table, self._chains) + table + self._chains))
        return Spilled(done, sum(row.nbytes for row in rows), clock() - began, why, header.fingerprint)

    def _write_group(self, group: Sequence[Block]) -> bool:
        (uses,) = self._pool.uses([group[0].block_hash])
        for block in group:
            lease = self._pool.lease(block.block_hash, block.rank, float("inf"), _WRITER)
            held = self._pool.leased(lease) if lease is not None else None
            if lease is None or held is None:
                return False
            try:
                _write_all(self._file, held[1])
            finally:
                self._pool.release(lease)
            self._rows.append(Row(block.block_hash, block.rank, block.nbytes, uses, block.digest))
        return True


class _Reading:
    def __init__(self, pool: BlockPool, file: FileIO) -> None:
        self._pool = pool
        self._file = file
        self._bytes = 0

    def run(self, until: float, clock: Callable[[], float]) -> Spilled:
        began = clock()
        packed = self._exactly(HEAD_BYTES)
        head = unpack(packed)
        rows, chains = read_table(packed, self._exactly(head.table_bytes), self._exactly(head.chains_bytes))
        self._claim(head)
        groups = [rows[at : at + head.ranks] for at in range(0, len(rows), head.ranks)]
        if any(row.rank != place or row.block_hash != g[0].block_hash for g in groups for place, row in enumerate(g)):
            raise RemoteError("its table is out of order")
        stats = self._pool.stats()
        room = max(0, stats.free - stats.slots // LEFT_FREE) // head.ranks
        why, done = "", 0
        for group in groups:
            why = self._cannot_go_on(done, room, clock() >= until) or self._read_group(head, group)
            if why:
                break
            done += 1
        self._in_order(groups[:done])
        return Spilled(done, self._bytes, clock() - began, why, head.fingerprint, tuple(chains))

    def _claim(self, head: Head) -> None:
        """Make the pool one for these blocks, unless an engine has said already what its blocks are."""
        if not self._pool.header.geometry.slots:
            self._pool.configure(head.fingerprint, head.block_bytes, head.ranks)
        elif not self._is_ours(head):
            raise RemoteError("its blocks are of another fingerprint than the engine's")

    def _is_ours(self, head: Head) -> bool:
        header = self._pool.header
        geometry = header.geometry
        return (header.fingerprint, geometry.block_bytes, geometry.ranks) == (
            head.fingerprint, head.block_bytes, head.ranks,
        )  # fmt: skip

    @staticmethod
    def _cannot_go_on(done: int, room: int, late: bool) -> str:
        if done >= room:
            return "the pool has no room for more"
        return "its time was over" if late else ""

    def _read_group(self, head: Head, group: Sequence[Row]) -> str:
        """Read one block on all ranks. Returns why not, empty when it is here."""
        for row in group:
            granted = self._pool.grant(1, _WRITER)
            # After the grant: then it is of this fingerprint's file, or void.
            if not granted or not self._is_ours(head):
                self._pool.reclaim(_WRITER)
                return "the pool is another engine's now" if granted else "the pool has no room for more"
            target = self._pool.writable(granted[0])
            try:
                if target is None:
                    return "the pool was cleared"
                room = target[: row.nbytes]
                if not _fill(self._file, room) or block_digest(room) != row.digest:
                    return "a block is damaged"
                self._pool.commit(granted[0], row.block_hash, row.rank, row.nbytes, row.digest)
                self._bytes += row.nbytes
            finally:
                self._pool.abandon(granted[0])  # nothing happens after a commit
        return ""

    def _in_order(self, groups: Sequence[Sequence[Row]]) -> None:
        """As they were in the pool that was written: the most wanted youngest, those used again protected."""
        for group in reversed(groups):
            hashes = [group[0].block_hash]
            self._pool.touch(hashes, use=False)
            for _ in range(min(group[0].uses, USES_TO_PROTECT)):
                self._pool.touch(hashes)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        if not _fill(self._file, memoryview(data)):
            raise RemoteError("it is shorter than it says")
        return bytes(data)


def _fitting(pool: BlockPool, most: int) -> Iterator[tuple[Block, ...]]:
    """The pool's blocks, all ranks of one together, the most wanted first, as many as fit."""
    left = most - HEAD_BYTES
    by_hash = itertools.groupby(pool.blocks(), key=lambda block: block.block_hash)
    for group in reversed([tuple(sorted(blocks, key=lambda block: block.rank)) for _, blocks in by_hash]):
        left -= sum(block.nbytes + ROW_BYTES for block in group)
        if left < 0:
            return
        yield group


def _check_owner(fd: int) -> None:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise LocalError("it is no file")
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise LocalError("others may have written it: it must belong to this user and be writable by nobody else")


def _remove_drafts(path: Path) -> None:
    """What a node that was killed while it wrote has left."""
    with contextlib.suppress(OSError):
        for draft in path.parent.glob(f".{path.name}.*"):
            draft.unlink(missing_ok=True)


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) or 0 :]


def _fill(file: FileIO, room: memoryview) -> bool:
    while room:
        got = file.readinto(room)
        if not got:
            return False
        room = room[got:]
    return True
