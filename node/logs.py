"""The node's own log, on standard error: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import logging
import sys

import orjson

from node.settings import Settings

_CONSOLE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
#: Longest message of one record, characters: what a peer sent may be in it.
MAX_MESSAGE = 4000


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_MESSAGE],
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(told).decode()


class ConsoleLines(logging.Formatter):
    """A line for people; control characters of foreign text are made visible."""

    def __init__(self) -> None:
        super().__init__(_CONSOLE)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        """Return the line without the traceback."""
        text = record.message[:MAX_MESSAGE]
        record.message = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        return super().formatMessage(record)


def set_up(settings: Settings) -> None:
    """Send the log of this process to standard error in the form and from the level of the settings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else ConsoleLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("grapevine").setLevel(settings.log_level.upper())
