"""The persisted boot counter: the incarnation with which a node starts.

The file holds `grapevine-boot 1 <counter> <crc32 in hex>`; beside it lies the file before it (`.prev`) and a lock.

Rules
1. The next incarnation is one above the highest counter that any of the two files vouches for with its checksum.
2. If the file is damaged, or gone beside its predecessor, the counter may have been somewhat above what is left.
   Without a clock to ask, the gap is bridged by `DAMAGE_GAP`: the counter goes that much above the predecessor.
3. If nothing readable is left, it starts again, at 1, or at `DAMAGE_GAP` after damage. Peers who remember a later boot
   say so, the endpoint moves above it (`IncarnationRaised`), and `raise_to` records that.
4. A new value is on disk, whole, before it is returned: written aside, synced, renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gossip.errors import LocalError
from gossip.limits import MAX_BOOT

#: Boots skipped after damage. Far above what a machine restarts between two healthy writes.
DAMAGE_GAP: Final = 1000
_MAGIC: Final = "grapevine-boot 1"
#: A boot file is shorter than this; more is not one.
_MAX_FILE_BYTES: Final = 128


def next_incarnation(path: Path) -> int:
    """Count one more boot and give its number, at least 1. Two processes never get the same one.

    :raises LocalError: the counter is exhausted, or a directory is in the way.
    :raises OSError: the file cannot be written.
    """
    with _locked(path):
        value = _highest(path) + 1
        _store(path, value)
        return value


def raise_to(path: Path, incarnation: int) -> None:
    """Make sure that the next boot is above `incarnation`. :raises OSError: the file cannot be written."""
    with _locked(path):
        if _highest(path) < incarnation:
            _store(path, incarnation)


def _highest(path: Path) -> int:
    current, previous = _load(path), _load(_previous(path))
    best = max(current or 0, previous or 0)
    untouched = current is None and previous is None
    # With the newer file whole, the older one tells nothing new, damaged or not.
    return best if current or untouched else best + DAMAGE_GAP


def _load(path: Path) -> int | None:
    """Give the counter, None if there is no file, 0 if it is damaged."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    body, _, checksum = raw.decode("ascii", "replace").strip().rpartition(" ")
    magic, _, number = body.rpartition(" ")
    if len(raw) > _MAX_FILE_BYTES or magic != _MAGIC or not number.isdigit() or checksum != _checksum(body):
        return 0
    return int(number) if 0 < int(number) < MAX_BOOT else 0


def _store(path: Path, value: int) -> None:
    if not 0 < value < MAX_BOOT:
        raise LocalError(f"boot counter {value} is out of range")
    body = f"{_MAGIC} {value}"
    aside = path.with_name(path.name + ".new")
    with aside.open("wb") as file:
        file.write(f"{body} {_checksum(body)}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    if _load(path):  # a damaged file must not replace a good predecessor
        path.replace(_previous(path))
    aside.replace(path)
    _sync_directory(path.parent)


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".prev")


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise LocalError(f"{path} is a directory, not a boot counter")
    with path.with_name(path.name + ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file
        yield
