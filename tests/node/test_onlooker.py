"""Looking at an engine without our connector: who is asked, when, and what an answer is worth."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

import pytest

from node.counted_hits import CountedHits
from node.engine.pace import MOST_S
from node.hits import ENOUGH
from node.meter import LoadMeter
from node.metrics import Metrics
from node.onlooker import HITS_EVERY_S, Onlooker
from tests.waiting import PATIENCE_S

PAGE = b"vllm:num_requests_running 5\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"


class Engine:
    """What there is to ask, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wanted = True
        self.page = PAGE
        #: Its counter of cache hits; None: it has none.
        self.hits: int | None = None
        self.asked: list[float] = []
        self.meter = LoadMeter(slots=8)
        self.counted = CountedHits()
        self.metrics = Metrics(lambda: self.now)
        self.onlooker = self.watched(self.read)

    def watched(self, read: Callable[[], Awaitable[bytes]]) -> Onlooker:
        return Onlooker(
            self.meter, self.counted, self.metrics, wanted=lambda: self.wanted, read=read, clock=lambda: self.now
        )

    async def read(self) -> bytes:
        self.asked.append(self.now)
        counter = b"" if self.hits is None else b'vllm:prefix_cache_hits_total{engine="0"} %d\n' % self.hits
        return self.page + counter

    async def turns(self, seconds: float) -> None:
        """A turn every tenth of a second."""
        for _ in range(round(seconds * 10)):
            await self.onlooker.turn()
            self.now = round(self.now + 0.1, 3)

    def load(self) -> tuple[int, int, float]:
        load = self.meter.vector(self.now, ready=True, draining=False)
        return load.running, load.waiting, load.kv_use

    def ended(self, count: int, *, found: int = 0) -> None:
        """So many prompts were promised a thousand tokens each, and found so many."""
        assert self.hits is not None
        for _ in range(count):
            self.counted.ended(1000, 1200)
            self.hits += found

    @property
    def compared(self) -> object:
        """Requests of which it is known what they found."""
        return self.metrics.hits.snapshot()["requests"]


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

    await engine.watched(read).turn()
    assert engine.load() == (0, 0, 0)


async def test_it_goes_on_after_whatever_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.onlooker.EVERY_S", 0.001)
    asked, third = 0, asyncio.Event()

    async def read() -> bytes:
        nonlocal asked
        asked += 1
        if asked == 3:
            third.set()
        raise RuntimeError("a bug")

    # However long the pause is, it is over when the clock is looked at again.
    times = itertools.count(0.0, 10 * MOST_S)
    onlooker = Onlooker(
        LoadMeter(), CountedHits(), Metrics(lambda: 0.0), wanted=lambda: True, read=read, clock=lambda: next(times)
    )
    running = asyncio.create_task(onlooker.run())
    await asyncio.wait_for(third.wait(), PATIENCE_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_that_finds_nothing_raises_the_alarm(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.hits = 100
    await engine.turns(1)
    engine.ended(ENOUGH)
    with caplog.at_level(logging.WARNING, "grapevine"):
        await engine.turns(HITS_EVERY_S)
    assert engine.metrics.hits.alarm and "0 %" in caplog.text
    page = engine.metrics.page()
    for line in (b"silent_zero_hits 1.0", b"predicted_cached_tokens_total 16000.0", b"actual_cached_tokens_total 0.0"):
        assert line in page
    engine.ended(4 * ENOUGH, found=1000)
    await engine.turns(HITS_EVERY_S)
    assert not engine.metrics.hits.alarm and b"actual_cached_tokens_total 64000.0" in engine.metrics.page()


async def test_load_and_hits_are_read_off_one_page_and_the_hits_now_and_then() -> None:
    engine = Engine()
    engine.hits = 100
    compared = []
    for _ in range(21):
        await engine.turns(1)
        engine.ended(1, found=1000)
        compared.append(engine.compared)
    assert engine.asked == list(range(21))
    assert compared == [0] * 10 + [10] * 10 + [20]
    assert engine.load() == (5, 2, 0.5)


async def test_no_time_is_lost_where_nothing_was_run_when_the_hits_were_due() -> None:
    engine = Engine()
    engine.hits = 100
    await engine.turns(2.5 * HITS_EVERY_S)
    assert not engine.counted.wanted
    engine.ended(1)
    await engine.turns(1)
    assert engine.compared == 1


@pytest.mark.parametrize("why", ["a connector", "another engine"])
async def test_what_was_promised_before_the_engine_was_away_is_compared_with_nothing(why: str) -> None:
    engine = Engine()
    engine.hits = 100
    await engine.turns(1)
    engine.ended(ENOUGH)
    if why == "a connector":
        engine.wanted = False
        await engine.turns(0.1)
        engine.wanted = True
    else:
        engine.hits = 0
    await engine.turns(2 * HITS_EVERY_S)
    assert engine.compared == 0 and not engine.counted.wanted
    engine.ended(1)
    await engine.turns(HITS_EVERY_S)
    assert engine.compared == 1


async def test_after_a_page_without_the_counter_it_begins_anew() -> None:
    engine = Engine()
    engine.hits = 100
    await engine.turns(1)
    engine.ended(ENOUGH)
    engine.hits = None
    await engine.turns(HITS_EVERY_S)
    engine.hits = 100
    await engine.turns(2 * HITS_EVERY_S)
    assert engine.compared == 0 and not engine.counted.wanted


async def test_hits_that_come_after_the_connector_are_dropped() -> None:
    engine = Engine()
    engine.hits = 100
    await engine.turns(1)
    engine.ended(ENOUGH)

    async def read() -> bytes:
        engine.wanted = False
        return await engine.read()

    await engine.watched(read).turn()
    assert engine.compared == 0 and engine.counted.wanted


async def test_an_engine_that_counts_no_hits_is_asked_for_its_load_all_the_same() -> None:
    engine = Engine()
    await engine.turns(1)
    engine.counted.ended(1000, 1200)
    await engine.turns(HITS_EVERY_S)
    assert engine.compared == 0 and engine.load() == (5, 2, 0.5) and engine.asked == list(range(11))
