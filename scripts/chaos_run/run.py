"""One run: the cluster comes up, clients ask, the plan breaks things, all grows quiet, and the books are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random

import aiohttp

from chaos_run import journals, leaks
from chaos_run.asks import Asker
from chaos_run.client import Clients, open_session
from chaos_run.cluster import PRESET, Cluster, NotReady
from chaos_run.network import Network
from chaos_run.plan import Strike
from chaos_run.report import Report
from chaos_run.strikes import Striker
from node.emulator.config import preset

#: Requests a second for each node: about half of what its engine can do.
RATE_PER_NODE = 0.5


async def emulated(
    plan: Sequence[Strike], *, size: int, seconds: float, seed: int, rate: float, folder: Path, network: Network,
    say: Callable[[str], None],
) -> Report:  # fmt: skip
    """Run `plan` on `size` nodes with emulated engines. Raises `NotReady` when the cluster does not come up at all."""
    cluster = Cluster(size, folder, network)
    clients = Clients(cluster.nodes, Asker(seed, preset(PRESET)), Random(seed + 1))
    try:
        async with open_session() as session:
            await cluster.start_all(session)
            say(f"{size} nodes are ready; {len(plan)} strikes in {seconds:.0f} s, seed {seed}")
            striker = Striker(cluster, clients, session, rng=Random(seed + 2), say=say)
            watching = asyncio.create_task(clients.watch_ready(session))
            try:
                load = clients.steady(session, rate * size, asyncio.get_running_loop().time() + seconds)
                await _strike(plan, striker, load)
                await clients.drained()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            say("all requests have ended; looking for what is left of them")
            found = await _quiet(cluster, session)
        living = frozenset(engine.pid for engine in cluster.engines().values())
        verdict = _books(cluster, clients, living)
        found += [f"unfinished work: {text}" for text in verdict.unfinished]
        found += await cluster.stop_all()
        found += leaks.processes_left(folder)
    finally:
        cluster.kill_all()
    return Report(
        seed=seed, nodes=size, minutes=seconds / 60, engines="emulated", no_cuts=network.no_cuts, done=striker.done,
        counts=clients.counts, sent=clients.sent, verdict=verdict, leaks=found, failed=striker.failed,
    )  # fmt: skip


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


async def _quiet(cluster: Cluster, session: aiohttp.ClientSession) -> list[str]:
    try:
        await cluster.all_ready(session)
    except NotReady as error:
        return [f"the cluster did not come back: {error}"]
    return await leaks.look_until_none(session, cluster.nodes, cluster.files)


def _books(cluster: Cluster, clients: Clients, living: frozenset[int]) -> journals.Verdict:
    works = journals.read((name, node.journal) for name, node in cluster.nodes.items())
    entries = {sent.asked.rid: sent.entry for sent in clients.sent}
    return journals.judge(works, cluster.troubles, entries, living)
