"""One timer for each stream that is waited for: looks a few times a second whether silence has become too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from node.relay.upstream import UpstreamAnswer, UpstreamError, UpstreamStalledError

#: Seconds between two looks.
LOOK_EVERY_S = 0.25


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
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        since = self._upstream.waiting_since
        if since is not None and (why := self._judge(time.monotonic() - since)):
            self._on_stall(why)
            self._upstream.fail(self._error(why))
            return
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)
