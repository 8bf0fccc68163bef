"""Named deadlines in one heap. Setting a name again moves it; cancelling is lazy."""

from __future__ import annotations

import enum
import heapq


class Timer(enum.IntEnum):
    """What a deadline is for; with a name or number it makes the key."""

    PROBE = 1  # the next round-robin probe
    PROBE_DIRECT = 2  # (probe seq) direct ping unanswered: go indirect
    PROBE_END = 3  # (probe seq) give up: suspect
    RELAY = 4  # (relay seq) a ping on behalf of another: send the nack
    SUSPICION = 5  # (name) declare dead
    GOSSIP = 6
    PUSH_PULL = 7
    REDIAL = 8
    REAP = 9
    SESSION = 10  # (session) the shell owes us an answer


Key = tuple[Timer, str | int]
#: Time, order of setting, key.
_Entry = tuple[float, int, Key]


class Timers:
    """A heap of (time, order, key) where only the latest setting of a key counts."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        #: Each key's entry in the heap that counts.
        self._live: dict[Key, _Entry] = {}
        self._order = 0

    def __len__(self) -> int:
        return len(self._live)

    def set(self, key: Key, at: float) -> None:
        """Let `key` fire at `at`, and at no other time."""
        self._order += 1
        entry = self._live[key] = (at, self._order, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._rebuild()

    def cancel(self, key: Key) -> None:
        """Forget `key`; unknown is fine."""
        self._live.pop(key, None)

    def at(self, key: Key) -> float | None:
        """When `key` fires, or None."""
        live = self._live.get(key)
        return live[0] if live else None

    def next_deadline(self) -> float | None:
        """Give the earliest deadline, or None."""
        entry = self._first()
        return entry[0] if entry is not None else None

    def pop_due(self, now: float) -> Key | None:
        """Take the earliest key that is due, or None."""
        entry = self._first()
        if entry is None or entry[0] > now:
            return None
        heapq.heappop(self._heap)
        del self._live[entry[2]]
        return entry[2]

    def shift(self, seconds: float) -> None:
        """Move every deadline later: for a process that was stopped and must not blame others for it."""
        self._live = {key: (at + seconds, order, key) for at, order, key in self._live.values()}
        self._rebuild()

    def _first(self) -> _Entry | None:
        """Give the earliest entry, after dropping those in front of it that were moved or cancelled."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            counts = live.get(entry[2])
            if counts is not None and counts[1] == entry[1]:
                return entry
            heapq.heappop(heap)
        return None

    def _rebuild(self) -> None:
        self._heap = list(self._live.values())
        heapq.heapify(self._heap)
