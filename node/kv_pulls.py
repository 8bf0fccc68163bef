"""Whom to pull a prompt's blocks from, for how long, and what is learnt from it."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvmigrate.link.server import EngineLink
from kvmigrate.planner import RateBook
from kvmigrate.pull_types import Part, PullResult, Reason, Source
from kvmigrate.puller import Puller
from node.kv_peers import PeerPulls
from node.kv_pulling import Pulled
from node.kv_sources import further
from node.metrics import Metrics
from node.plan import Plan

_log = logging.getLogger("grapevine.kv")

#: Least and longest time of a pull, seconds. One that is forced has the longest.
PULL_MIN_S = 1.0
PULL_MAX_S = 15.0


class Pulls:
    """Rates and totals by peer. `holders`: who holds how many of some chunks, in blocks that fit our engine.

    `rng` spreads pulls over those that are as good.
    """

    def __init__(
        self,
        name: str,
        *,
        address_of: Callable[[str], str | None],
        holders: Callable[[str, Sequence[int]], Mapping[str, int]],
        metrics: Metrics,
        rng: random.Random | None = None,
    ) -> None:
        self._name = name
        self._rng = rng or random.Random()
        self._address_of = address_of
        self._holders = holders
        self._metrics = metrics
        self.rates = RateBook()
        self.peers = PeerPulls()

    def sources(self, plan: Plan, chunks: Sequence[int]) -> dict[str, Source]:
        """The plan's source, then others that hold a part of that: they help where it pays, and give what it does not.

        Nothing where the plan's source has no address, or there are no chunks.
        """
        if plan.source is None or not chunks:
            return {}
        reach = plan.chunks or len(chunks)
        more = further(
            self._holders(plan.model, chunks),
            target=self._name,
            source=plan.source,
            reach=reach,
            rate=lambda name: self.rates.peer(name).net_bytes_s,
            tie=lambda name: self._rng.random(),
        )
        wanted = {plan.source: reach, **more}
        addresses = {name: self._address_of(name) for name in wanted}
        if addresses[plan.source] is None:
            return {}
        return {name: self._source(name, where, wanted[name]) for name, where in addresses.items() if where is not None}

    def _source(self, name: str, address: str, chunks: int) -> Source:
        rates = self.rates.peer(name)
        return Source(address, chunks, rates.net_bytes_s, rates.lookup_s)

    async def pull(
        self, puller: Puller, link: EngineLink, plan: Plan, chunks: Sequence[int], deadline_s: float, *, tag: str = ""
    ) -> Pulled:
        """Pull what the plan's source has of a prompt's chunks, and let the engine know. Returns who gave how much.

        Sources are told `tag`, which ties their part to the request's trace.
        """
        named = self.sources(plan, chunks)
        if not named:
            self._metrics.pulls.labels("no_address" if chunks else "nothing").inc()
            if chunks:
                _log.warning("no pull from %s: it serves no KV blocks now; the prompt is computed", plan.source)
            return {}
        sources = list(named.values())
        result = await puller.pull(sources, chunks[: sources[0].chunks], deadline_s, tag=tag)
        names = {source.address: name for name, source in named.items()}
        self.note(names, result)
        if result.blocks:
            await link.flush()
        came: Counter[str] = Counter()
        for part in result.parts:
            if part.blocks:  # whoever made the pull that this one joined may have asked others
                came[names.get(part.address, next(iter(named)))] += part.blocks
        return came

    def note(self, names: Mapping[str, str], result: PullResult) -> None:
        """Learn from a pull; `names` by address."""
        if result.joined:
            return  # noted by the request that it was made for, and perhaps from another source than ours
        # A pull that ended before it had a turn at its source, or whose threads came too late, is told of nevertheless.
        unheard = Part(next(iter(names)), result.reason, seconds=result.seconds, detail=result.detail)
        self.note_parts(names, result.parts or (unheard,), whole=result.reason is Reason.COMPLETE)
        self._metrics.pulled(str(result.reason), result.blocks, result.bytes, result.seconds, result.corrupt)
        self._metrics.taken_over.inc(result.taken_over)

    def note_parts(self, names: Mapping[str, str], parts: Iterable[Part], *, whole: bool = False) -> None:
        """Learn from what each source gave; `whole`: together they gave all."""
        for part in parts:
            name = names[part.address]
            if part.blocks:
                self.rates.pulled(name, part.bytes, part.seconds, part.lookup_s)
            elif part.reason in (Reason.SLOW, Reason.STALLED):  # all of that time it took to begin
                self.rates.pulled(name, 0, part.seconds, part.seconds)
            self.peers.note(name, part, whole=whole)
            self._metrics.pulled_way(part.way, part.bytes)


def pull_deadline(recompute_ms: float, *, forced: bool = False) -> float:
    """Seconds that a pull may take: as long as computing the same tokens would, within bounds.

    `forced`: somebody wants to see this pull, and is not served by an answer that does without.
    """
    return PULL_MAX_S if forced else min(max(recompute_ms / 1000.0, PULL_MIN_S), PULL_MAX_S)
