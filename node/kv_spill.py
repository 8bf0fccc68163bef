"""A planned restart of the node keeps its pool: written to a file at the end, read back at the beginning.

Rules
1. Without ``--kv-spill-dir`` nothing is written or read.
2. Nobody waits for the reading: the node starts, its engine loads, and what is back by then is found. A node that is
   stopped before all is back leaves the file as it is.
3. Whatever is wrong with the directory or the file is one line in the log, and the node goes on without.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path

from kvmigrate import spill
from kvmigrate.errors import KvError
from kvmigrate.messages import Chain
from kvmigrate.pool import BlockPool
from node.kv_digest import SharedDigest
from node.metrics import Metrics
from node.settings import GIB, Settings

#: Seconds that writing may take: a stop must not run into its own supervisor's patience (90 s with systemd).
WRITE_S = 20.0
#: Seconds that reading may take: about as long as engines need to load. After that the engine fills the pool itself.
READ_S = 120.0

_log = logging.getLogger("grapevine.kv")


class Spill:
    """The spill file of one node."""

    def __init__(self, settings: Settings, digest: SharedDigest, metrics: Metrics) -> None:
        self._path = settings.spill_path
        self._most = int(settings.kv_spill_gib * GIB)
        self._digest = digest
        self._metrics = metrics
        self._reading: asyncio.Task[None] | None = None
        self._fingerprint = b""
        self._hurry = False

    def begin(self, pool: BlockPool) -> None:
        """Read back what the last life of this node has left, in the background."""
        if self._path is not None:
            self._reading = asyncio.create_task(self._read(pool, self._path), name="grapevine-spill")

    async def read_back(self) -> None:
        """Wait until what was there has been read back; at most about `READ_S`."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def met(self, fingerprint: bytes) -> None:
        """An engine has said what its blocks are: those of another fingerprint are dropped by then."""
        if self._fingerprint and self._fingerprint != fingerprint:
            _log.warning(
                "the KV blocks read back from %s are of another model or engine configuration: dropped", self._path
            )
        self._fingerprint = b""

    async def end(self, pool: BlockPool) -> None:
        """Write what the pool holds, within `WRITE_S`. Nothing else uses the pool any more."""
        if self._path is None:
            return
        if self._reading is not None and not self._reading.done():
            self._hurry = True
            await asyncio.wait([self._reading])
            return
        blocks = pool.header.geometry.slots
        chains = await asyncio.to_thread(self._digest.hottest, blocks)
        await asyncio.to_thread(self._write, pool, self._path, chains)

    def _now(self) -> float:
        return math.inf if self._hurry else time.monotonic()

    def _write(self, pool: BlockPool, path: Path, chains: list[Chain]) -> None:
        try:
            done = spill.write(pool, path, chains, max_bytes=self._most, limit_s=WRITE_S, clock=time.monotonic)
        except KvError as error:
            _log.warning("the pool's blocks are not kept: %s", error)
            return
        if done.blocks or done.why:
            level = logging.WARNING if done.why else logging.INFO
            _log.log(level, "kept %s in %s%s", _amount(done), path, f": {done.why}" if done.why else "")

    async def _read(self, pool: BlockPool, path: Path) -> None:
        try:
            done = await asyncio.to_thread(spill.read, pool, path, limit_s=READ_S, clock=self._now)
        except KvError as error:
            _log.warning("nothing is read back from %s: %s", path, error)
            return
        if done is None:
            return
        self._fingerprint = done.fingerprint
        self._metrics.restored.inc(done.blocks)
        self._digest.adopt(done.chains)
        level = logging.WARNING if done.why else logging.INFO
        rest = f"; the rest is not: {done.why}" if done.why else ""
        _log.log(level, "read back %s from %s%s", _amount(done), path, rest)


def _amount(done: spill.Spilled) -> str:
    return f"{done.blocks} KV blocks, {done.nbytes / 1e6:.1f} MB in {done.seconds:.1f} s"
