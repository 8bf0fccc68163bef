"""One owner's slow state: a versioned map with gap-free deltas.

Rules
1. The owner gives every change the next version. A copy at version v agrees with the owner on every key whose last
   change is at most v; at the owner's version it is equal.
2. A delta (base, upto] applies to a copy that is at base or beyond; entries at or below the copy's version are skipped.
   It never leaves a gap: a copy behind the base ignores it.
3. Deletions are tombstones. The owner collects old ones; `floor` is the highest version ever collected. A copy may
   continue only if the giver's floor is not above max(own version, own floor); else it starts again from base 0 and
   takes that floor as its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

from gossip.errors import InvariantError, LocalError, RemoteError
from gossip.limits import MAX_DELTA_ENTRIES, MAX_KEY_BYTES, MAX_VALUE_BYTES
from gossip.messages import SlowDelta

#: Upper bound, in bytes, of what one entry costs beside its key and value.
_ENTRY_OVERHEAD = 14

Changes = tuple[tuple[bytes, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Applied:
    """What a delta did to a copy. `reset`: everything held before was dropped first."""

    reset: bool
    changes: Changes


class SlowMap:
    """The map of one boot of one owner, at the owner or as a copy."""

    def __init__(self, name: str, boot: int) -> None:
        self.name = name
        self.boot = boot
        self.version = 0
        self.floor = 0
        self._live: dict[bytes, bytes] = {}
        #: Key to version, in the order of versions, tombstones included: a change moves its key to the end.
        self._log: dict[bytes, int] = {}
        #: At the owner: (when, key, version) of every deletion, oldest first.
        self._graves: deque[tuple[float, bytes, int]] = deque()

    @property
    def live(self) -> Mapping[bytes, bytes]:
        """The keys that exist; a read-only view that follows the map."""
        return MappingProxyType(self._live)

    @property
    def entries(self) -> int:
        """How many keys are held, deleted ones included."""
        return len(self._log)

    @property
    def tombstones(self) -> int:
        """How many deletions are remembered."""
        return len(self._log) - len(self._live)

    # --- at the owner -------------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes, max_keys: int) -> None:
        """Set a key; the same value again is no change.

        :raises LocalError: key or value too large, or too many keys; nothing is changed.
        """
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise LocalError(f"key has {len(key)} bytes, 1 to {MAX_KEY_BYTES} are allowed")
        if len(value) > MAX_VALUE_BYTES:
            raise LocalError(f"value has {len(value)} bytes, {MAX_VALUE_BYTES} is the limit")
        old = self._live.get(key)
        if old == value:
            return
        if old is None and len(self._live) >= max_keys:
            raise LocalError(f"slow state holds {max_keys} keys already, which is the limit")
        self._live[key] = value
        self._advance(key)

    def delete(self, key: bytes, now: float) -> None:
        """Remove a key; an unknown one is no change."""
        if self._live.pop(key, None) is not None:
            self._advance(key)
            self._graves.append((now, key, self.version))

    def collect(self, now: float, keep_s: float, most: int) -> None:
        """Drop tombstones older than `keep_s` seconds, and the oldest beyond `most`."""
        while self._graves and (len(self._graves) > most or now - self._graves[0][0] >= keep_s):
            _, key, version = self._graves.popleft()
            if self._log.get(key) == version:  # not put again since
                del self._log[key]
                self.floor = max(self.floor, version)

    def _advance(self, key: bytes) -> None:
        self.version += 1
        self._log.pop(key, None)
        self._log[key] = self.version

    # --- giving -------------------------------------------------------------------------------------------------------

    def delta(self, base: int, floor: int, max_bytes: int) -> SlowDelta:
        """Give what follows `base` for a copy with that `floor`, within `max_bytes`, or the beginning of everything."""
        if self.floor > max(base, floor):
            base = 0
        entries: list[tuple[bytes, bytes | None, int]] = []
        upto = self.version
        for key, version in self._after(base):
            value = self._live.get(key)
            max_bytes -= len(key) + len(value or b"") + _ENTRY_OVERHEAD
            if (max_bytes < 0 and entries) or len(entries) >= MAX_DELTA_ENTRIES:
                upto = entries[-1][2]
                break
            entries.append((key, value, version))
        return SlowDelta(self.name, self.boot, base, upto, self.version, self.floor, tuple(entries))

    def _after(self, base: int) -> list[tuple[bytes, int]]:
        if base == 0:
            return list(self._log.items())
        newest_first = takewhile(lambda item: item[1] > base, reversed(self._log.items()))
        return list(newest_first)[::-1]

    # --- taking -------------------------------------------------------------------------------------------------------

    def apply(self, delta: SlowDelta, max_keys: int, max_tombstones: int) -> Applied | None:
        """Move this copy forward; None when the delta does not connect or brings nothing.

        :raises RemoteError: the owner holds more than this node is willing to copy; nothing is changed.
        """
        reset = delta.floor > max(self.version, self.floor)
        if reset and delta.base != 0:
            return None
        if not reset and (delta.base > self.version or delta.upto <= self.version):
            return None
        held = 0 if reset else len(self._log)
        if held + len(delta.entries) > max_keys + max_tombstones:
            fresh = sum(1 for key, _, _ in delta.entries if key not in self._log)
            if held + fresh > max_keys + max_tombstones:
                raise RemoteError(f"slow state of {self.name} is larger than allowed here")
        had = bool(self._log)
        if reset:
            self._clear()
        changes = self._take(delta)
        self.version = delta.upto
        if delta.floor > self.floor:
            self.floor = delta.floor
            self._prune()
        return Applied(reset and had, changes)

    def _take(self, delta: SlowDelta) -> Changes:
        changes: list[tuple[bytes, bytes | None]] = []
        for key, value, version in delta.entries:
            if version <= self.version:
                continue
            old = self._live.get(key)
            self._log.pop(key, None)
            self._log[key] = version
            if value is None:
                self._live.pop(key, None)
            else:
                self._live[key] = value
            if value != old:
                changes.append((key, value))
        return tuple(changes)

    def _prune(self) -> None:
        """Follow the owner: tombstones up to a floor that we have passed are of no use to anybody."""
        if self.tombstones:
            upto = min(self.floor, self.version)
            old = list(takewhile(lambda item: item[1] <= upto, self._log.items()))
            for key, _ in old:
                if key not in self._live:
                    del self._log[key]

    def _clear(self) -> None:
        self._live.clear()
        self._log.clear()
        self.version = 0

    def validate(self) -> None:
        """Check rule 1 as far as one map shows it. :raises InvariantError: it contradicts itself."""
        last = 0
        for key, version in self._log.items():
            if not last < version <= self.version:
                raise InvariantError(f"slow map {self.name}: {key!r} at {version} after {last}, map at {self.version}")
            last = version
        if not self._live.keys() <= self._log.keys():
            raise InvariantError(f"slow map {self.name}: live keys outside the log")
