"""Which counters of a sender have been seen: a window refuses a datagram that comes twice (RFC 4303, 3.4.3)."""

from __future__ import annotations

from typing import Final

#: Counters below the highest one within which a late datagram is still taken, once each.
WINDOW: Final = 64


class ReplayWindow:
    """The highest counter of one sender's session and a bit for each of the ``width`` up to it."""

    __slots__ = ("_mask", "_seen", "_top", "_width")

    def __init__(self, width: int = WINDOW) -> None:
        self._width = width
        self._mask = (1 << width) - 1
        self._top = -1
        self._seen = 0

    def fresh(self, counter: int) -> bool:
        """Say whether a datagram with this counter may still be taken. Changes nothing: it may yet be a forgery."""
        behind = self._top - counter
        return behind < 0 or (behind < self._width and not self._seen >> behind & 1)

    def mark(self, counter: int) -> None:
        """Note that the datagram with this counter was genuine."""
        ahead = counter - self._top
        if ahead > 0:
            self._seen = ((self._seen << ahead) | 1) & self._mask if ahead < self._width else 1
            self._top = counter
        else:
            self._seen |= 1 << -ahead
