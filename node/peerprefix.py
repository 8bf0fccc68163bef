"""Which node holds which chunk: the inverse of all prefix digests that gossip brought.

Promises
1. `longest` gives, per node, the number of chunks from the first one on that it holds without a gap. It costs
   one look-up per chunk of the prompt however many nodes there are: holders are bits of one integer.
2. Bounded: chunks per node, and pairs (node, chunk) over all nodes. Beyond, the oldest pairs go: first those of
   the node itself, then those of the node that has most.
3. What is lost only costs speed: a prefix that is not known to be held is computed again.
4. A chunk may be promised: its node's engine has the prompt and has not computed it yet, or has it in its own cache
   alone. Whoever goes there finds it, so it counts as held; who wants to take it from there (`given`) would not. What
   is held may lie behind what is promised, where a chunk in between was lost and comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

from node.held import held

#: Chunks remembered per node; what a node publishes is bounded the same way.
MAX_PER_NODE = 16_384

#: Pairs over all nodes, about 200 bytes each, 300 where they are promised (measured full: 220 and 290 MB).
#: Of a thousand nodes each a thousand chunks, half a megabyte of text.
MAX_PAIRS = 1 << 20

#: Pairs taken from the largest node at once when the whole is full.
_BATCH = 64


class PeerPrefixes:
    """The inverted index over all nodes, this one included if the owner feeds it."""

    def __init__(self, *, max_per_node: int = MAX_PER_NODE, max_pairs: int = MAX_PAIRS) -> None:
        self.max_per_node = max_per_node
        self.max_pairs = max_pairs
        self._holders: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        #: Per node its chunks, oldest first.
        self._chunks: dict[str, dict[int, None]] = {}
        #: Chunk -> the nodes that only promise it; none of the chunks that nobody promises.
        self._promises: dict[int, int] = {}
        self._pairs = 0

    def __len__(self) -> int:
        return self._pairs

    def count(self, name: str) -> int:
        """Chunks known of one node."""
        return len(self._chunks.get(name, ()))

    def learn(self, name: str, chunk: int, *, promised: bool = False) -> None:
        """Node `name` holds `chunk`, or promises it."""
        bit = self._bits.get(name)
        if bit is None:
            bit = self._enter(name)
        own = self._chunks[name]
        if chunk in own:
            self._promise(chunk, bit, promised=promised)
            return
        if len(own) >= self.max_per_node:
            self.forget(name, next(iter(own)))
        elif self._pairs >= self.max_pairs:
            self._make_room()
            if name not in self._bits:  # it was the largest and gave up all
                bit, own = self._enter(name), self._chunks[name]
        own[chunk] = None
        others = self._holders.get(chunk)
        # The one bit of a node is one object for all that it alone holds: in a large cluster it is a long number.
        self._holders[chunk] = bit if others is None else others | bit
        self._pairs += 1
        self._promise(chunk, bit, promised=promised)

    def forget(self, name: str, chunk: int) -> None:
        """Node `name` no longer holds `chunk`."""
        own = self._chunks.get(name)
        if own is None or chunk not in own:
            return
        self._promise(chunk, self._bits[name], promised=False)
        del own[chunk]
        self._pairs -= 1
        left = self._holders[chunk] & ~self._bits[name]
        if left:
            self._holders[chunk] = left
        else:
            del self._holders[chunk]
        if not own:
            self._leave(name)

    def drop(self, name: str) -> None:
        """Forget everything of one node (it died, or lost its cache)."""
        for chunk in list(self._chunks.get(name, ())):
            self.forget(name, chunk)

    def replace(self, name: str, chunks: Iterable[int]) -> None:
        """Node `name` holds exactly `chunks`."""
        self.drop(name)
        for chunk in chunks:
            self.learn(name, chunk)

    def longest(self, chunks: Sequence[int]) -> Mapping[str, int]:
        """Node -> chunks it holds from the first on, without a gap; nodes without the first are left out.

        Read it at once: it looks into this index, which goes on changing.
        """
        return self._longest(chunks, self._holders.get)

    def given(self, chunks: Sequence[int]) -> Mapping[str, int] | None:
        """As `longest`, of what can be taken now: nothing that is only promised. None where that is the same."""
        if not self._promises or self._promises.keys().isdisjoint(chunks):
            return None
        pairs = zip(map(self._holders.get, chunks, repeat(0)), map(self._promises.get, chunks, repeat(0)), strict=True)
        found = [holders & ~promised if promised else holders for holders, promised in pairs]
        return self._longest(range(len(found)), found.__getitem__)

    @property
    def promised(self) -> int:
        """Chunks that somebody only promises."""
        return len(self._promises)

    def _longest(self, chunks: Sequence[int], get: Callable[[int], int | None]) -> Mapping[str, int]:
        alive = (get(chunks[0]) if chunks else 0) or 0
        if not alive:
            return {}
        # Mostly those who hold the first and the last hold all: counted without a loop of ours.
        if get(chunks[-1]) == alive and list(map(get, chunks)).count(alive) == len(chunks):
            return held(((len(chunks), alive),), self._bits, self._names)
        levels: list[tuple[int, int]] = []
        count = 0
        for holders in map(get, chunks):
            if holders != alive:  # rare: mostly everybody who holds a chunk holds the next one
                still = alive & (holders or 0)
                if still != alive:
                    levels.append((count, alive ^ still))
                alive = still
                if not alive:
                    break
            count += 1
        if alive:
            levels.append((count, alive))
        levels.reverse()
        return held(levels, self._bits, self._names)

    def validate(self) -> None:
        """Every invariant, for tests."""
        assert self._pairs == sum(len(own) for own in self._chunks.values()) <= self.max_pairs
        assert self._bits.keys() == self._chunks.keys() == set(self._names.values())
        assert all(0 < len(own) <= self.max_per_node for own in self._chunks.values())
        holders: dict[int, int] = {}
        for name, own in self._chunks.items():
            for chunk in own:
                holders[chunk] = holders.get(chunk, 0) | self._bits[name]
        assert holders == self._holders
        assert all(bits and not bits & ~holders[chunk] for chunk, bits in self._promises.items())

    def _promise(self, chunk: int, bit: int, *, promised: bool) -> None:
        others = self._promises.get(chunk)
        if promised:
            self._promises[chunk] = bit if others is None else others | bit
        elif others is not None and others & bit:
            if others == bit:
                del self._promises[chunk]
            else:
                self._promises[chunk] = others ^ bit

    def _enter(self, name: str) -> int:
        place = 0
        while place in self._names:
            place += 1
        self._names[place] = name
        self._bits[name] = 1 << place
        self._chunks[name] = {}
        return 1 << place

    def _leave(self, name: str) -> None:
        del self._chunks[name]
        del self._names[self._bits.pop(name).bit_length() - 1]

    def _make_room(self) -> None:
        largest = max(self._chunks, key=lambda name: len(self._chunks[name]))
        for chunk in list(self._chunks[largest])[:_BATCH]:
            self.forget(largest, chunk)
