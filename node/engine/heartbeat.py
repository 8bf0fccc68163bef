"""Does a busy engine compute? vLLM's HTTP server answers /health while its core hangs, so health alone does not tell.

Rules
1. A sign of life is a report of our connector, which runs in the core and speaks at each step, or a piece of an answer.
2. Only an engine with our connector and with requests is judged: without it, a long answer that is not streamed looks
   the same as none at all.
3. The time runs from the last sign, or from when it got work again, whichever is later.
"""

from __future__ import annotations

from collections.abc import Callable

#: Seconds without a sign after which a busy engine is taken to be stuck: far above the longest step.
STUCK_AFTER_S = 60.0


class Heartbeat:
    """Judges one engine. `at_work` says whether it has requests and would report on them."""

    def __init__(self, at_work: Callable[[], bool], limit_s: float = STUCK_AFTER_S) -> None:
        self._at_work = at_work
        self._limit_s = limit_s
        self._since: float | None = None

    def beat(self, now: float) -> None:
        """It gave a sign of life."""
        self._since = now

    def stuck_s(self, now: float) -> float | None:
        """Seconds without a sign when it is stuck, else None. To be asked regularly."""
        if not self._at_work():
            self._since = None
            return None
        if self._since is None:
            self._since = now
        silence = now - self._since
        return silence if silence >= self._limit_s else None
