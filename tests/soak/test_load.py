"""Clients of a soak whose cluster is gone."""

import asyncio
import random
from pathlib import Path

import aiohttp
from localcluster import LocalCluster
from soak_run.load import Load

NAMES = ("north", "east")
ENOUGH = 200
"""Turns of the clients after which nobody else will ever run."""


async def test_clients_that_are_refused_at_once_leave_room_for_others(tmp_path: Path) -> None:
    """A closed session refuses without awaiting anything: clients that go on at once can never be stopped."""
    session = aiohttp.ClientSession()
    await session.close()
    load = Load(LocalCluster(tmp_path, NAMES), session, "m", random.Random(1))
    turns, others = 0, asyncio.Event()

    def over() -> bool:
        nonlocal turns
        turns += 1
        if turns == 1:
            asyncio.get_running_loop().call_soon(others.set)
        return others.is_set() or turns > ENOUGH

    await load.run(2, over)
    assert others.is_set() and turns < ENOUGH
    assert load.tally.failures["Session is closed"]
