"""One timer for each stream that is waited for: looks a few times a second whether silence has become too long.

Only silence that this process could have heard counts. A process that was stopped or starved finds a timer long overdue
and what came meanwhile still unread: of that time nobody can say that it was silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from node.relay.upstream import UpstreamAnswer, UpstreamError, UpstreamStalledError

#: Seconds between two looks.
LOOK_EVERY_S = 0.25
#: A look that comes later than this, in seconds, shows that nothing was heard for want of ears.
DEAF_S = 0.25


class Sentry:
    """Fails an answer, with ``error``, when ``judge``, given the seconds of silence, says why. Ends with `close`."""

    def __init__(
        self,
        upstream: UpstreamAnswer,
        judge: Callable[[float], str],
        *,
        error: type[UpstreamError] = UpstreamStalledError,
        on_stall: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._upstream = upstream
        self._judge = judge
        self._error = error
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._hearing = Hearing(time.monotonic())
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        silent_s = self._hearing.silent_s(time.monotonic(), self._upstream.waiting_since)
        if silent_s is not None and (why := self._judge(silent_s)):
            self._on_stall(why)
            self._upstream.fail(self._error(why))
            return
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)


class Hearing:
    """How much of a silence was really listened to. Pure; times are monotonic seconds."""

    __slots__ = ("_deaf_s", "_looked_at", "_since")

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._since: float | None = None
        self._deaf_s = 0.0

    def silent_s(self, now: float, since: float | None) -> float | None:
        """Seconds of silence at a look that was due `LOOK_EVERY_S` after the last one; None while nobody waits."""
        late_s = now - self._looked_at - LOOK_EVERY_S
        looked_at, self._looked_at = self._looked_at, now
        if since != self._since:
            self._since, self._deaf_s = since, 0.0
        if since is None:
            return None
        if late_s > DEAF_S:
            # Where the waiting began within that time, only what is behind it can have been missed.
            self._deaf_s += min(late_s, now - max(since, looked_at))
        return now - since - self._deaf_s
