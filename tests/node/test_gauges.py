"""Asking an engine how busy it is: who is asked, when, and what an answer is worth."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from node.engine.pace import MOST_S
from node.gauges import Gauges
from node.meter import LoadMeter
from tests.waiting import PATIENCE_S

PAGE = b"vllm:num_requests_running 5\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"


class Engine:
    """What there is to ask, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wanted = True
        self.page = PAGE
        self.asked: list[float] = []
        self.meter = LoadMeter(slots=8)
        self.gauges = Gauges(self.meter, wanted=lambda: self.wanted, read=self.read, clock=lambda: self.now)

    async def read(self) -> bytes:
        self.asked.append(self.now)
        return self.page

    async def turns(self, seconds: float) -> None:
        """A turn every tenth of a second."""
        for _ in range(round(seconds * 10)):
            await self.gauges.turn()
            self.now = round(self.now + 0.1, 3)

    def load(self) -> tuple[int, int, float]:
        load = self.meter.vector(self.now, ready=True, draining=False)
        return load.running, load.waiting, load.kv_use


async def test_an_engine_is_asked_once_a_second_and_its_answer_is_its_load() -> None:
    engine = Engine()
    await engine.turns(5)
    assert engine.asked == [0, 1, 2, 3, 4]
    assert engine.load() == (5, 2, 0.5)
    assert engine.meter.moves == 0


@pytest.mark.parametrize("page", [b"", b"vllm:demo 1\n", b"\xff" * 100, PAGE[:28]])
async def test_one_that_says_nothing_is_left_alone_more_and_more(page: bytes) -> None:
    engine = Engine()
    engine.page = page
    await engine.turns(70)
    assert engine.asked == [0, 2, 6, 14, 30, 62]
    assert engine.load() == (0, 0, 0)


async def test_with_a_connector_nobody_is_asked_and_without_it_again_at_once() -> None:
    engine = Engine()
    engine.wanted = False
    await engine.turns(5)
    assert engine.asked == []
    engine.wanted, engine.page = True, b""
    await engine.turns(20)
    engine.wanted = False
    await engine.turns(1)
    engine.wanted = True
    asked = len(engine.asked)
    await engine.turns(0.1)
    assert len(engine.asked) == asked + 1


async def test_an_answer_that_comes_after_the_connector_is_dropped() -> None:
    engine = Engine()

    async def read() -> bytes:
        engine.wanted = False
        return PAGE

    await Gauges(engine.meter, wanted=lambda: engine.wanted, read=read, clock=lambda: engine.now).turn()
    assert engine.load() == (0, 0, 0)


async def test_it_goes_on_after_whatever_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.gauges.EVERY_S", 0.001)
    asked, third = 0, asyncio.Event()

    async def read() -> bytes:
        nonlocal asked
        asked += 1
        if asked == 3:
            third.set()
        raise RuntimeError("a bug")

    # However long the pause is, it is over when the clock is looked at again.
    times = itertools.count(0.0, 10 * MOST_S)
    gauges = Gauges(LoadMeter(), wanted=lambda: True, read=read, clock=lambda: next(times))
    running = asyncio.create_task(gauges.run())
    await asyncio.wait_for(third.wait(), PATIENCE_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
