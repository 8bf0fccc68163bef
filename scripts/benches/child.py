"""A Python process that answers one JSON line per line that it is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Self


class Child:
    """Runs a module as a process of its own; it ends with the `with` block."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def ask(self, question: str) -> Any:
        """Send a line and give the answer. :raises RuntimeError: the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args!r} has ended with {self._process.wait()}")
        return json.loads(answer)
