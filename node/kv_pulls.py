"""Whom to pull a prompt's blocks from, for how long, and what is learnt from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvmigrate.link.server import EngineLink
from kvmigrate.planner import RateBook
from kvmigrate.pull import Part, PullResult, Source
from kvmigrate.puller import Puller
from node.kv_peers import PeerPulls
from node.metrics import Metrics
from node.plan import Plan

#: Least and longest time of a pull, seconds.
PULL_MIN_S = 1.0
PULL_MAX_S = 15.0
#: Sources of one pull besides the plan's: those that hold most of the prompt.
MORE_SOURCES = 2


class Pulls:
    """Rates and totals by peer. `holders`: who holds how many of some chunks, in blocks that fit our engine."""

    def __init__(
        self,
        name: str,
        *,
        address_of: Callable[[str], str | None],
        holders: Callable[[str, Sequence[int]], Mapping[str, int]],
        metrics: Metrics,
    ) -> None:
        self._name = name
        self._address_of = address_of
        self._holders = holders
        self._metrics = metrics
        self.rates = RateBook()
        self.peers = PeerPulls()

    def sources(self, plan: Plan, chunks: Sequence[int]) -> dict[str, Source]:
        """The plan's source, then those that hold as much or more: they are asked for what it does not give.

        Nothing where the plan's source has no address, or there are no chunks.
        """
        if plan.source is None or not chunks:
            return {}
        wanted = {plan.source: plan.chunks or len(chunks)}
        for name, held in sorted(self._holders(plan.model, chunks).items(), key=lambda item: -item[1]):
            if len(wanted) <= MORE_SOURCES and held >= wanted[plan.source] and name != self._name:
                wanted.setdefault(name, held)
        addresses = {name: self._address_of(name) for name in wanted}
        if addresses[plan.source] is None:
            return {}
        return {name: Source(where, wanted[name]) for name, where in addresses.items() if where is not None}

    async def pull(
        self, puller: Puller, link: EngineLink, plan: Plan, chunks: Sequence[int], deadline_s: float, *, tag: str = ""
    ) -> int:
        """Pull what the plan's source has of a prompt's chunks, and let the engine know. Returns the blocks.

        Sources are told `tag`, which ties their part to the request's trace.
        """
        named = self.sources(plan, chunks)
        if not named:
            self._metrics.pulls.labels("no_address" if chunks else "nothing").inc()
            return 0
        sources = list(named.values())
        chunks = chunks[: max(source.chunks for source in sources)]
        result = await puller.pull(sources, chunks, deadline_s, tag=tag)
        self.note({source.address: name for name, source in named.items()}, result)
        if result.blocks:
            await link.flush()
        return result.blocks

    def note(self, names: Mapping[str, str], result: PullResult) -> None:
        """Learn from a pull; `names` by address."""
        if result.joined:
            return  # noted by the request that it was made for, and perhaps from another source than ours
        self.note_parts(names, result.parts)
        self._metrics.pulled(str(result.reason), result.blocks, result.bytes, result.seconds, result.corrupt)

    def note_parts(self, names: Mapping[str, str], parts: Iterable[Part]) -> None:
        """Learn from what each source gave."""
        for part in parts:
            name = names[part.address]
            if part.blocks:
                self.rates.pulled(name, part.bytes, part.seconds, part.lookup_s)
            self.peers.note(name, part)
            self._metrics.pulled_way(part.way, part.bytes)


def pull_deadline(recompute_ms: float) -> float:
    """Seconds that a pull may take: as long as computing the same tokens would, within bounds."""
    return min(max(recompute_ms / 1000.0, PULL_MIN_S), PULL_MAX_S)
