"""A port of one's own, and a node with workers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from tests.node.fakes.cluster import Cluster
from tests.node.workers.nodes import worked


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with worked() as running:
        yield running
