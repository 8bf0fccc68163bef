"""The node's own log, on standard error: lines for people, or one JSON object a line for machines.

What is logged while a request is worked on carries its id, without anybody passing it on: `set_request` notes it in
the context of the task.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

import orjson

from node.settings import Settings

_CONSOLE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
#: Longest message of one record, characters: what a peer sent may be in it.
MAX_MESSAGE = 4000

_request: ContextVar[str] = ContextVar("grapevine_request", default="")

#: Note the id of the request that the running task works on from now on.
set_request = _request.set


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def __init__(self, node: str, worker: int = 0) -> None:
        super().__init__()
        self._node = node
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": self._node,
            "message": record.getMessage()[:MAX_MESSAGE],
        }
        if self._worker:
            told["worker"] = self._worker
        if rid := _request.get():
            told["request_id"] = rid
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(told, default=str).decode()


class ConsoleLines(logging.Formatter):
    """A line for people; control characters of foreign text are made visible."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__(_CONSOLE.replace("%(name)s:", f"%(name)s: worker {worker}:") if worker else _CONSOLE)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        """Return the line without the traceback."""
        text = record.message[:MAX_MESSAGE]
        record.message = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        line = super().formatMessage(record)
        return f"{line} [{rid}]" if (rid := _request.get()) else line


def set_up(settings: Settings, *, worker: int = 0) -> None:
    """Send the log of this process to standard error in the form and from the level of the settings.

    ``worker``: the number of a worker, which is told in each line.
    """
    form = settings.log_format
    if form == "auto":
        form = "console" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(settings.name, worker) if form == "json" else ConsoleLines(worker))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("grapevine").setLevel(settings.log_level.upper())
    # An interface without multicast is a warning to it, with a traceback; `assembly` says it where nothing is left.
    logging.getLogger("zeroconf").setLevel(logging.WARNING if settings.log_level == "debug" else logging.ERROR)
