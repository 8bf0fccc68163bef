from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from kvmigrate.pool import BlockPool
from kvmigrate.puller import Puller
from kvmigrate.server import TransferServer

from .helpers import BLOCK, SECRET, Clock, chain, make_pool, store
from .served import LIMITS, resolve

#: Files whose tests run on both event loops.
BOTH = {"test_link_server", "test_good_sources", "test_bad_sources"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain = {"asyncio": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.stem in BOTH else plain


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pools(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., BlockPool]]:
    """Makes pools, and checks all their invariants when the test is over."""
    made: list[BlockPool] = []

    def make(blocks: int = 32, *, block: int = BLOCK, ranks: int = 1) -> BlockPool:
        directory = tmp_path / f"pool{len(made)}"
        directory.mkdir()
        pool = make_pool(directory, blocks, block=block, ranks=ranks, clock=clock)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.validate()
        pool.close()


@pytest.fixture
def pool(pools: Callable[..., BlockPool]) -> BlockPool:
    return pools()


@pytest.fixture
def source(pools: Callable[..., BlockPool]) -> BlockPool:
    pool = pools(64)
    store(pool, chain(20))
    return pool


@pytest.fixture
def target(pools: Callable[..., BlockPool]) -> BlockPool:
    return pools(64)


@pytest.fixture
def serve() -> Iterator[Callable[..., TransferServer]]:
    servers: list[TransferServer] = []

    def start(pool: BlockPool, **options: object) -> TransferServer:
        server = TransferServer(pool, resolve, SECRET, "c", **options)  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()
    for thread in threading.enumerate():
        if thread.name in {"kv-accept", "kv-serve"}:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
async def puller(target: BlockPool) -> AsyncIterator[Puller]:
    puller = Puller(target, SECRET, "c", name="target", limits=LIMITS)
    yield puller
    await puller.close()
    assert target.stats().granted == 0
