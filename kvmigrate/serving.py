"""What a source answers on one authenticated connection.

Rules
1. Blocks go from shared memory to the socket, or are pinned where they lie, under leases. Leases end by themselves, and
   all of a connection's end with it. What a peer has pinned is bounded in bytes; what is being sent by the turns.
2. A FETCH waits a short time for its turn and is then told BUSY: each transfer can fill a link by itself.
3. What was asked for and is not here ends that request with MISS or fewer places: the puller asks no further.
4. What a peer took for a request of its own (LOOKUP) is evicted first here, until somebody comes back for it: the
   conversation goes on there, and two copies of it would drive the only one of another out of the cluster (singlets
   before duplicates: Dahlin, Wang, Anderson and Patterson, "Cooperative Caching", OSDI 1994). Copies of what is hot
   (FIND) are meant to be two.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from . import messages
from .errors import KvError, RemoteError
from .fingerprint import matching
from .leases import MAX_LEASE_S, Lease
from .pool import BlockPool
from .transport import Deadline, Transport, unexpected

#: Blocks that are leased together for sending. Sending them one stall short of failure must fit into MAX_LEASE_S.
LEASE_WINDOW: Final = 8
#: PINs of one connection that are open at a time: a puller has the next one under way while it reads.
MAX_PINS: Final = 4

Resolve = Callable[[Sequence[int]], Sequence[bytes]]
Describe = Callable[[], Mapping[str, str | int]]
Hottest = Callable[[int], Sequence[messages.Chain]]
Count = Callable[[str, int], None]
#: Told of each lookup that had a tag: the tag, who asked, blocks found, seconds taken. Called in a transfer thread.
OnLookup = Callable[[str, str, int, float], None]


class Serving:
    """Requests of one peer on one connection. `count` adds to the server's counters; used in one thread."""

    def __init__(
        self,
        pool: BlockPool,
        transport: Transport,
        peer: str,
        *,
        resolve: Resolve,
        describe: Describe,
        hottest: Hottest,
        turns: threading.Semaphore,
        busy_wait_s: float,
        count: Count,
        on_lookup: OnLookup,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._transport = transport
        self._peer = peer
        self._resolve = resolve
        self._describe = describe
        self._hottest = hottest
        self._turns = turns
        self._busy_wait_s = busy_wait_s
        self._count = count
        self._on_lookup = on_lookup
        self._clock = clock
        #: Leases of each PIN, and the blocks that give way when it ends.
        self._pins: deque[tuple[list[Lease], tuple[bytes, ...]]] = deque()
        #: Whether the last look-up was for a request of the peer's own: then what it takes moves.
        self._moving = False

    @property
    def pinning(self) -> bool:
        """Blocks are pinned for the peer, which may be reading them."""
        return bool(self._pins)

    def answer(self, request: messages.Message, deadline: Deadline) -> None:
        """Answer one request; raises RemoteError for what is none, and what `Transport` raises."""
        match request:
            case messages.Lookup() | messages.Find():
                self._transport.send(self._look_up(request), deadline)
            case messages.Hot():
                self._transport.send(messages.Chains(tuple(self._hottest(request.blocks))), deadline)
            case messages.Fetch():
                self._fetch(request.keys, deadline)
            case messages.Pin():
                self._transport.send(self._pin(request.keys), deadline)
            case messages.Unpin():
                if not self._pins:
                    raise RemoteError("transfer: nothing is pinned")
                leases, moved = self._pins.popleft()
                self._release(leases)
                self._pool.give_way(moved)
            case messages.Corrupt():
                self._check(request.keys)
            case _:
                raise unexpected(request)

    def close(self) -> None:
        """End what the peer still holds."""
        while self._pins:
            leases, _ = self._pins.popleft()
            self._release(leases)

    def _look_up(self, request: messages.Lookup | messages.Find) -> messages.Message:
        began = self._clock()
        found = self._found(request)
        if isinstance(request, messages.Lookup) and request.tag:
            shards = len(found.entries) if isinstance(found, messages.Manifest) else 0
            blocks = shards // max(1, request.ranks)
            self._on_lookup(request.tag, self._peer, blocks, self._clock() - began)
        return found

    def _found(self, request: messages.Lookup | messages.Find) -> messages.Message:
        self._count("lookups", 1)
        header = self._pool.header
        if not matching(header.fingerprint, request.fingerprint):
            self._count("unlike", 1)
            return self._unlike()
        if header.geometry.ranks != request.ranks:
            return messages.Error("ranks", f"the blocks here have {header.geometry.ranks} ranks")
        try:
            found = self._resolve(request.chunks) if isinstance(request, messages.Lookup) else request.hashes
        except KvError as error:
            return messages.Error("resolve", str(error)[: messages.MAX_TEXT])
        hashes = list(found)[: messages.MAX_ENTRIES // request.ranks]
        self._moving = isinstance(request, messages.Lookup)
        # A copy of what is hot makes nothing hotter.
        by_rank = [self._pool.lookup(hashes, rank, use=self._moving and rank == 0) for rank in range(request.ranks)]
        blocks = [block for shards in zip(*by_rank, strict=False) for block in shards]
        entries = tuple(messages.Entry(b.block_hash, b.rank, b.nbytes, b.digest) for b in blocks)
        return messages.Manifest(self._pool.path.name, header.instance, entries)

    def _unlike(self) -> messages.Unlike:
        fields = [(name, value) for name, value in self._describe().items() if len(name) <= messages.MAX_NAME]
        cut = [
            (n, v[: messages.MAX_FIELD_TEXT] if isinstance(v, str) else max(0, v))
            for n, v in fields[: messages.MAX_FIELDS]
        ]
        return messages.Unlike(tuple(cut))

    def _fetch(self, keys: Sequence[messages.Key], deadline: Deadline) -> None:
        if not self._turns.acquire(timeout=self._busy_wait_s):
            self._transport.send(self._busy(), deadline)
            return
        try:
            self._send_blocks(keys, deadline)
        finally:
            self._turns.release()

    def _send_blocks(self, keys: Sequence[messages.Key], deadline: Deadline) -> None:
        sent = 0
        while sent < len(keys):
            leases = self._lease(keys[sent : sent + LEASE_WINDOW], f"{self._peer} {id(self)}")
            try:
                for lease in leases:
                    if not self._send_block(sent, lease, deadline):
                        break
                    sent += 1
                else:
                    if leases:
                        self._pool.give_way(self._moved(keys[sent - len(leases) : sent]))
                        continue
            finally:
                self._release(leases)
            self._count("misses", 1)
            self._transport.send(messages.Miss(sent), deadline)
            return

    def _send_block(self, index: int, lease: Lease, deadline: Deadline) -> bool:
        found = self._pool.leased(lease)
        if found is None:
            return False
        block, data = found
        self._transport.send_block(messages.BlockHeader(index, block.nbytes, block.digest), data, deadline)
        self._count("blocks", 1)
        self._count("bytes", block.nbytes)
        return True

    def _pin(self, keys: Sequence[messages.Key]) -> messages.Message:
        if len(self._pins) >= MAX_PINS:
            return self._busy()
        leases = self._lease(keys, self._peer)
        missed = keys[len(leases)] if len(leases) < len(keys) else None
        if missed is not None and self._pool.lookup([missed.block_hash], missed.rank, use=False):
            self._release(leases)
            return self._busy()  # it is here, and the peer's quota is used up: fewer places would say that it is gone
        self._pins.append((leases, self._moved(keys[: len(leases)])))
        if len(leases) < len(keys):
            self._count("misses", 1)
        self._count("pinned_blocks", len(leases))
        self._count("pinned_bytes", sum(lease.nbytes for lease in leases))
        return messages.Pinned(tuple(messages.Place(lease.slot, lease.generation) for lease in leases))

    def _busy(self) -> messages.Busy:
        self._count("busy", 1)
        return messages.Busy()

    def _lease(self, keys: Sequence[messages.Key], holder: str) -> list[Lease]:
        """Hold as many of these as are here and within the holder's quota."""
        until = self._clock() + MAX_LEASE_S
        leases: list[Lease] = []
        for key in keys:
            lease = self._pool.lease(key.block_hash, key.rank, until, holder)
            if lease is None:
                break
            leases.append(lease)
        return leases

    def _moved(self, keys: Sequence[messages.Key]) -> tuple[bytes, ...]:
        """Those of these blocks that are the peer's from now on."""
        return tuple(key.block_hash for key in keys) if self._moving else ()

    def _release(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._pool.release(lease)

    def _check(self, keys: Sequence[messages.Key]) -> None:
        """A peer got wrong bytes: look whether they are wrong here, so that they are not served again."""
        suspects = [block.index for key in keys for block in self._pool.lookup([key.block_hash], key.rank, use=False)]
        self._count("corrupt", self._pool.check_slots(suspects))
