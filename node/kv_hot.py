"""Which prefixes are used most here: for people, and for a peer that wants to begin with them. Pure.

A run (one prompt's blocks) is offered twice: first up to its deepest chunk that somebody came back for, by how often;
then whole, the most recent first. So system prompts and documents come before single conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvmigrate.messages import MAX_CHAINS, MAX_ENTRIES, Chain, Label
from kvmigrate.rescue import Wish

#: Uses that make a prefix shared: the request that brought it is one.
SHARED_USES = 2

Run = tuple[Sequence[bytes], Sequence[tuple[int, int, int, int]]]
Uses = Callable[[Iterable[bytes]], list[int]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix by its hashes. `uses`: of its last block."""

    chain: Chain
    uses: int

    @property
    def tokens(self) -> int:
        """Tokens of the chunks that are known; those of its front may have been reported with another prompt."""
        return sum(label.tokens for label in self.chain.labels)

    def as_dict(self) -> dict[str, object]:
        """JSON-able, for people: the hash of its last block names it."""
        name = self.chain.hashes[-1].hex()[:16]
        return {"prefix": name, "blocks": len(self.chain.hashes), "chunks": len(self.chain.labels), "uses": self.uses}


def shared(runs: Iterable[Run], uses: Uses) -> list[Prefix]:
    """The part of each run that was used again, the most used first."""
    found = [prefix for prefix in (_part(run, uses, SHARED_USES) for run in runs) if prefix is not None]
    return sorted(found, key=lambda prefix: -prefix.uses)  # stable: the most recent first among equals


def prefixes(runs: Sequence[Run], uses: Uses) -> Iterator[Prefix]:
    """All of them, the hottest first."""
    yield from shared(runs, uses)
    yield from (prefix for prefix in (_part(run, uses, 1) for run in runs) if prefix is not None)


def hottest(runs: Sequence[Run], uses: Uses, blocks: int) -> list[Chain]:
    """Chains of at most so many different blocks in all, the hottest first; within the limits of one message."""
    return list(_within((wish.cut(len(wish.chain.hashes)) for wish in wishes(runs, uses)), blocks))


def wishes(runs: Sequence[Run], uses: Uses) -> list[Wish]:
    """What is worth having elsewhere, the hottest first, each with the chunks of its front.

    A chunk is known with the prompt that brought it last, and who copies a prompt without its first chunks is not found
    by them.
    """
    ends: dict[bytes, list[Label]] = {}
    for hashes, labels in runs:
        for label in labels:
            ends.setdefault(hashes[label[1] - 1], []).append(Label(*label))
    return [_wish(prefix, ends) for prefix in prefixes(runs, uses)]


def _wish(prefix: Prefix, ends: Mapping[bytes, list[Label]]) -> Wish:
    hashes, labels = prefix.chain
    own = {label.chunk for label in labels}
    before = labels[0].end
    front = (label for block in hashes[:before] for label in ends.get(block, ()) if label.chunk not in own)
    return Wish(prefix.chain, prefix.uses >= SHARED_USES, front=tuple(front))


def _part(run: Run, uses: Uses, least: int) -> Prefix | None:
    """A run up to its deepest chunk whose last block is here and was used so often."""
    hashes, labels = run
    ends = [end for _, end, _, _ in labels if end]
    deep, count = max(
        (
            (end, count)
            for end, count in zip(ends, uses(hashes[end - 1] for end in ends), strict=True)
            if count >= least
        ),
        default=(0, 0),
    )
    if not deep:
        return None
    kept = tuple(Label(*label) for label in sorted(labels, key=lambda label: label[1]) if label[1] <= deep)
    return Prefix(Chain(tuple(hashes[:deep]), kept), count)


def _within(wanted: Iterable[Chain], blocks: int) -> Iterator[Chain]:
    seen: set[bytes] = set()
    chains = hashes = labels = 0
    for chain in wanted:
        fresh = seen.union(chain.hashes)
        hashes, labels = hashes + len(chain.hashes), labels + len(chain.labels)
        if len(fresh) > blocks or max(hashes, labels) > MAX_ENTRIES or chains == MAX_CHAINS:
            return
        if len(fresh) > len(seen):
            chains += 1
            seen = fresh
            yield chain
