"""The prefix digest as several threads use it: requests in the event loop, transfers and evictions anywhere.

Rules
1. One lock around the digest; what changed is published in the event loop.
2. The pool tells of evictions under its own lock, so they are queued here and withdrawn in the loop. Whatever claims
   blocks asks the pool first, in the loop: an eviction that it did not see is still in the queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvmigrate.messages import Chain
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Cleared, Evicted, PoolEvent
from kvmigrate.rescue import Wish
from node.digest import Changes, PrefixDigest
from node.flights import Flight
from node.kv_hot import Prefix, hottest, shared, wishes

#: Evicted blocks that wait for the event loop; beyond it the digest is emptied.
MAX_EVICTIONS = 1 << 16
#: Chunks, the most recently used, that the hottest prefixes are looked for in.
TOP_CHUNKS = 4096


class SharedDigest:
    """A `PrefixDigest` behind a lock. `follow` a pool before anything but `used` and `lost` is called."""

    def __init__(self, digest: PrefixDigest, publish: Callable[[Changes], None]) -> None:
        self._digest = digest
        self._publish = publish
        self._lock = threading.Lock()
        self._evictions: deque[bytes | None] = deque(maxlen=MAX_EVICTIONS)
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: BlockPool | None = None

    def __len__(self) -> int:
        return len(self._digest)

    def follow(self, pool: BlockPool) -> None:
        """Withdraw what this pool drops, from now on; call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        pool.subscribe(self._on_pool)

    def unfollow(self) -> None:
        """The pool is about to be closed."""
        if self._pool is not None:
            self._pool.unsubscribe(self._on_pool)
            self._pool = None

    # --- in the event loop

    def used(self, flight: Flight) -> None:
        """An engine that reports no blocks answered a request: it probably still holds its prompt."""
        with self._lock:
            changes = self._digest.used(
                flight.chunks, prompt_tokens=flight.text_tokens, prompt_bytes=flight.prompt_bytes
            )
        self._publish(changes)

    def promise(self, flight: Flight) -> None:
        """The engine got a request, and will report what it fills."""
        with self._lock:
            changes, flight.promised = self._digest.promise(
                flight.chunks, prompt_tokens=flight.text_tokens, prompt_bytes=flight.prompt_bytes
            )
        self._publish(changes)

    def unpromise(self, flight: Flight) -> None:
        """The engine is done with a request: what it has not filled by now does not come. Idempotent.

        What it computed and the pool never took it has still, perhaps.
        """
        if not flight.promised:
            return
        promised, flight.promised = flight.promised, ()
        with self._lock:
            withdrawn = self._digest.unpromise(promised, computed=flight.computed)
        self._publish(Changes(withdrawn=withdrawn))

    def confirm(self, flight: Flight, block_size: int) -> None:
        """Claim what the pool holds of the blocks that a request filled.

        Workers report to the pool over links of their own, so some blocks may become known only later: then the end
        of the request asks again, and what is stored shortly after that (`flights.Late`). What the pool never took (it
        was full) is never claimed.
        """
        if self._pool is None or not flight.chunks or not flight.unconfirmed:
            return
        held = len(self._pool.lookup(flight.unconfirmed, use=False))
        with self._lock:
            changes = self._digest.confirm(
                flight.chunks,
                flight.unconfirmed[:held],
                prompt_tokens=flight.prompt_tokens or len(flight.unconfirmed) * block_size,
                prompt_bytes=flight.prompt_bytes,
                block_size=block_size,
            )
        if held == len(flight.unconfirmed):
            flight.unconfirmed = ()
        self._publish(changes)

    def adopt(self, chains: Iterable[Chain]) -> None:
        """Claim what the pool holds of chains that a peer reported."""
        for chain in chains:
            held = len(self._pool.lookup(chain.hashes, use=False)) if self._pool is not None else 0
            with self._lock:
                changes = self._digest.adopt(chain.hashes[:held], chain.labels)
            self._publish(changes)

    def limit(self, max_tokens: int) -> None:
        """Claim no more than so many tokens; 0 = no limit."""
        with self._lock:
            withdrawn = self._digest.limit(max_tokens)
        self._publish(Changes(withdrawn=withdrawn))

    def engine_holds(self, tokens: int) -> None:
        """The KV cache of an engine that reports its blocks holds so many tokens; 0 = it does not say."""
        with self._lock:
            withdrawn = self._digest.engine_holds(tokens)
        self._publish(Changes(withdrawn=withdrawn))

    def lost(self) -> None:
        """The engine went down, and with it a cache that only it held."""
        with self._lock:
            withdrawn = self._digest.lost()
        self._publish(Changes(withdrawn=withdrawn))

    def top(self, most: int) -> list[Prefix]:
        """The prefixes that are used most, of those used last."""
        if self._pool is None:
            return []
        with self._lock:
            runs = self._digest.runs(TOP_CHUNKS)
        return shared(runs, self._pool.uses)[:most]

    # --- in any thread

    def resolve(self, chunks: Sequence[int]) -> tuple[bytes, ...]:
        """Block hashes that cover the longest known prefix of `chunks`."""
        with self._lock:
            return self._digest.resolve(chunks)

    def hottest(self, blocks: int) -> list[Chain]:
        """Chains of at most so many blocks in all, the hottest first."""
        pool = self._pool
        with self._lock:
            runs = self._digest.runs()
        return hottest(runs, pool.uses, blocks) if pool is not None else []

    def wishes(self) -> list[Wish]:
        """What should outlive this node, the hottest first (`node.kv_hot.wishes`)."""
        pool = self._pool
        with self._lock:
            runs = self._digest.runs()
        return wishes(runs, pool.uses) if pool is not None else []

    def _on_pool(self, event: PoolEvent) -> None:
        """Called under the pool's lock."""
        if isinstance(event, Evicted):
            self._evictions.append(event.block_hash)
        elif isinstance(event, Cleared):
            self._evictions.clear()
            self._evictions.append(None)
        else:
            return
        if not self._scheduled and self._loop is not None and not self._loop.is_closed():
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._withdraw)

    def _withdraw(self) -> None:
        self._scheduled = False
        full = len(self._evictions) == MAX_EVICTIONS
        withdrawn: list[int] = []
        promised: dict[int, None] = {}
        with self._lock:
            if full:
                self._evictions.clear()
                self._evictions.append(None)
            while self._evictions:
                block = self._evictions.popleft()
                changes = Changes(withdrawn=self._digest.clear()) if block is None else self._digest.evicted(block)
                withdrawn += changes.withdrawn
                promised |= dict.fromkeys(changes.promised)
                for chunk in changes.withdrawn:
                    promised.pop(chunk, None)
        self._publish(Changes(withdrawn=tuple(withdrawn), promised=tuple(promised)))
