"""Which blocks of a node that is about to go should be copied to which peers. Pure.

Promises
1. Nothing is copied that another node holds already, and of a chain always its beginning: a block is of no use without
   those before it.
2. A heir gets no more than it has room for: its free slots and, for a prefix that somebody came back for, also those of
   blocks that nobody came back for. So nothing hotter than what comes is evicted for it.
3. All copies together fit into the time that is left, at the rates that are known, as if they came one after the other:
   the link that they share is that of the node that goes.
4. What is not copied is counted, with the reason.

The hottest prefix chooses first. Each goes to where most of it fits, and among those to where it is there soonest:
behind what that heir gets already, and without what it has already. So prefixes spread over the heirs, and those that
begin alike stay together. A busy heir counts as a slower one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from .messages import MAX_CHAINS, MAX_ENTRIES, Chain, Label

#: How much more a block that is to be copied counts than one that the heir gets already: who has the beginning of a
#: prefix gets the rest of it too, even if somebody else gets less.
_NEW: Final = 2.0


class Why(StrEnum):
    """Why blocks are not copied; the strings are for people."""

    NOBODY = "no peer can take them"
    ROOM = "no peer has room for them"
    TIME = "there is not enough time"


@dataclass(frozen=True, slots=True)
class Wish:
    """A prefix that is worth keeping. `shared`: somebody came back for it. `held`: blocks of its front, by node that
    has them; `front`: labels of chunks of its front that are another chain's."""

    chain: Chain
    shared: bool = False
    held: Mapping[str, int] = field(default_factory=dict)
    front: tuple[Label, ...] = ()

    @property
    def labels(self) -> tuple[Label, ...]:
        """All that are known."""
        return (*self.front, *self.chain.labels)

    def cut(self, end: int) -> Chain:
        """The first blocks of the chain, and the labels that they cover."""
        return Chain(self.chain.hashes[:end], tuple(label for label in self.labels if label.end <= end))


@dataclass(frozen=True, slots=True)
class Heir:
    """A node that may take blocks: places for them that are free, and of blocks that nobody came back for; how fast
    they get there; the share of its engine's places that are taken."""

    name: str
    free: int
    cold: int
    bytes_s: float
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one heir is to take, the first `shared` chains also in the place of others. `blocks`: that it lacks."""

    heir: str
    chains: tuple[Chain, ...]
    shared: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Rescue:
    """Who takes what, and how many blocks nobody will have, by reason."""

    shares: tuple[Share, ...]
    left: Mapping[Why, int]


def first(wishes: Iterable[Wish]) -> list[Wish]:
    """The first wishes, as many as one message has room for."""
    taken: list[Wish] = []
    hashes = labels = 0
    for wish in wishes:
        hashes += len(wish.chain.hashes)
        labels += len(wish.labels)
        if max(hashes, labels) > MAX_ENTRIES or len(taken) == MAX_CHAINS:
            break
        taken.append(wish)
    return taken


def plan(wishes: Sequence[Wish], heirs: Sequence[Heir], block_bytes: int, seconds: float) -> Rescue:
    """Say what each heir takes. `wishes`: the hottest first; `block_bytes`: of all ranks; `seconds`: for all copies."""
    has: dict[str, set[bytes]] = {heir.name: set() for heir in heirs}
    for wish in wishes:
        for name, held in wish.held.items():
            has.setdefault(name, set()).update(wish.chain.hashes[:held])
    books = [_Book(heir, block_bytes, has[heir.name]) for heir in sorted(heirs, key=lambda heir: heir.name)]
    left: Counter[Why] = Counter()
    counted: set[bytes] = set()
    for wish in sorted(wishes, key=lambda wish: not wish.shared):  # stable
        covered = max((beginning(wish.chain, blocks) for blocks in has.values()), default=0)
        whole = len(wish.chain.hashes)
        offers = [offer for book in books if (offer := book.offer(wish, seconds)).end > covered]
        if covered < whole and offers:
            best = min(offers, key=lambda offer: (-offer.end, offer.cost))
            seconds -= best.take(wish)
            covered = best.end
        lost = [block for block in wish.chain.hashes[covered:] if block not in counted]
        if lost:
            counted.update(lost)
            left[_why(books, wish, seconds)] += len(lost)
    return Rescue(tuple(_shares(books)), dict(left))


def beginning(chain: Chain, blocks: Collection[bytes]) -> int:
    """How many blocks of a chain are among these. They are the first ones, as always, so one search finds their end."""
    return bisect_left(chain.hashes, 1, key=lambda block: block not in blocks)


class _Book:
    """What a heir has and is to get."""

    def __init__(self, heir: Heir, block_bytes: int, has: set[bytes]) -> None:
        self.heir = heir
        self.block_s = block_bytes / heir.bytes_s
        self.free, self.cold = max(0, heir.free), max(0, heir.cold)
        self.blocks = 0
        self.chains: list[Chain] = []
        self.shared = 0
        self._has = has

    def room(self, wish: Wish) -> int:
        """Blocks more that it has a place for."""
        return self.free + self.cold if wish.shared else self.free

    def offer(self, wish: Wish, seconds: float) -> _Offer:
        """How much of a chain it could have, and at what cost."""
        have = beginning(wish.chain, self._has)
        fit = have + min(self.room(wish), max(0, int(seconds / self.block_s)))
        whole = len(wish.chain.hashes)
        end = whole if fit >= whole else max((label.end for label in wish.labels if label.end <= fit), default=0)
        new = max(0, end - have)
        return _Offer(self, end, new, (self.blocks + _NEW * new) * self.block_s * (1.0 + self.heir.load))

    def take(self, chain: Chain, new: int, *, shared: bool) -> None:
        """It is to get this chain, of which it lacks so many blocks."""
        free = min(new, self.free)
        self.free -= free
        self.cold -= new - free
        self.blocks += new
        self.chains.append(chain)
        self.shared += shared
        self._has.update(chain.hashes)


@dataclass(frozen=True, slots=True)
class _Offer:
    book: _Book
    end: int
    new: int
    cost: float

    def take(self, wish: Wish) -> float:
        """Accept it; returns the seconds that it takes."""
        self.book.take(wish.cut(self.end), self.new, shared=wish.shared)
        return self.new * self.book.block_s


def _why(books: Sequence[_Book], wish: Wish, seconds: float) -> Why:
    """What stood in the way."""
    if not books:
        return Why.NOBODY
    in_time = any(book.room(wish) > int(max(0.0, seconds) / book.block_s) for book in books)
    return Why.TIME if in_time else Why.ROOM


def _shares(books: Iterable[_Book]) -> Iterator[Share]:
    for book in books:
        if book.chains:
            yield Share(book.heir.name, tuple(book.chains), book.shared, book.blocks)
