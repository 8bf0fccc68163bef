"""The target's side of the transfer: gets the blocks of a chain from a peer into our pool.

Promises:
1. A block is committed only if its bytes have the digest that the source took when the block was stored.
2. Blocks are committed in chain order, and the first bad or missing one ends the pull: what we have is a prefix.
3. `pull` returns within its deadline, and never raises for anything that a peer or the network does.
4. The event loop only waits: all I/O is in a bounded number of threads, data goes from the socket to shared memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from . import wire
from .dialer import Dialer
from .errors import KvError, LocalError, RemoteError
from .fetch import Fetching
from .handshake import Secrets
from .pool import BlockPool
from .transport import Deadline, Transport, unexpected

#: Deadline of the event loop's side beyond the thread's: for handing the result over.
_GRACE_S: Final = 0.25


class Reason(StrEnum):
    """Why a pull ended."""

    COMPLETE = "complete"  #: everything that the source has is here
    NOTHING = "nothing"  #: the source has no block of the chain
    UNREACHABLE = "unreachable"
    REFUSED = "refused"  #: wrong cluster, key, or another error that the source named
    MISMATCH = "mismatch"  #: the source's blocks are of another fingerprint
    BUSY = "busy"  #: the source, or we ourselves, have too many pulls
    GONE = "gone"  #: the source evicted a block in the meantime
    CORRUPT = "corrupt"  #: a block's bytes did not have their digest
    STALLED = "stalled"  #: no progress for too long
    DEADLINE = "deadline"
    BROKEN = "broken"  #: the connection was lost, or the source broke the protocol
    FULL = "full"  #: our pool has no slot to give, or was cleared
    UNCONFIGURED = "unconfigured"  #: no engine has said yet what our blocks are


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did. `blocks` and `bytes` were committed now; `present` is the length of the prefix that is here
    afterwards, in blocks; `seconds` the whole time, `lookup_s` the part before the first block was asked for."""

    blocks: int
    bytes: int
    seconds: float
    reason: Reason
    corrupt: int = 0
    present: int = 0
    lookup_s: float = 0.0
    detail: str = ""
    joined: bool = False  #: another pull did this, and its caller got the same result: count it once


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of a puller; times in seconds."""

    threads: int = 4  #: pulls at a time
    waiting: int = 16  #: pulls at a time and in the queue
    connect_s: float = 1.0  #: dial and handshake
    lookup_s: float = 1.0
    stall_s: float = 2.0  #: no byte for that long
    window_bytes: int = 32 << 20  #: of one FETCH; two are under way, and as much is thrown away after a bad block


@dataclass(frozen=True, slots=True, kw_only=True)
class PullerStats:
    """Counters since the start; `by_reason` counts how pulls ended."""

    running: int
    blocks: int
    bytes: int
    corrupt: int
    joined: int  #: pulls that shared another one's work
    by_reason: dict[str, int]


class Puller:
    """Pull blocks from peers into a pool.

    `secret` is the cluster key, or several of them, `label` the cluster's name, `name` our own.
    Use it from one event loop.
    """

    def __init__(
        self,
        pool: BlockPool,
        secret: Secrets,
        label: str,
        *,
        name: str = "",
        limits: PullLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._limits = limits or PullLimits()
        self._clock = clock
        self._dialer = Dialer(label, name, secret, self._limits.connect_s)
        self._threads = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="kv-pull")
        self._flights: dict[tuple[int, ...], asyncio.Future[PullResult]] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._closed = False

    def rekey(self, secret: Secrets) -> None:
        """Prove these keys on new connections; warm ones go on."""
        self._dialer.rekey(secret)

    async def pull(self, address: str, chunks: Sequence[int], deadline_s: float) -> PullResult:
        """Get the blocks of a chain of chunk hashes from the source at `address` ("host:port").

        Returns within `deadline_s` seconds. A second pull of the same chain waits for the first one's result.
        """
        started = self._clock()
        chain = tuple(chunks[: wire.MAX_CHUNKS])
        flight = self._flights.get(chain)
        joined = flight is not None
        if flight is not None:
            with self._lock:
                self._counts["joined"] += 1
        elif self._closed or len(self._flights) >= self._limits.waiting:
            return self._ended(PullResult(0, 0, 0.0, Reason.BUSY))
        else:
            flight = self._launch(address, chain, Deadline(self._clock, deadline_s, self._limits.stall_s))
        try:
            # shielded: when this caller goes away, the blocks are still worth having
            result = await asyncio.wait_for(asyncio.shield(flight), deadline_s + _GRACE_S)
            return replace(result, joined=True) if joined else result
        except TimeoutError:
            return PullResult(0, 0, self._clock() - started, Reason.DEADLINE)  # counted when its thread is done

    def stats(self) -> PullerStats:
        """Return the counters as of now."""
        with self._lock:
            return PullerStats(
                running=len(self._flights),
                blocks=self._counts["blocks"],
                bytes=self._counts["bytes"],
                corrupt=self._counts["corrupt"],
                joined=self._counts["joined"],
                by_reason=dict(self._reasons),
            )

    async def close(self) -> None:
        """Break off all pulls and close all connections. Idempotent."""
        self._closed = True
        self._dialer.close()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _launch(self, address: str, chain: tuple[int, ...], deadline: Deadline) -> asyncio.Future[PullResult]:
        loop = asyncio.get_running_loop()
        flight = loop.run_in_executor(self._threads, self._run, address, chain, deadline)
        self._flights[chain] = flight
        flight.add_done_callback(lambda _: self._flights.pop(chain, None))
        return flight

    def _ended(self, result: PullResult) -> PullResult:
        with self._lock:
            self._reasons[result.reason] += 1
            self._counts["blocks"] += result.blocks
            self._counts["bytes"] += result.bytes
            self._counts["corrupt"] += result.corrupt
        return result

    def _run(self, address: str, chain: tuple[int, ...], deadline: Deadline) -> PullResult:
        """A whole pull, in a thread."""
        started = self._clock()
        work = _Pull(self._pool, self._limits)
        try:
            reason = self._over_connection(address, chain, deadline, work)
            detail = work.detail
        except TimeoutError as error:
            reason, detail = (Reason.DEADLINE if deadline.left() <= 0 else Reason.STALLED), str(error)
        except (OSError, RemoteError, KvError) as error:
            reason, detail = Reason.BROKEN, str(error)
        finally:
            work.finish()
        return self._ended(
            PullResult(
                blocks=work.fetching.blocks if work.fetching else 0,
                bytes=work.fetching.bytes if work.fetching else 0,
                seconds=self._clock() - started,
                reason=reason,
                corrupt=len(work.fetching.corrupt) if work.fetching else 0,
                present=len(self._pool.lookup(work.hashes, use=False)),
                lookup_s=(work.looked_up or self._clock()) - started,
                detail=detail,
            )
        )

    def _over_connection(self, address: str, chain: tuple[int, ...], deadline: Deadline, work: _Pull) -> Reason:
        header = self._pool.header
        if not header.geometry.slots:
            return Reason.UNCONFIGURED
        lookup = wire.Lookup(header.fingerprint, header.geometry.ranks, chain)
        part = deadline.within(self._limits.connect_s + self._limits.lookup_s)
        try:
            transport, answer = self._dialer.ask(address, lookup, part)
        except RemoteError as error:
            work.detail = str(error)
            return Reason.REFUSED
        except (OSError, LocalError) as error:
            work.detail = str(error)
            return Reason.DEADLINE if deadline.left() <= 0 else Reason.UNREACHABLE
        work.looked_up = self._clock()
        try:
            reason = work.take(transport, answer, deadline)
        except BaseException:
            self._dialer.discard(transport)
            raise
        self._dialer.keep(address, transport)
        return reason


class _Pull:
    """One pull's progress, kept apart so that it can be told after a failure too."""

    def __init__(self, pool: BlockPool, limits: PullLimits) -> None:
        self._pool = pool
        self._limits = limits
        self.hashes: list[bytes] = []
        self.fetching: Fetching | None = None
        self.looked_up: float | None = None
        self.detail = ""

    def take(self, transport: Transport, answer: wire.Message, deadline: Deadline) -> Reason:
        """Act on the answer to the lookup, and fetch what is missing."""
        match answer:
            case wire.Busy():
                return Reason.BUSY
            case wire.Error():
                self.detail = answer.message
                return Reason.MISMATCH if answer.code in {"fingerprint", "ranks"} else Reason.REFUSED
            case wire.Manifest():
                pass
            case _:
                raise unexpected(answer)
        geometry = self._pool.header.geometry
        self.hashes = check_manifest(answer, geometry.ranks, geometry.block_bytes)
        if not self.hashes:
            return Reason.NOTHING
        have = len(self._pool.lookup(self.hashes, use=False))
        # A chain longer than half of the pool would push out its own head.
        missing = answer.entries[have * geometry.ranks : geometry.slots // 2]
        self.fetching = Fetching(self._pool, transport, missing, self._limits.window_bytes)
        outcome = self.fetching.run(deadline)
        if self.fetching.corrupt:
            transport.send(wire.Corrupt(tuple(self.fetching.corrupt[: wire.MAX_FETCH])), deadline)
        return Reason(outcome)

    def finish(self) -> None:
        """Give back what was not used; make the head of the chain the last to be evicted."""
        if self.fetching is not None:
            self.fetching.give_back()
        self._pool.touch(self.hashes, use=False)


def check_manifest(manifest: wire.Manifest, ranks: int, block_bytes: int) -> list[bytes]:
    """Return the block hashes of a manifest; RemoteError when it is not blocks in order with all their ranks."""
    if len(manifest.entries) % ranks:
        raise RemoteError("transfer: manifest with a part of a block")
    hashes = [entry.block_hash for entry in manifest.entries[::ranks]]
    if len(set(hashes)) != len(hashes):
        raise RemoteError("transfer: manifest names a block twice")
    for place, entry in enumerate(manifest.entries):
        if entry.block_hash != hashes[place // ranks] or entry.rank != place % ranks:
            raise RemoteError("transfer: manifest is out of order")
        if entry.nbytes > block_bytes:
            raise RemoteError("transfer: a block is larger than ours can be")
    return hashes
