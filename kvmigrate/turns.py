"""Turns at the sources: how many pulls may have one source at a time. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque


class Turns:
    """`most` at a time for each name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, name: str) -> None:
        """Wait for a turn, behind those who wait already."""
        if self.try_take(name):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(name, deque())
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):
                waiting.remove(turn)
            if not turn.cancelled():
                self.give_back(name)  # it came at the same moment
            raise
        finally:
            if not waiting:
                self._waiting.pop(name, None)

    def try_take(self, name: str) -> bool:
        """Take a turn if one is free and nobody waits for it."""
        if self._taken[name] >= self._most or self._waiting.get(name):
            return False
        self._taken[name] += 1
        return True

    def give_back(self, name: str) -> None:
        """End a turn: who waits for longest has the next one."""
        waiting = self._waiting.get(name, ())
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken[name] -= 1
        if not self._taken[name]:
            del self._taken[name]
