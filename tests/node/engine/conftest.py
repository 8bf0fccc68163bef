"""What starts and watches processes is tested on both event loops."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

BOTH = ("test_supervisor",)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain = {"plain": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.stem in BOTH else plain
