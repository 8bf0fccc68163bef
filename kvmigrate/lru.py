"""Which block to give up next: a segmented LRU.

New blocks enter probation; a block that was used twice moves to the protected segment. Victims come from probation
first, so a scan of prompts that nobody repeats passes through probation and leaves the hot prefixes alone. The
protected segment is limited; what overflows goes back to probation and has to prove itself again.

In each segment the first entry is the next victim. Callers use a chain from its tail to its head, so a deeper block
is always the older one and goes before its parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from typing import Final

from .errors import InvariantError

#: Share of all keys that may be protected, in percent. The rest lets new prefixes show whether they are used again.
PROTECTED_PERCENT: Final = 80
#: Uses that protect a block: the request that brought it is one, so 2 means that somebody came back for it.
USES_TO_PROTECT: Final = 2


class SegmentedLru:
    """Order of eviction over keys (block hashes). Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._protected_max = max(1, capacity * PROTECTED_PERCENT // 100)
        self._probation: OrderedDict[bytes, int] = OrderedDict()  # key -> uses
        self._protected: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: bytes) -> bool:
        return key in self._probation or key in self._protected

    def __iter__(self) -> Iterator[bytes]:
        """All keys, the next victim first."""
        yield from self._probation
        yield from self._protected

    @property
    def protected(self) -> int:
        """How many keys are protected."""
        return len(self._protected)

    def add(self, key: bytes) -> None:
        """Insert a new key, unused so far."""
        self._probation[key] = 0

    def remove(self, key: bytes) -> None:
        """Forget a key; KeyError when it is unknown."""
        if key in self._protected:
            del self._protected[key]
        else:
            del self._probation[key]

    def use(self, key: bytes) -> None:
        """Count a use of a known key and make it the youngest."""
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        uses = self._probation[key] + 1
        if uses < USES_TO_PROTECT:
            self._probation[key] = uses
            self._probation.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        if len(self._protected) > self._protected_max:
            demoted, _ = self._protected.popitem(last=False)
            self._probation[demoted] = 0

    def refresh(self, key: bytes) -> None:
        """Make a known key the youngest of its segment without counting a use."""
        segment = self._protected if key in self._protected else self._probation
        segment.move_to_end(key)

    def victim(self, kept: Container[bytes]) -> bytes | None:
        """Return the key to give up next, passing over those in `kept`; None when there is no other."""
        return next((key for key in self if key not in kept), None)

    def validate(self, keys: Iterable[bytes]) -> None:
        """Check that exactly `keys` are here, each once."""
        if self._probation.keys() & self._protected.keys():
            raise InvariantError("a key is in both segments")
        if set(self) != set(keys):
            raise InvariantError("eviction order and index disagree")
        if len(self._protected) > self._protected_max:
            raise InvariantError("protected segment is over its limit")
