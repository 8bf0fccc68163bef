"""Should clients be sent to this node? And have those who ask (load balancers) heard that they should not any more?

Rules
1. Ready = some node can take a request, and we are not about to leave.
2. A node that leaves goes on accepting until each address that asked within the last `RECENT_S` has been told, plus
   `LAG_S` for what is already on its way; at most as long as its caller allows. Where nobody asks there is no delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Whoever asked within so many seconds is expected to ask again.
RECENT_S = 15.0
#: From the answer until no new client comes any more, seconds.
LAG_S = 0.5
#: Addresses remembered; the oldest are forgotten beyond.
MAX_ASKERS = 256


class Readiness:
    """The answer of `/readyz`. Lives in the event loop."""

    def __init__(self, serving: Callable[[], list[str]], clock: Callable[[], float]) -> None:
        self._serving = serving
        self._clock = clock
        #: When each address asked last, oldest first.
        self._askers: dict[str, float] = {}
        self._untold: set[str] = set()
        self._all_told = asyncio.Event()
        self.leaving = False

    def ask(self, who: str) -> list[str]:
        """The nodes that can take a request; none when clients are to go elsewhere."""
        self._askers.pop(who, None)
        self._askers[who] = self._clock()
        if len(self._askers) > MAX_ASKERS:
            del self._askers[next(iter(self._askers))]
        if not self.leaving:
            return self._serving()
        self._untold.discard(who)
        if not self._untold:
            self._all_told.set()
        return []

    def leave(self) -> None:
        """From now on clients are to go elsewhere."""
        if not self.leaving:
            self.leaving = True
            since = self._clock() - RECENT_S
            self._untold = {who for who, at in self._askers.items() if at >= since}

    async def told(self, limit_s: float) -> None:
        """Wait until rule 2 is met, at most ``limit_s`` seconds."""
        if not self._untold and not self._all_told.is_set():
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._all_told.wait()
                await asyncio.sleep(LAG_S)
        except TimeoutError:
            return
