"""A cluster that is up, its clients, and whoever strikes it; and what all that leaves, when it has grown quiet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from chaos_run import journals, leaks
from chaos_run.asks import Asker
from chaos_run.client import Clients, open_session
from chaos_run.cluster import Cluster, NotReady
from chaos_run.engines import PRESET, Engines
from chaos_run.learnt import Learner
from chaos_run.network import Network
from chaos_run.report import Report
from chaos_run.strikes import Striker
from node.emulator.config import preset


@dataclass(frozen=True, slots=True)
class Scene:
    """What a run is made of. `say` gets the lines for people."""

    engines: Engines
    size: int
    seed: int
    folder: Path
    network: Network
    say: Callable[[str], None]


@dataclass(slots=True)
class Stage:
    """Everything of one run."""

    cluster: Cluster
    clients: Clients
    striker: Striker
    session: aiohttp.ClientSession
    say: Callable[[str], None]
    seed: int

    async def report(self, seconds: float, more: dict[str, Any] | None = None) -> Report:
        """Wait until every request has ended, look for what is left of them, stop all, and read the books."""
        await self.clients.drained()
        self.say("all requests have ended; looking for what is left of them")
        found = await self._quiet()
        living = frozenset(engine.pid for engine in self.cluster.engines().values())
        counted = await self._counted()
        works = journals.read((name, node.journal) for name, node in self.cluster.nodes.items())
        entries = {sent.asked.rid: sent.entry for sent in self.clients.sent}
        verdict = journals.judge(works, self.cluster.troubles, entries, living)
        found += [f"unfinished work: {text}" for text in verdict.unfinished]
        found += await self.cluster.stop_all()
        found += leaks.processes_left(self.cluster.folder)
        return Report(
            seed=self.seed,
            nodes=len(self.cluster.nodes),
            minutes=round(seconds / 60, 2),
            engines=self.cluster.kind,
            no_cuts=self.cluster.network.no_cuts,
            done=self.striker.done,
            counts=self.clients.counts,
            sent=self.clients.sent,
            verdict=verdict,
            leaks=found,
            failed=self.striker.failed,
            more={**counted, **(more or {})},
        )

    async def _counted(self) -> dict[str, Any]:
        """What the nodes that still live have counted: streams carried, and how long those that moved were held up."""
        carried = moved = paused_s = 0.0
        for node in self.cluster.nodes.values():
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self.session.get(node.url + "/metrics") as answer:
                    page = await answer.text()
                carried += leaks.gauge(page, "grapevine_carries_total", 'result="carried"')
                moved += leaks.gauge(page, "grapevine_carry_pause_seconds_count", 'cause="moved"')
                paused_s += leaks.gauge(page, "grapevine_carry_pause_seconds_sum", 'cause="moved"')
        pause_ms = round(paused_s / moved * 1000.0, 1) if moved else None
        return {"carries_counted": int(carried), "moves_counted": int(moved), "pause_drain_ms": pause_ms}

    async def _quiet(self) -> list[str]:
        try:
            await self.cluster.all_ready(self.session)
        except NotReady as error:
            return [f"the cluster did not come back: {error}"]
        return await leaks.look_until_none(self.session, self.cluster.nodes, self.cluster.files)


@asynccontextmanager
async def stage(scene: Scene) -> AsyncIterator[Stage]:
    """All nodes ready, and clients that know it. Raises `NotReady`. Nothing is left running in the end."""
    seed, say = scene.seed, scene.say
    cluster = Cluster(scene.size, scene.folder, scene.network, scene.engines)
    asker = Asker(seed, preset(PRESET)) if scene.engines.journals else Learner(seed)
    clients = Clients(cluster.nodes, asker, Random(seed + 1))
    try:
        async with open_session() as session:
            await cluster.start_all(session)
            if isinstance(asker, Learner):
                say("learning the right answers")
                await asker.learn(session, next(iter(cluster.nodes.values())).url)
            striker = Striker(cluster, clients, session, rng=Random(seed + 2), say=say)
            watching = asyncio.create_task(clients.watch_ready(session))
            try:
                yield Stage(cluster, clients, striker, session, say, seed)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    finally:
        await cluster.clear_away()
