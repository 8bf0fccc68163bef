"""When an emulated engine worked on which request, one line each in a file: who computed what, and was it twice?

Each line is a JSON object: `id` (the client's X-Request-Id), `at` (seconds of the host's monotonic clock, so that the
journals of several engines of a host can be compared), `tokens` (of its answer so far), `what` (`begin`, `token`,
`end`), `pid`. Lines are written at once: what a killed engine did is known up to `EVERY_S` before its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import orjson

#: Tokens of one request are noted at most this often, in seconds.
EVERY_S = 0.1


class Journal:
    """Appends, so that the next start of the same engine goes on in the same file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._clock = clock
        #: Requests at work: when they were noted last, and their tokens so far.
        self._open: dict[str, tuple[float, int]] = {}

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def begin(self, name: str) -> None:
        """The engine has a request."""
        now = self._clock()
        self._open[name] = (now, 0)
        self._write("begin", name, now, 0)

    def token(self, name: str, count: int) -> None:
        """It computed `count` more tokens for one."""
        now = self._clock()
        noted, tokens = self._open.get(name, (now, 0))
        first = tokens == 0
        if first or now - noted >= EVERY_S:
            noted = now
            self._write("token", name, now, tokens + count)
        self._open[name] = (noted, tokens + count)

    def end(self, name: str) -> None:
        """It has finished or aborted it."""
        _, tokens = self._open.pop(name, (0.0, 0))
        self._write("end", name, self._clock(), tokens)

    def _write(self, what: str, name: str, now: float, tokens: int) -> None:
        line = {"id": name, "at": round(now, 4), "tokens": tokens, "what": what, "pid": os.getpid()}
        os.write(self._file, orjson.dumps(line) + b"\n")
