"""Leases: while one is held, its slot is not reused. Each ends by itself, so nobody can hold the pool for ever.

Not thread-safe, reads no clock: the pool calls it under its lock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from .errors import InvariantError

#: Longest time that one lease may be asked for, seconds. A holder that needs longer takes a new one.
MAX_LEASE_S: Final = 60.0
#: Bytes that one peer may hold at a time: what several pulls of it have under way, too few to pin a pool. One lease is
#: always granted, or a block larger than the quota could never be moved.
MAX_BYTES_PER_PEER: Final = 512 << 20
#: And at most this part of a pool.
PEER_SHARE: Final = 4


_K = TypeVar("_K")


def quota_of(pool_bytes: int) -> int:
    """Bytes that one peer may hold of a pool whose slots are so many bytes together."""
    return min(MAX_BYTES_PER_PEER, pool_bytes // PEER_SHARE)


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot held for `peer` until `until` (monotonic seconds)."""

    number: int
    slot: int
    generation: int
    peer: str
    until: float
    nbytes: int


class LeaseBook:
    """Who holds which slot until when. `quota_bytes`: what one peer may hold."""

    def __init__(self, quota_bytes: int = MAX_BYTES_PER_PEER) -> None:
        self.quota_bytes = quota_bytes
        self._numbers = 0
        self._live: dict[int, Lease] = {}
        self._ends: list[tuple[float, int]] = []
        self._by_slot: Counter[int] = Counter()
        self._by_peer: Counter[str] = Counter()  # bytes
        self.expired = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, slot: int) -> bool:
        """Whether a slot is held; call `expire` first."""
        return self._by_slot[slot] > 0

    def slots(self) -> Iterator[int]:
        """Slots that are held."""
        return (slot for slot, held in self._by_slot.items() if held > 0)

    def take(self, slot: int, generation: int, nbytes: int, *, peer: str, until: float, now: float) -> Lease | None:
        """Hold a slot of `nbytes`; None when the peer's quota is used up."""
        if peer in self._by_peer and self._by_peer[peer] + nbytes > self.quota_bytes:
            self.refused += 1
            return None
        self._numbers += 1
        lease = Lease(self._numbers, slot, generation, peer, min(until, now + MAX_LEASE_S), nbytes)
        self._live[lease.number] = lease
        heapq.heappush(self._ends, (lease.until, lease.number))
        self._by_slot[slot] += 1
        self._by_peer[peer] += nbytes
        return lease

    def give_back(self, lease: Lease) -> bool:
        """End a lease; False when it had ended already (then nothing changes: no count goes below zero)."""
        if self._live.pop(lease.number, None) is None:
            return False
        _take_off(self._by_slot, lease.slot, 1)
        _take_off(self._by_peer, lease.peer, lease.nbytes)
        if len(self._ends) > 64 + 2 * len(self._live):  # drop the ends of leases given back early
            self._ends = [(held.until, held.number) for held in self._live.values()]
            heapq.heapify(self._ends)
        return True

    def expire(self, now: float) -> list[int]:
        """End what is over; return the slots of the leases that ended."""
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= now:
            _, number = heapq.heappop(self._ends)
            lease = self._live.get(number)
            if lease is not None and self.give_back(lease):
                self.expired += 1
                ended.append(lease.slot)
        return ended

    def live(self, lease: Lease, now: float) -> bool:
        """Whether a lease still protects its slot."""
        return lease.number in self._live and now < lease.until

    def clear(self) -> None:
        """End all leases (the slots they speak of are no more)."""
        self._live.clear()
        self._ends.clear()
        self._by_slot.clear()
        self._by_peer.clear()

    def validate(self) -> None:
        """Check that all counts follow from the live leases."""
        if Counter(lease.slot for lease in self._live.values()) != self._by_slot:
            raise InvariantError("lease counts by slot are wrong")
        by_peer: Counter[str] = Counter()
        for lease in self._live.values():
            by_peer[lease.peer] += lease.nbytes
        if by_peer != self._by_peer:
            raise InvariantError("leased bytes by peer are wrong")


def _take_off(counter: Counter[_K], key: _K, n: int) -> None:
    counter[key] -= n
    if counter[key] == 0:
        del counter[key]
