"""Who holds how much of one prompt, as a mapping from node to chunks (or tokens) counted from the first one on.

Often every node of a large cluster holds the beginning that all prompts share. So nothing here grows with the holders
until somebody iterates: nodes are bits of one integer per length, and a decision looks up the few that it weighs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence

#: Up to so many nodes a dictionary is the better form.
FEW = 16
#: Draws for one name among equals, before their bits are read one after the other: enough where a third of them is set.
_DRAWS = 8


class Held(Mapping[str, int]):
    """Immutable. `levels`: (value, bits of the nodes) the largest value first; `bits` and `names` are the index's."""

    __slots__ = ("_bits", "_names", "levels")

    def __init__(self, levels: Sequence[tuple[int, int]], bits: Mapping[str, int], names: Mapping[int, str]) -> None:
        self.levels = levels
        self._bits = bits
        self._names = names

    def __getitem__(self, name: str) -> int:
        bit = self._bits.get(name, 0)
        for value, held in self.levels:
            if held & bit:
                return value
        raise KeyError(name)

    def get(self, name: str, default: int = 0) -> int:  # type: ignore[override]
        """What one node holds; 0 = nothing, unless another default is given."""
        bit = self._bits.get(name, 0)
        for value, held in self.levels:
            if held & bit:
                return value
        return default

    def items(self) -> ItemsView[str, int]:
        """Nodes and values, those that hold most first."""
        return {name: value for value, held in self.levels for name in _named(held, self._names)}.items()

    def __iter__(self) -> Iterator[str]:
        for _, held in self.levels:
            yield from _named(held, self._names)

    def __len__(self) -> int:
        return sum(held.bit_count() for _, held in self.levels)

    def __bool__(self) -> bool:
        return bool(self.levels)

    def __repr__(self) -> str:
        return f"Held({dict(self)})"

    def mapped(self, change: Callable[[int], int]) -> Held:
        """See `mapped`; what becomes 0 is left out."""
        changed = ((change(value), held) for value, held in self.levels)
        return Held([(value, held) for value, held in changed if value > 0], self._bits, self._names)

    def most(self, count: int, rng: random.Random) -> set[str]:
        """See `most`."""
        found: set[str] = set()
        for _, held in self.levels:
            wanted = count - len(found)
            if held.bit_count() <= wanted:
                found.update(_named(held, self._names))
            else:
                found.update(self._drawn(held, wanted, rng))
            if len(found) >= count:
                break
        return found

    def _drawn(self, held: int, count: int, rng: random.Random) -> list[str]:
        """Different nodes of these, all as likely."""
        places: set[int] = set()
        size = held.bit_length()
        for _ in range(_DRAWS * count):
            place = int(rng.random() * size)
            if held >> place & 1:
                places.add(place)
                if len(places) == count:
                    return [self._names[place] for place in sorted(places)]
        return rng.sample(list(_named(held, self._names)), count)


def held(levels: Sequence[tuple[int, int]], bits: Mapping[str, int], names: Mapping[int, str]) -> Mapping[str, int]:
    """A plain dictionary where only a few hold anything, which is faster to look into; else a `Held`."""
    if sum(held.bit_count() for _, held in levels) > FEW:
        return Held(levels, bits, names)
    return {name: value for value, held in levels for name in _named(held, names)}


def _named(held: int, names: Mapping[int, str]) -> Iterator[str]:
    while held:
        low = held & -held
        yield names[low.bit_length() - 1]
        held ^= low


def held_of(values: Mapping[str, int]) -> Held:
    """A plain mapping as a `Held`; whoever holds 0 is left out."""
    if isinstance(values, Held):
        return values
    bits = {name: 1 << place for place, name in enumerate(values)}
    levels: dict[int, int] = {}
    for name, value in values.items():
        if value > 0:
            levels[value] = levels.get(value, 0) | bits[name]
    return Held(sorted(levels.items(), reverse=True), bits, dict(enumerate(values)))


def most(values: Mapping[str, int], count: int, rng: random.Random) -> Collection[str]:
    """The `count` nodes that hold most. Among equals they are drawn: or all prompts would go to the same few."""
    return values if len(values) <= count else held_of(values).most(count, rng)


def mapped(values: Mapping[str, int], change: Callable[[int], int]) -> Mapping[str, int]:
    """The same nodes with other values. `change` keeps the order, and 0 where it is."""
    if isinstance(values, Held):
        return values.mapped(change)
    return {name: change(value) for name, value in values.items()}
