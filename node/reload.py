"""Files that are read again when they change, and when the process is told to (SIGHUP).

A file that cannot be used is told of once, and what was read before stays in use until it changes again: a certificate
and its key are replaced one after the other, and an editor may be half done.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.errors import LocalError

#: Seconds between two looks.
LOOK_EVERY_S = 2.0

#: What is read again.
TLS = "TLS certificate"
CLIENTS = "clients"

_log = logging.getLogger("grapevine")

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Watched:
    what: str
    paths: Sequence[Path]
    reload: Callable[[], None]
    seen: Stamp


class Reloader:
    """Looks after files; `add` before `run`."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._followers: list[Callable[[str], Awaitable[None]]] = []
        self._asked = asyncio.Event()

    def add(self, what: str, paths: Sequence[Path], reload: Callable[[], None]) -> None:
        """Call ``reload`` in a thread when a file has changed; it raises `LocalError` when it cannot use them."""
        self._watched.append(_Watched(what, paths, reload, _stamp(paths)))

    def subscribe(self, follower: Callable[[str], Awaitable[None]]) -> None:
        """Call this with what was read again, when it could be used, and wait for it."""
        self._followers.append(follower)

    def ask(self) -> None:
        """Read everything again now, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while self._watched:
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._asked.wait()
            except TimeoutError:
                pass
            forced = self._asked.is_set()
            self._asked.clear()
            await self.look(forced=forced)

    async def look(self, *, forced: bool = False) -> None:
        """Read again what has changed, or everything."""
        for watched in self._watched:
            stamp = await asyncio.to_thread(_stamp, watched.paths)
            if forced or stamp != watched.seen:
                watched.seen = stamp
                await self._reload(watched)

    async def _reload(self, watched: _Watched) -> None:
        try:
            await asyncio.to_thread(watched.reload)
        except LocalError as error:
            _log.error("%s: %s; what was read before stays in use", watched.what, error)
        else:
            _log.info("%s: read again", watched.what)
            for follower in self._followers:
                await follower(watched.what)


def _stamp(paths: Sequence[Path]) -> Stamp:
    """What tells a file from the one that was there before; zeros for one that is not there."""
    stamps = []
    for path in paths:
        try:
            found = os.stat(path)  # noqa: PTH116 - through links: secrets are mounted as such
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
