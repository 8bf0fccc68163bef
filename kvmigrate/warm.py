"""Copy chains from a source into our pool, one after the other, until the limit or the deadline.

Either what is used most there (`run`), or what it offers because it is about to go (`take`). What is here already costs
a lookup and no transfer, so a copy that was cut short is continued by asking again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from . import messages
from .dialer import Dialer
from .errors import KvError, RemoteError
from .pool import BlockPool
from .pool_types import Room
from .pull import Ask, Pull
from .pull_types import Part, Reason, Source
from .transport import Deadline, unexpected

#: At most this part of our pool is filled: the rest is for what our own engine computes.
POOL_SHARE: Final = 2
#: Reasons after which the next chain is worth asking for.
_GO_ON: Final = frozenset({Reason.COMPLETE, Reason.NOTHING, Reason.GONE, Reason.CORRUPT})


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What came. `chains`: those that are here now, cut to what is here; `whole`: nothing is left to copy."""

    reason: Reason
    whole: bool = False
    chains: tuple[messages.Chain, ...] = ()
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    detail: str = ""
    parts: tuple[Part, ...] = ()


class Warming:
    """One copy, in one thread. `new_pull` for each chain; `begin_s` bounds the first question (seconds)."""

    def __init__(self, pool: BlockPool, dialer: Dialer, new_pull: Callable[[], Pull], begin_s: float) -> None:
        self._pool = pool
        self._dialer = dialer
        self._new_pull = new_pull
        self._begin_s = begin_s

    def run(self, address: str, max_bytes: int, deadline: Deadline) -> WarmResult:
        """Copy at most `max_bytes`; never raises for anything that a source or the network does."""
        geometry = self._pool.header.geometry
        if not geometry.slots:
            return WarmResult(Reason.UNCONFIGURED)
        room = geometry.slots // geometry.ranks // POOL_SHARE
        blocks = min(room, max_bytes // (geometry.block_bytes * geometry.ranks), messages.MAX_ENTRIES)
        try:
            chains = self._hottest(address, blocks, deadline.within(self._begin_s))
        except RemoteError as error:
            return WarmResult(Reason.REFUSED, detail=str(error))
        except (OSError, KvError) as error:
            return WarmResult(Reason.UNREACHABLE, detail=str(error))
        return self._copy(address, chains, deadline)

    def take(self, address: str, chains: Sequence[messages.Chain], shared: int, deadline: Deadline) -> WarmResult:
        """Copy these chains as far as there is room; never raises for anything that a source or the network does.

        Only the first `shared` of them may take the place of blocks that nobody came back for.
        """
        if not self._pool.header.geometry.slots:
            return WarmResult(Reason.UNCONFIGURED)
        for chain in reversed(chains):  # what is here of them is not what is evicted for the rest
            self._pool.touch(chain.hashes, use=False)
        kept = {block for chain in chains for block in chain.hashes}
        left, parts, full = sum(spare(self._pool, kept=kept)), list[Part](), False
        for place, chain in enumerate(chains):
            free, cold = spare(self._pool, left, kept)
            here = self._held(chain)
            fits = here + free + (cold if place < shared else 0)
            full = full or fits < len(chain.hashes)
            if min(fits, len(chain.hashes)) == here:
                continue
            if deadline.left() <= 0:
                return self._result(Reason.DEADLINE, chains, parts)
            part = self._new_pull().attempt(Source(address), _find(chain.hashes[:fits]), deadline)
            parts.append(part)
            left -= part.blocks
            if part.reason not in _GO_ON:
                return self._result(part.reason, chains, parts)
        return self._result(Reason.FULL if full else Reason.COMPLETE, chains, parts, whole=not full)

    def _hottest(self, address: str, blocks: int, deadline: Deadline) -> Sequence[messages.Chain]:
        transport, answer = self._dialer.ask(address, messages.Hot(blocks), deadline)
        if isinstance(answer, messages.Chains):
            self._dialer.keep(address, transport)
            return answer.chains
        self._dialer.discard(transport)
        raise unexpected(answer)

    def _copy(self, address: str, chains: Sequence[messages.Chain], deadline: Deadline) -> WarmResult:
        parts: list[Part] = []
        for chain in chains:
            if self._held(chain) == len(chain.hashes):
                continue
            if deadline.left() <= 0:
                return self._result(Reason.DEADLINE, chains, parts)
            part = self._new_pull().attempt(Source(address), _find(chain.hashes), deadline)
            parts.append(part)
            if part.reason not in _GO_ON:
                return self._result(part.reason, chains, parts)
        return self._result(Reason.COMPLETE if chains else Reason.NOTHING, chains, parts, whole=True)

    def _result(
        self, reason: Reason, chains: Sequence[messages.Chain], parts: Sequence[Part], *, whole: bool = False
    ) -> WarmResult:
        for chain in reversed(chains):  # the hottest become the youngest
            self._pool.touch(chain.hashes, use=False)
        return WarmResult(
            reason=reason,
            whole=whole,
            chains=tuple(cut for cut in map(self._here, chains) if cut.labels),
            blocks=sum(part.blocks for part in parts),
            bytes=sum(part.bytes for part in parts),
            seconds=sum(part.seconds for part in parts),
            detail=parts[-1].detail if parts else "",
            parts=tuple(parts),
        )

    def _here(self, chain: messages.Chain) -> messages.Chain:
        """Cut a chain to the blocks that are here, and to the chunks that these cover."""
        held = self._held(chain)
        return messages.Chain(chain.hashes[:held], tuple(label for label in chain.labels if 0 < label.end <= held))

    def _held(self, chain: messages.Chain) -> int:
        """Blocks from its front on that are here."""
        return len(self._pool.lookup(chain.hashes, use=False))


def spare(pool: BlockPool, most: int | None = None, kept: Collection[bytes] = ()) -> Room:
    """Places for blocks of others: what nobody misses but `kept`, `most` of them or a part of the pool."""
    geometry = pool.header.geometry
    most = geometry.slots // geometry.ranks // POOL_SHARE if most is None else most
    room = pool.room(kept)
    free = min(room.free, most)
    return Room(free, min(room.cold, most - free))


def _find(hashes: Sequence[bytes]) -> Ask:
    return lambda fingerprint, ranks: messages.Find(fingerprint, ranks, tuple(hashes))
