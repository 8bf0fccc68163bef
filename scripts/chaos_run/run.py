"""The two runs: a seeded plan of strikes, and a rolling restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence

from chaos_run.client import End
from chaos_run.plan import Strike, What
from chaos_run.report import Report, milliseconds
from chaos_run.stage import Scene, Stage, stage
from chaos_run.strikes import Striker

#: Share of the measured capacity at which nodes are restarted one by one.
ROLLING_SHARE = 0.7
#: How capacity is measured: clients for each node that send one request after the other, seconds before it counts and
#: while it does.
CAPACITY_WIDTH, CAPACITY_WARM_S, CAPACITY_S = 16, 8.0, 20.0


async def planned(scene: Scene, plan: Sequence[Strike], seconds: float, rate: float) -> Report:
    """Carry out `plan` under steady load, `rate` requests a second for each node. Raises `NotReady`."""
    async with stage(scene) as on:
        scene.say(f"{scene.size} nodes are ready; {len(plan)} strikes in {seconds:.0f} s, seed {scene.seed}")
        until = asyncio.get_running_loop().time() + seconds
        await _strike(plan, on.striker, on.clients.steady(on.session, rate * scene.size, until))
        return await on.report(seconds)


async def rolling(scene: Scene, seconds: float, rate: float | None) -> Report:
    """Restart each node in turn, after `seconds` without a disturbance.

    `rate`: requests a second for each node. None: `ROLLING_SHARE` of the capacity, that is measured first.
    """
    async with stage(scene) as on:
        capacity = await _capacity(on, CAPACITY_WIDTH * scene.size) if rate is None else None
        rate = rate * scene.size if rate is not None else (capacity or 0.0) * ROLLING_SHARE
        can = f" answer {capacity:.2f} requests/s and" if capacity is not None else ""
        scene.say(f"{scene.size} nodes{can} get {rate:.2f} now, {seconds:.0f} s undisturbed")
        load = asyncio.create_task(on.clients.steady(on.session, rate, float("inf")))
        begun = time.monotonic()
        await asyncio.sleep(seconds)
        rolled = time.monotonic()
        for number, name in enumerate(on.cluster.nodes):
            await on.striker.strike(Strike(number, round(time.monotonic() - begun, 1), What.RESTART, name, 0.0))
        ended = time.monotonic()
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        calm, roll = _first_tokens(on, begun, rolled), _first_tokens(on, rolled, ended)
        more = {
            "capacity_rps": None if capacity is None else round(capacity, 2),
            "rate_rps": round(rate, 2),
            "rolling_s": round(ended - rolled, 1),
            "ttft_calm_p50_ms": milliseconds(calm, 0.5),
            "ttft_calm_p99_ms": milliseconds(calm, 0.99),
            "ttft_rolling_p50_ms": milliseconds(roll, 0.5),
            "ttft_rolling_p99_ms": milliseconds(roll, 0.99),
        }
        return await on.report(ended - begun, more)


async def _strike(plan: Sequence[Strike], striker: Striker, load: Coroutine[None, None, None]) -> None:
    """Do the plan while the load runs."""
    loop = asyncio.get_running_loop()
    begun, loading = loop.time(), loop.create_task(load)
    strikes: list[asyncio.Task[None]] = []
    for strike in plan:
        await asyncio.sleep(max(0.0, begun + strike.at_s - loop.time()))
        strikes.append(loop.create_task(striker.strike(strike)))
    await loading
    await asyncio.gather(*strikes)


async def _capacity(on: Stage, width: int) -> float:
    """Requests a second that are answered when there are always `width` of them."""
    counts_from = time.monotonic() + CAPACITY_WARM_S
    until = counts_from + CAPACITY_S
    await on.clients.closed_loop(on.session, width, until)
    ended = [sent.ended for sent in on.clients.sent if sent.end is End.RIGHT]
    return sum(counts_from <= at < until for at in ended) / CAPACITY_S


def _first_tokens(on: Stage, since: float, until: float) -> list[float]:
    """Seconds to the first token of the streams that began then, sorted."""
    return sorted(s.first_s for s in on.clients.sent if s.first_s is not None and since <= s.begun < until)
