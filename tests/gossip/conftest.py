"""Factories whose products are validated at every teardown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gossip.simulator import Simulator
from tests.gossip.lone import Lone


@pytest.fixture
def lone() -> Iterator[Callable[..., Lone]]:
    made: list[Lone] = []

    def make(*args: object, **kwargs: object) -> Lone:
        made.append(Lone(*args, **kwargs).start())  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.endpoint.validate()


@pytest.fixture
def simulator() -> Iterator[Callable[..., Simulator]]:
    made: list[Simulator] = []

    def make(*args: object, **kwargs: object) -> Simulator:
        made.append(Simulator(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.validate()
