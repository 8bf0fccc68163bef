"""The engine's output: a file of bounded size and the last lines in memory."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import BinaryIO

#: Size at which the file is moved to `.1` (and the old `.1` lost), bytes.
MAX_FILE_BYTES = 8 * 1024 * 1024
#: Lines kept in memory: a failed start prints its cause within these, tracebacks of three processes included.
TAIL_LINES = 600
#: Longest line kept, bytes; the rest of a longer one is dropped.
MAX_LINE_BYTES = 4096


class LineSplitter:
    """Turns chunks of bytes into lines; a carriage return ends a line too, as progress bars use it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines completed by `data`, without their ends and without empty ones."""
        *complete, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[:MAX_LINE_BYTES]
        return [_text(line) for line in complete if line.strip()]

    def close(self) -> list[str]:
        """What is left without an end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest.strip() else []


class EngineLog:
    """Keeps the output of the engine; a disk that is full or read-only costs the file, never the node."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file: BinaryIO | None = None
        self._size = 0

    def open(self) -> None:
        """Open the file for appending; makes its directory."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._size = self.path.stat().st_size

    def begin(self, title: str) -> None:
        """Start of a new engine process: the tail holds only its lines."""
        self._tail.clear()
        self._write(f"--- {title}\n")

    def add(self, line: str) -> None:
        """Keep one line."""
        self._tail.append(line)
        self._write(line + "\n")

    def tail(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._tail)

    def close(self) -> None:
        """Close the file; lines are kept in memory still."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        data = text.encode()
        with contextlib.suppress(OSError):
            if self._size + len(data) > self._max_bytes:
                self._rotate()
            self._size += self._file.write(data)

    def _rotate(self) -> None:
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        if self._file is not None:
            self._file.close()
        self._file = self.path.open("ab", buffering=0)
        self._size = 0


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
