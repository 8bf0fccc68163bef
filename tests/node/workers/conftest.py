"""A port of one's own."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
