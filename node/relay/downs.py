"""Who wants to know at once when a peer is declared dead: the requests that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: An answer from a peer that gossip declared dead has this many seconds to show that it lives.
DEATH_GRACE_S = 2.0


class Downs:
    """Callbacks by peer; each lives no longer than its request, so the table is bounded by admission."""

    def __init__(self) -> None:
        self._callbacks: dict[str, set[Callable[[], None]]] = {}
        self._followers: list[Callable[[str], None]] = []

    def subscribe(self, follower: Callable[[str], None]) -> None:
        """Call this with the name of every peer that is declared dead."""
        self._followers.append(follower)

    @contextmanager
    def watch(self, name: str, callback: Callable[[], None]) -> Iterator[None]:
        """Call ``callback`` if ``name`` goes down while the block runs."""
        waiting = self._callbacks.setdefault(name, set())
        waiting.add(callback)
        try:
            yield
        finally:
            waiting.discard(callback)
            if not waiting and self._callbacks.get(name) is waiting:
                del self._callbacks[name]

    def down(self, name: str) -> None:
        """Tell everybody who waits for ``name``."""
        for follower in self._followers:
            follower(name)
        for callback in tuple(self._callbacks.get(name, ())):
            callback()
