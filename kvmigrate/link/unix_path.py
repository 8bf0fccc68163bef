"""The path of a Unix socket: its limits, and what a dead process leaves there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from kvmigrate.errors import LocalError

_MAX_PATH_BYTES: Final = 107  # sockaddr_un


def check_length(path: Path) -> None:
    """Refuse a path that does not fit a socket address with LocalError."""
    if len(str(path).encode()) > _MAX_PATH_BYTES:
        raise LocalError(f"engine link path is longer than {_MAX_PATH_BYTES} bytes: {path}")


def remove_dead_socket(path: Path) -> None:
    """Remove a socket file that nobody listens on; LocalError when a living process does."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise LocalError(f"engine link {path} belongs to another running process; give this node its own name")
