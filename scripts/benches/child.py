"""A Python process that answers one JSON line per line that it is sent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import node

#: Where nodes and agents that a bench starts find the packages: where it has found them itself, whatever is installed.
PACKAGES = str(Path(node.__file__).parents[1])


class Child:
    """Runs a module as a process of its own; it ends with the `with` block.

    `python` is another interpreter, `environment` is added to ours, and what a `quiet` one says of itself is not shown.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env={**os.environ, **(environment or {})},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.communicate()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep all its threads from running: some poll for work even where there is none."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def ask(self, question: str) -> Any:
        """Send a line and give the answer. :raises RuntimeError: the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """Give the next line that it says, of JSON: others are passed over. :raises RuntimeError: it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args!r} has ended with {self._process.wait()}")
