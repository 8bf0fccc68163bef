"""Which block to give up next: a segmented LRU with a memory of what it gave up.

New blocks enter probation; a block that was used twice moves to the protected segment. Victims come from probation
first, so a scan of prompts that nobody repeats passes through probation and leaves the hot prefixes alone. The
protected segment is limited; what overflows goes back to probation and has to prove itself again.

Conversations come back after pauses in which more passes than probation holds, and would never be seen twice. So the
hashes of the latest victims are remembered, as many as there are blocks: one that is stored again is protected at once.

Sources: the two segments are Karedla, Love and Wherry's (Caching strategies to improve disk system performance, 1994);
the list of victims is A1out of Johnson and Shasha's 2Q (VLDB 1994). Chosen on real traces, prefixes counted only from
their first block on: see docs/kv.md for the ratios and for what else was tried.

Counts of uses fade: they halve while as many uses pass as there is room for keys, a few times over. So what was hot
yesterday ranks below what is hot now (`node.kv_hot` offers the hottest to others), though it may still be here.

In each segment the first entry is the next victim. Callers use a chain from its tail to its head, so a deeper block
is always the older one and goes before its parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from typing import Final

from .errors import InvariantError

#: Share of all keys that may be protected, in percent. The rest lets new prefixes show whether they are used again.
PROTECTED_PERCENT: Final = 50
#: Uses that protect a block: the request that brought it is one, so 2 means that somebody came back for it.
USES_TO_PROTECT: Final = 2
#: Counts of uses stop here.
MAX_USES: Final = 1 << 20
#: Uses of all keys together in which counts halve, for each key that there is room for.
USES_TO_HALVE: Final = 4
#: A count is kept with the number of halvings that it has been through, above these bits.
_COUNT_BITS: Final = 21
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1


class SegmentedLru:
    """Order of eviction over keys (block hashes). Not thread-safe. `capacity`: keys that there is room for."""

    def __init__(self, capacity: int) -> None:
        self._protected_max = max(1, capacity * PROTECTED_PERCENT // 100)
        self._remembered_max = capacity
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._protected: OrderedDict[bytes, None] = OrderedDict()
        self._victims: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._halve_after = USES_TO_HALVE * max(1, capacity)
        self._used = self._halvings = 0
        #: Keys that were protected as soon as they were added.
        self.recalled = 0

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def __iter__(self) -> Iterator[bytes]:
        """All keys, the next victim first."""
        yield from self._probation
        yield from self._protected

    @property
    def protected(self) -> int:
        """How many keys are protected."""
        return len(self._protected)

    @property
    def unproven(self) -> int:
        """How many keys are not: nobody came back for them, or not for long."""
        return len(self._probation)

    def is_unproven(self, key: bytes) -> bool:
        """Whether a key is one of those."""
        return key in self._probation

    @property
    def remembered(self) -> int:
        """How many victims are remembered."""
        return len(self._victims)

    def uses(self, key: bytes) -> int:
        """How often a key was used since it was added, long ago counting less; 0 for an unknown one."""
        packed = self._uses.get(key, 0)
        count = packed & _COUNT_MASK
        faded = count >> min(_COUNT_BITS, self._halvings - (packed >> _COUNT_BITS))
        return max(faded, min(count, USES_TO_PROTECT))  # somebody came back for it, however long ago

    def hottest(self) -> Iterator[bytes]:
        """All keys, the next victim last: of a chain its head first."""
        yield from reversed(self._protected)
        yield from reversed(self._probation)

    def add(self, key: bytes) -> None:
        """Insert a new key, unused so far."""
        self._count(key, 0)
        if key in self._victims:
            del self._victims[key]
            self.recalled += 1
            self._protect(key)
        else:
            self._probation[key] = None

    def remove(self, key: bytes) -> None:
        """Forget a key; KeyError when it is unknown."""
        del self._uses[key]
        if key in self._protected:
            del self._protected[key]
        else:
            del self._probation[key]

    def give_up(self, key: bytes) -> None:
        """Remember a key that was removed to make room."""
        self._victims[key] = None
        self._victims.move_to_end(key)
        if len(self._victims) > self._remembered_max:
            self._victims.popitem(last=False)

    def use(self, key: bytes) -> None:
        """Count a use of a known key and make it the youngest."""
        if key not in self._uses:
            raise KeyError(key)
        uses = min(self.uses(key) + 1, MAX_USES)
        self._count(key, uses)
        self._used += 1
        if self._used >= self._halve_after:
            self._used = 0
            self._halvings += 1
        if key in self._protected:
            self._protected.move_to_end(key)
        elif uses < USES_TO_PROTECT:
            self._probation.move_to_end(key)
        else:
            del self._probation[key]
            self._protect(key)

    def refresh(self, key: bytes) -> None:
        """Make a known key the youngest of its segment without counting a use."""
        segment = self._protected if key in self._protected else self._probation
        segment.move_to_end(key)

    def give_way(self, key: bytes) -> None:
        """Make a known key the next victim. Its uses stay counted: whoever comes back for it protects it again."""
        if key in self._protected:
            del self._protected[key]
            self._probation[key] = None
        self._probation.move_to_end(key, last=False)

    def victim(self, kept: Container[bytes]) -> bytes | None:
        """Return the key to give up next, passing over those in `kept`; None when there is no other."""
        return next((key for key in self if key not in kept), None)

    def validate(self, keys: Iterable[bytes]) -> None:
        """Check that exactly `keys` are here, each once, and that all is within its bounds."""
        if self._probation.keys() & self._protected.keys():
            raise InvariantError("a key is in both segments")
        if set(self) != set(keys) or set(self) != self._uses.keys():
            raise InvariantError("eviction order and index disagree")
        if len(self._protected) > self._protected_max:
            raise InvariantError("protected segment is over its limit")
        if len(self._victims) > self._remembered_max or self._victims.keys() & self._uses.keys():
            raise InvariantError("the memory of victims is wrong")

    def _protect(self, key: bytes) -> None:
        self._protected[key] = None
        if len(self._protected) > self._protected_max:
            demoted, _ = self._protected.popitem(last=False)
            self._probation[demoted] = None
            self._count(demoted, 0)

    def _count(self, key: bytes, uses: int) -> None:
        self._uses[key] = self._halvings << _COUNT_BITS | uses
