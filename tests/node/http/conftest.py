from collections.abc import AsyncIterator

import pytest

from tests.node.fakes.cluster import Cluster, cluster
from tests.node.http.kv_pair import Pair


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    """No node yet: each test adds those that it needs."""
    async with cluster() as empty:
        yield empty


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with cluster() as nodes:
        both = Pair(nodes)
        yield both
        for connector in both.connectors.values():
            await connector.close()
