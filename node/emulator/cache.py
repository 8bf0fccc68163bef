"""The paged KV cache of an emulated engine: blocks by key, least recently used ones give way.

Rules, those of vLLM's block pool as far as a router can see them:
1. A block is free, private to one request (being filled, or without a key), or keyed: found by its chained hash.
2. A keyed block is in use (counted) or idle. Only idle ones are evicted, the one idle for longest first.
3. A request gives its blocks back from its last to its first, so that a prefix shrinks from its end.
4. `evicted` is everything that lost its place since `take_evicted` was called.

Keys are opaque: 32-byte hashes in the server, numbers of a trace in simulations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class BlockCache:
    """`blocks` blocks. No block has a number: nobody outside could see it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = blocks
        self._private = 0
        self._users: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._evicted: list[Hashable] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._users or key in self._idle

    def __len__(self) -> int:
        """Keyed blocks."""
        return len(self._users) + len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that can be taken, evicting idle ones."""
        return self._free + len(self._idle)

    @property
    def use(self) -> float:
        """Share of the blocks that requests hold, 0..1; idle ones do not count (vLLM: kv_cache_usage_perc)."""
        return 1.0 - self.available / self.blocks

    def match(self, keys: Sequence[Hashable], limit: int) -> int:
        """How many of the first `limit` keys are held without a gap."""
        users, idle = self._users, self._idle
        limit = min(limit, len(keys))
        for count in range(limit):
            key = keys[count]
            if key not in users and key not in idle:
                return count
        return limit

    def idle_among(self, keys: Iterable[Hashable]) -> int:
        """How many of these are idle: taking them leaves so many fewer available."""
        return sum(key in self._idle for key in keys)

    def acquire(self, keys: Iterable[Hashable]) -> None:
        """Use these held blocks; they stay until released."""
        for key in keys:
            if key in self._idle:
                del self._idle[key]
                self._users[key] = 1
            else:
                self._users[key] += 1

    def allocate(self, count: int) -> bool:
        """Take `count` private blocks, or none when there are not so many."""
        if count > self.available:
            return False
        self._make_free(count)
        self._free -= count
        self._private += count
        return True

    def publish(self, key: Hashable) -> bool:
        """A private block is full and known by `key` now. False: another one is; this one stays private."""
        if key in self:
            return False
        self._private -= 1
        self._users[key] = 1
        return True

    def insert(self, keys: Sequence[Hashable]) -> None:
        """Put blocks in that came from outside (pulled from a peer), idle. What does not fit is left out."""
        fresh: list[Hashable] = []
        kept = 0
        for key in reversed(keys):  # so that the first becomes the most recently used
            if key in self._idle:
                self._idle.move_to_end(key)
                kept += 1
            elif key not in self._users:
                fresh.append(key)
        room = min(len(fresh), self.available - kept)
        if room <= 0:
            return
        self._make_free(room)
        for key in fresh[len(fresh) - room :]:
            self._free -= 1
            self._idle[key] = None

    def release(self, keys: Sequence[Hashable], private: int) -> None:
        """A request gives back the keyed blocks it used and its private ones."""
        self._private -= private
        self._free += private
        for key in reversed(keys):
            left = self._users[key] - 1
            if left:
                self._users[key] = left
            else:
                del self._users[key]
                self._idle[key] = None

    def clear(self) -> None:
        """Drop every idle block."""
        self._evicted += self._idle
        self._free += len(self._idle)
        self._idle.clear()

    def take_evicted(self) -> list[Hashable]:
        """Keys that were evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def validate(self) -> None:
        """Every invariant, for tests."""
        assert self._free >= 0 and self._private >= 0
        assert self._free + self._private + len(self._users) + len(self._idle) == self.blocks
        assert not self._users.keys() & self._idle.keys()
        assert all(count > 0 for count in self._users.values())

    def _make_free(self, count: int) -> None:
        while self._free < count:
            key, _ = self._idle.popitem(last=False)
            self._evicted.append(key)
            self._free += 1
