"""Before a node goes: what it alone holds of KV is copied to peers, so that nothing has to be computed twice.

Rules
1. The plan is pure (`kvmigrate.rescue`): the hottest prefixes that no other live node holds, to peers that can use them
   and have room. What has come of it is planned with again, until nothing is left, nobody takes more, or time is over.
2. Peers pull, as always: they are offered chains, and decide themselves how much of them they take (`Warming.take`).
   An offer ends within `STEP_S`, so whoever is cut off in the middle loses little; what has come stays.
3. Two peers pull at a time: half of the turns that a source has are left to requests that move away from here.
4. A peer that refuses, is gone, has no room or took nothing is not asked again, and the reason is told.
5. At the end the node waits, a short time, until it has heard itself that the heirs announce what they took: then
   everybody else hears of it too, and requests for these prefixes go there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kvmigrate import rescue
from kvmigrate.planner import MIN_RATE_BYTES, PRIOR_NET_BYTES_S
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Room
from kvmigrate.pull_types import FINE, Reason
from kvmigrate.rescue import Heir, Share, Why, Wish
from node.errors import RemoteError
from node.kv_heirs import busy
from node.kv_offer import STEP_S, Offer, Taken
from node.metrics import Metrics
from node.view import Candidate

#: Peers that are asked, those with the least to do.
MAX_HEIRS: Final = 8
#: Peers that pull at a time.
AT_A_TIME: Final = 2
#: Below so many seconds nothing more is begun.
LEAST_S: Final = 0.05
#: Part of the time left that a peer is given: its answer has to come back within it.
_FOR_IT: Final = 0.8
#: Longest wait for the heirs' announcements, seconds: a few rounds of gossip.
HEARD_S: Final = 3.0
LOOK_EVERY_S: Final = 0.02
#: Seconds in which prefixes are looked up in one go, between two looks of the event loop at everything else: in a large
#: cluster some are held by every node.
IN_ONE_GO_S: Final = 0.002
#: Ends of a copy after which the peer may take more.
_GO_ON: Final = FINE | {Reason.DEADLINE, Reason.FULL, Reason.GONE, Reason.CORRUPT}
#: Why a peer takes nothing more, for people.
_WORDS: Final = {
    Reason.NOTHING: "it found nothing here",
    Reason.UNREACHABLE: "it does not reach this node",
    Reason.REFUSED: "this node refused it",
    Reason.MISMATCH: "its blocks are not like ours",
    Reason.BUSY: "it is busy",
    Reason.STALLED: "no more came from here",
    Reason.DEADLINE: "it took too long",
    Reason.BROKEN: "the connection broke",
    Reason.FULL: "it has no room",
    Reason.UNCONFIGURED: "it keeps no blocks now",
}

_log = logging.getLogger("grapevine.kv")


class Cluster(Protocol):
    """What is known of the peers; `node.kv_heirs.Heirs` is one."""

    def candidates(self) -> dict[str, Candidate]:
        """Those that could take blocks, those with the least to do first."""
        ...

    def held(self, chunks: Sequence[int]) -> Mapping[str, int]:
        """Who else holds these chunks, and how many from the first on."""
        ...


class Prefixes(Protocol):
    """What we hold; `node.kv_digest.SharedDigest` is one."""

    def wishes(self) -> list[Wish]:
        """All of it, the hottest first."""
        ...


@dataclass(slots=True)
class _Peer:
    """A heir: the room that it had before it took anything, how fast it takes, what it has taken."""

    room: Room
    now: Room
    bytes_s: float
    load: float
    blocks: int = 0
    nbytes: int = 0
    has: set[bytes] = field(default_factory=set)
    #: Chunks that it should announce, in the order of their chains.
    announces: list[tuple[int, ...]] = field(default_factory=list)

    def heir(self, name: str) -> Heir:
        """As the plan sees it: what it has taken already does not count as cold, and as a part of its first room."""
        left = max(0, sum(self.room) - self.blocks)
        free = min(self.now.free, left)
        return Heir(name, free, min(max(0, self.now.cold - self.blocks), left - free), self.bytes_s, self.load)


class Rescue:
    """The copies that one drain makes. Lives in the event loop; `run` may be called again."""

    def __init__(
        self,
        name: str,
        *,
        pool: Callable[[], BlockPool | None],
        prefixes: Prefixes,
        cluster: Cluster,
        offer: Callable[[str, Offer], Awaitable[Taken]],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._pool = pool
        self._prefixes = prefixes
        self._cluster = cluster
        self._offer = offer
        self._metrics = metrics
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._refused: dict[str, str] = {}
        self._left: Mapping[Why, int] = {}
        self._seconds = 0.0
        self._said = ""
        self._changed = asyncio.Event()

    def stir(self) -> None:
        """Something that is known of the peers has changed."""
        self._changed.set()

    async def run(self, until: float) -> None:
        """Copy what can be copied, until this time of the clock at most. Raises nothing: a drain goes on without."""
        began = self._clock()
        try:
            await self._run(until)
        except Exception:
            _log.exception("copying KV blocks before the end failed")
        finally:
            self._seconds += self._clock() - began
            self._say()

    def status(self) -> dict[str, object]:
        """What came of it, as plain JSON values: blocks and bytes by heir, blocks left by reason, refusals."""
        return {
            "copied": {n: {"blocks": p.blocks, "bytes": p.nbytes} for n, p in self._peers.items() if p.blocks},
            "left": {why.value: count for why, count in self._left.items()},
            "refused": dict(self._refused),
            "seconds": round(self._seconds, 3),
        }

    def forget(self) -> None:
        """The drain is over: the next one begins anew."""
        self._peers, self._refused, self._left, self._seconds, self._said = {}, {}, {}, 0.0, ""

    async def _run(self, until: float) -> None:
        before = sum(peer.blocks for peer in self._peers.values())
        self._refused = {}
        asked = False
        while True:
            wishes, block_bytes = await self._wishes(until), self._block_bytes()
            if wishes and block_bytes and not asked:
                asked = True
                await self._meet(until)
            batch = rescue.first(wishes)
            plan = await self._plan(batch, block_bytes, until)
            if not plan.shares:
                self._left = _all_left(plan.left, wishes[len(batch) :])
                break
            await self._carry_out(plan.shares, until)
        if sum(peer.blocks for peer in self._peers.values()) > before:
            await self._heard(until)

    async def _plan(self, wishes: Sequence[Wish], block_bytes: int, until: float) -> rescue.Rescue:
        alive = self._cluster.candidates()
        heirs = [peer.heir(n) for n, peer in self._peers.items() if n in alive and n not in self._refused]
        seconds = until - self._clock()
        seconds = seconds if seconds > LEAST_S and block_bytes else 0.0
        return await asyncio.to_thread(rescue.plan, wishes, heirs, max(1, block_bytes), seconds)

    def _block_bytes(self) -> int:
        pool = self._pool()
        geometry = pool.header.geometry if pool is not None else None
        return geometry.block_bytes * geometry.ranks if geometry is not None and geometry.slots else 0

    async def _wishes(self, until: float) -> list[Wish]:
        """The prefixes that nobody else holds whole, the hottest first, as far as there is time to look."""
        wanted: list[Wish] = []
        found = await asyncio.to_thread(self._prefixes.wishes)
        alive, began = self._cluster.candidates().keys(), self._clock()
        for wish in found:
            if (now := self._clock()) - began > IN_ONE_GO_S:
                await asyncio.sleep(0)
                began = self._clock()
            if now > until:
                break
            held = self._held(wish, alive)
            if max(held.values(), default=0) < len(wish.chain.hashes):
                wanted.append(replace(wish, held=held))
        return wanted

    def _held(self, wish: Wish, alive: Collection[str]) -> dict[str, int]:
        """Blocks of a chain's front by node: as announced, and as the heirs have told."""
        labels = wish.chain.labels
        announced = self._cluster.held([label.chunk for label in labels])
        held = {name: labels[count - 1].end for name, count in announced.items() if count}
        for name, peer in self._peers.items():
            if name in alive:
                held[name] = max(held.get(name, 0), rescue.beginning(wish.chain, peer.has))
        return held

    async def _meet(self, until: float) -> None:
        """Ask some peers for their room, those that were not asked before."""
        strangers = [item for item in self._cluster.candidates().items() if item[0] not in self._peers]
        async with asyncio.TaskGroup() as group:
            for name, node in strangers[: max(0, MAX_HEIRS - len(self._peers))]:
                group.create_task(self._ask(name, node, until))

    async def _ask(self, name: str, node: Candidate, until: float) -> None:
        taken = await self._offered(name, Offer(), until)
        if taken is None:
            return
        if taken.reason is not Reason.NOTHING:
            self._refused[name] = _words(taken)
            return
        rate = node.load.rates.get(self._name, 0.0) or PRIOR_NET_BYTES_S
        self._peers[name] = _Peer(taken.room, taken.room, rate, busy(node))

    async def _carry_out(self, shares: Sequence[Share], until: float) -> None:
        turns = asyncio.Semaphore(AT_A_TIME)

        async def one(share: Share) -> None:
            async with turns:
                await self._give(share, until)

        async with asyncio.TaskGroup() as group:
            for share in shares:
                group.create_task(one(share))

    async def _give(self, share: Share, until: float) -> None:
        """One offer; what came of it is noted."""
        began = self._clock()
        if until - began <= LEAST_S:
            return
        offer = Offer(share.chains, share.shared, min(STEP_S, _FOR_IT * (until - began)))
        taken = await self._offered(share.heir, offer, until)
        if taken is None:
            return
        peer = self._peers[share.heir]
        known = len(peer.has)
        peer.now = taken.room
        peer.blocks += taken.blocks
        peer.nbytes += taken.nbytes
        self._metrics.rescued.inc(taken.blocks)
        for chain, held in zip(share.chains, taken.held, strict=False):
            peer.has.update(chain.hashes[:held])
            peer.announces.append(tuple(label.chunk for label in chain.labels if label.end <= held))
        seconds = self._clock() - began
        if taken.nbytes >= MIN_RATE_BYTES and seconds > 0:
            peer.bytes_s = taken.nbytes / seconds
        if taken.reason not in _GO_ON or len(peer.has) == known:
            self._refused[share.heir] = _words(taken)

    async def _offered(self, name: str, offer: Offer, until: float) -> Taken | None:
        """What a peer answers, within the time that is left; None when it does not, and then it is not asked again."""
        try:
            async with asyncio.timeout(max(LEAST_S, until - self._clock())):
                return await self._offer(name, offer)
        except TimeoutError:
            self._refused[name] = _WORDS[Reason.DEADLINE]
        except RemoteError as error:
            self._refused[name] = str(error)
        return None

    async def _heard(self, until: float) -> None:
        """Wait until the heirs' announcements have come here, a short time at most."""
        waited = [(name, chunks) for name, peer in self._peers.items() for chunks in peer.announces if chunks]
        try:
            async with asyncio.timeout(min(HEARD_S, until - self._clock())):
                while waited := self._unheard(waited):
                    self._changed.clear()
                    await self._changed.wait()
                    await asyncio.sleep(LOOK_EVERY_S)  # in a large cluster something changes all the time
        except TimeoutError:
            _log.info("not all peers have announced the KV blocks that they took over")

    def _unheard(self, waited: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
        alive = self._cluster.candidates()
        return [
            (name, chunks)
            for name, chunks in waited
            if name in alive and self._cluster.held(chunks).get(name, 0) < len(chunks)
        ]

    def _say(self) -> None:
        told = ", ".join(f"{p.blocks} ({p.nbytes / 1e6:.1f} MB) to {n}" for n, p in self._peers.items() if p.blocks)
        left = "; ".join(f"{count} are left: {why}" for why, count in self._left.items())
        refused = "; ".join(f"{name} took none more: {why}" for name, why in self._refused.items())
        words = "; ".join(filter(None, (told or "none", left, refused)))
        if words not in {"none", self._said}:
            self._said = words
            _log.info("KV blocks that only this node held, copied in %.1f s: %s", self._seconds, words)


def _all_left(left: Mapping[Why, int], more: Sequence[Wish]) -> dict[Why, int]:
    """What is left of the wishes that were planned for and of those behind them, for which it can only be the same."""
    total = Counter(left)
    lost = {block for wish in more for block in wish.chain.hashes[max(wish.held.values(), default=0) :]}
    if lost:
        total[max(left, key=lambda why: left[why], default=Why.TIME)] += len(lost)
    return dict(total)


def _words(taken: Taken) -> str:
    words = _WORDS.get(taken.reason, taken.reason.value)
    return f"{words} ({taken.detail})" if taken.detail else words
