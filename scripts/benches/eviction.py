"""Hit ratios of the KV pool's eviction on the real traces, against plain LRU.

A request hits as many blocks as are here from its first block on; then all its blocks are stored and used, as the pool
does it. Each trace is played as it is, and once more with a one-off prompt of SCAN_BLOCKS after every third request,
whose blocks are not counted.
"""

from __future__ import annotations

import argparse
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from benches import traces
from benches.result import Result
from benches.traces import BLOCK_TOKENS, Arrival
from kvmigrate.lru import SegmentedLru

#: Pool sizes, in blocks of 512 tokens: of an 8B model (64 MiB a block) 64 to 640 GiB, of a small one a few GiB.
CAPACITIES = (1000, 5000, 10000)
#: Blocks of a trace that are played: the agents' trace has thirty times as many.
MOST_BLOCKS = 400_000
SCAN_EVERY = 3
SCAN_BLOCKS = 40
_SCAN = 1 << 60


class Cache(Protocol):
    """What is compared."""

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is here."""
        ...

    def store(self, blocks: Sequence[bytes]) -> None:
        """Store and use the blocks of a request."""
        ...


class PlainLru:
    """What it is compared with."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def store(self, blocks: Sequence[bytes]) -> None:
        """Make them the youngest, the head youngest of all."""
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block)
        while len(self._order) > self._capacity:
            self._order.popitem(last=False)


class PoolEviction:
    """The pool's own order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lru = SegmentedLru(capacity)

    def __contains__(self, key: bytes) -> bool:
        return key in self._lru

    def store(self, blocks: Sequence[bytes]) -> None:
        """Do as `kvmigrate.slot_table` does."""
        for block in blocks:
            if block in self._lru:
                continue
            while len(self._lru) >= self._capacity:
                victim = self._lru.victim(())
                assert victim is not None
                self._lru.remove(victim)
                self._lru.give_up(victim)
            self._lru.add(block)
        for block in reversed(blocks):
            if block in self._lru:
                self._lru.use(block)


def with_scan(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """A trace with prompts in between that nobody repeats."""
    fresh = _SCAN
    for number, arrival in enumerate(arrivals):
        yield arrival
        if number % SCAN_EVERY == 0:
            yield Arrival(arrival.at, 1, 1, tuple(range(fresh, fresh + SCAN_BLOCKS)))
            fresh += SCAN_BLOCKS


def _front(arrivals: Sequence[Arrival]) -> list[Arrival]:
    total = itertools.accumulate(len(arrival.blocks) for arrival in arrivals)
    return [arrival for arrival, blocks in zip(arrivals, total, strict=True) if blocks <= MOST_BLOCKS]


def hit_ratio(arrivals: Sequence[Arrival] | Iterator[Arrival], cache: Cache) -> float:
    """Blocks found from the front on, of all blocks asked for; those of one-off prompts do not count."""
    hits = asked = 0
    for arrival in arrivals:
        blocks = [block.to_bytes(8, "big") for block in arrival.blocks]
        if arrival.blocks and arrival.blocks[0] < _SCAN:
            asked += len(blocks)
            hits += next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
        cache.store(blocks)
    return hits / asked if asked else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(options: argparse.Namespace) -> Result:
    """Measure on every trace that is here."""
    result = Result("eviction", {})
    for name in ("conversation",) if options.quick else ("conversation", "claude_code"):
        path = traces.find(name)
        if path is None:
            result.note(f"no hit ratios on {name}: the trace is not here")
            continue
        arrivals = _front(traces.load(path))
        for capacity in CAPACITIES[1:2] if options.quick else CAPACITIES:
            for scan in (False, True):
                label = f"{name}{'_scan' if scan else ''}_n{capacity}"
                for kind, cache in (("hit_ratio", PoolEviction(capacity)), ("hit_ratio_lru", PlainLru(capacity))):
                    result.add(f"{kind}_{label}", hit_ratio(with_scan(arrivals) if scan else arrivals, cache))
    result.note(f"blocks of {BLOCK_TOKENS} tokens; the first {MOST_BLOCKS} blocks of a trace")
    return result
