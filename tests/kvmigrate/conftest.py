from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from kvmigrate.pool import BlockPool

from .helpers import BLOCK, Clock, make_pool

#: Files whose tests run on both event loops.
BOTH = {"test_link_server", "test_transfer"}


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
