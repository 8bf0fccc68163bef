"""The node's own prefix digest: which chunks its KV covers, and by which blocks.

Promises
1. A chunk is in the digest only when every block that covers it (and no earlier chunk covers) was reported by
   the engine and not withdrawn since. Readers take the longest consecutive prefix, so a missing chunk hides
   what lies behind it; that comes back with the missing one, if its own blocks stayed.
2. `resolve` returns block hashes of the very text it was asked for, perhaps a few too many at the end (they are
   another prompt's, and never asked for by the engine), never others.
3. A promised chunk is one of a prompt that the engine has and did not compute yet, or in blocks that cannot be given
   away: no blocks, and nothing to resolve.
4. A KV cache larger than the pool holds what the pool dropped or never took. Such chunks stay, as promised ones, while
   all chunks together are no more tokens than the engine's KV cache holds (`engine_holds`); what lost its blocks first
   goes first. It is a guess: the engine tells nobody what it drops.
5. Bounded: chunks, and references to block hashes. The least recently used chunk goes first; within one prompt
   the last one, so that a prefix shrinks from its end.

How chunks and blocks meet. Chunks are cut by bytes and blocks by tokens; nobody tokenizes here. A prompt of B
bytes and T tokens has about T/B tokens a byte, so chunk i ends near token (i+1) * CHUNK_BYTES * T/B, and the
blocks up to there cover it. Two prompts that share their first chunks correct each other: where their block
hashes part is where those chunks end at the latest, and interpolation starts behind it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from node.chunks import CHUNK_BYTES

#: Defaults: chunks kept (about 8 MiB of text), references to block hashes.
MAX_CHUNKS = 16_384
MAX_REFERENCES = 1 << 20


@dataclass(frozen=True, slots=True)
class Changes:
    """Chunks that entered and left the digest, and those that are promised from now on; no chunk is in two of them."""

    added: tuple[int, ...] = ()
    withdrawn: tuple[int, ...] = ()
    promised: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.withdrawn or self.promised)


@dataclass(slots=True)
class _Run:
    """The blocks of one prompt, shared by the chunks that it confirmed last."""

    blocks: tuple[bytes, ...]
    users: int = 0


@dataclass(slots=True)
class _Chunk:
    run: _Run | None
    #: Blocks that cover everything up to the end of this chunk, and how many of them it depends on itself.
    end: int
    own: int
    #: Tokens of this chunk (its weight where capacity is counted in tokens).
    tokens: int


class PrefixDigest:
    """Chunk hash -> blocks, for one engine."""

    def __init__(
        self, *, max_chunks: int = MAX_CHUNKS, max_references: int = MAX_REFERENCES, max_tokens: int = 0
    ) -> None:
        """`max_tokens`: how much the engine's KV cache holds, for engines that report no blocks; 0 = no limit."""
        self.max_chunks = max_chunks
        self.max_references = max_references
        self.max_tokens = max_tokens
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        self._by_block: dict[bytes, set[int]] = {}
        #: Promised chunks, and by how many prompts each.
        self._promised: dict[int, int] = {}
        #: Chunks that the engine alone holds, those that lost their blocks first in front; a dict for its order.
        self._engine_only: dict[int, None] = {}
        self._engine_tokens = 0
        self._references = 0
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def confirm(
        self, chunks: Sequence[int], blocks: Sequence[bytes], *, prompt_tokens: int, prompt_bytes: int, block_size: int
    ) -> Changes:
        """The engine computed `blocks`, all full blocks from the prompt's beginning on.

        `chunks` and `prompt_bytes` are the request's, `prompt_tokens` the engine's count. Blocks of the output
        behind the prompt may be among them.
        """
        if not chunks or not blocks or prompt_tokens <= 0 or prompt_bytes <= 0 or block_size <= 0:
            return Changes()
        run = _Run(self._interned(blocks[: -(-prompt_tokens // block_size)]))
        ends = self._ends(chunks, run.blocks, prompt_tokens, prompt_bytes, block_size)
        added: list[int] = []
        # From the last to the first: the first becomes the most recently used.
        for index in range(len(ends) - 1, -1, -1):
            start = ends[index - 1] if index else 0
            end = ends[index]
            own = max(1, end - start)
            tokens = max(1, CHUNK_BYTES * prompt_tokens // prompt_bytes)
            if self._put(chunks[index], _Chunk(run, end, own, tokens)):
                added.append(chunks[index])
        return self._changes(added)

    def used(self, chunks: Sequence[int], *, prompt_tokens: int, prompt_bytes: int) -> Changes:
        """An engine that reports no blocks finished a request with this prompt: it probably still holds it."""
        if not chunks or prompt_bytes <= 0:
            return Changes()
        tokens = max(1, CHUNK_BYTES * prompt_tokens // prompt_bytes)
        added = []
        for name in reversed(chunks):
            known = self._chunks.get(name)
            guessed = known is not None and known.run is None and not self._without_blocks(name)
            if known is not None and guessed and known.tokens == tokens:
                self._chunks.move_to_end(name)  # a long prompt that comes again: hundreds of them
            elif self._put(name, _Chunk(None, 0, 0, tokens)):
                added.append(name)
        return self._changes(added)

    def promise(
        self, chunks: Sequence[int], *, prompt_tokens: int, prompt_bytes: int
    ) -> tuple[Changes, tuple[int, ...]]:
        """The engine has a prompt that it will compute and report: what of it is not known yet is promised.

        Also returns all chunks that are promised for this prompt, those too that another one had promised before: they
        stay promised until each of these prompts is given to `unpromise`.
        """
        if not chunks or prompt_bytes <= 0:
            return Changes(), ()
        tokens = max(1, CHUNK_BYTES * prompt_tokens // prompt_bytes)
        fresh = dict.fromkeys(name for name in chunks if name not in self._chunks)
        for name in reversed(chunks):
            if name in fresh:
                self._put(name, _Chunk(None, 0, 0, tokens))
            elif name in self._promised:
                self._chunks.move_to_end(name)
            else:
                self._renew(name)
                continue
            self._promised[name] = self._promised.get(name, 0) + 1
        withdrawn = self._shrink()
        changes = Changes(
            withdrawn=tuple(name for name in withdrawn if name not in fresh),
            promised=tuple(name for name in fresh if name in self._promised),
        )
        return changes, tuple(name for name in chunks if name in self._promised)

    def unpromise(self, chunks: Sequence[int], *, computed: bool = False) -> tuple[int, ...]:
        """What was promised for one prompt, and is not in the pool, is not to be expected there any more.

        `computed`: the engine did compute it, and has it. Returns what is withdrawn: what no other prompt promises.
        """
        over: list[int] = []
        for name in chunks:
            others = self._promised.get(name, 0) - 1
            if others > 0:
                self._promised[name] = others
            elif not others:
                over.append(name)
        if computed and self._engine_tokens:
            for name in reversed(over):  # so that a prefix shrinks from its end
                del self._promised[name]
                self._engine_only[name] = None
            return self._shrink()
        for name in over:
            self._drop(name)
        return tuple(over)

    def evicted(self, block: bytes) -> Changes:
        """The pool dropped a block: the chunks that need it are withdrawn, or promised if the engine may have them."""
        chunks = tuple(self._by_block.get(block, ()))
        if not self._engine_tokens:
            for name in chunks:
                self._drop(name)
            return Changes(withdrawn=chunks)
        for name in chunks:
            chunk = self._chunks[name]
            self._release(name, chunk)
            chunk.run, chunk.end, chunk.own = None, 0, 0
            self._engine_only[name] = None
        withdrawn = self._shrink()
        return Changes(withdrawn=withdrawn, promised=tuple(name for name in chunks if name in self._engine_only))

    def engine_holds(self, tokens: int) -> tuple[int, ...]:
        """From now on the KV cache of an engine that reports blocks holds so many tokens; 0 = not known, nothing stays.

        Returns the chunks that are withdrawn for it.
        """
        self._engine_tokens = tokens
        return self._shrink()

    def limit(self, max_tokens: int) -> tuple[int, ...]:
        """From now on claim no more than so many tokens; 0 = no limit. Returns the chunks that are withdrawn for it."""
        self.max_tokens = max_tokens
        return self._shrink()

    def lost(self) -> tuple[int, ...]:
        """The engine went down, and with it a cache of its own. Returns the chunks that only that one held."""
        withdrawn = tuple(name for name, chunk in self._chunks.items() if chunk.run is None)
        for name in withdrawn:
            self._drop(name)
        return withdrawn

    def clear(self) -> tuple[int, ...]:
        """The cache is gone (engine restart, reset). Returns every chunk, now withdrawn."""
        withdrawn = tuple(self._chunks)
        self._chunks.clear()
        self._by_block.clear()
        self._promised.clear()
        self._engine_only.clear()
        self._references = self._tokens = 0
        return withdrawn

    def matched(self, chunks: Iterable[int]) -> int:
        """How many chunks from the front on are in the digest."""
        count = 0
        for chunk in chunks:
            if chunk not in self._chunks:
                break
            count += 1
        return count

    def resolve(self, chunks: Sequence[int]) -> tuple[bytes, ...]:
        """Block hashes, in order, that cover the longest known prefix of `chunks`. Marks it as used."""
        count = self._computed(chunks)
        if not count:
            return ()
        for chunk in reversed(chunks[:count]):
            self._chunks.move_to_end(chunk)
        last = self._chunks[chunks[count - 1]]
        return last.run.blocks[: last.end] if last.run is not None else ()

    def chunks(self) -> tuple[int, ...]:
        """All chunks, least recently used first."""
        return tuple(self._chunks)

    def runs(self, most: int | None = None) -> list[tuple[tuple[bytes, ...], list[tuple[int, int, int, int]]]]:
        """Block hashes with the chunks that they cover (chunk, end, own, tokens), the most recently used run first.

        `most` looks at that many chunks only, the most recently used ones.
        """
        found: dict[int, tuple[tuple[bytes, ...], list[tuple[int, int, int, int]]]] = {}
        for name, chunk in itertools.islice(reversed(self._chunks.items()), most):
            if chunk.run is not None:
                labels = found.setdefault(id(chunk.run), (chunk.run.blocks, []))[1]
                labels.append((name, chunk.end, chunk.own, chunk.tokens))
        return list(found.values())

    def adopt(self, blocks: Sequence[bytes], labels: Sequence[tuple[int, int, int, int]]) -> Changes:
        """Take over a run that a peer reported and whose blocks are here now. What is known here already stays."""
        run = _Run(self._interned(blocks))
        added: list[int] = []
        for name, end, own, tokens in reversed(labels):
            known = name in self._chunks and not self._without_blocks(name)
            if not known and 0 < own <= end <= len(blocks):
                self._put(name, _Chunk(run, end, own, tokens))
                added.append(name)
        return self._changes(added)

    def validate(self) -> None:
        """Every invariant, for tests."""
        assert len(self._chunks) <= self.max_chunks
        assert self._references <= self.max_references
        assert self._tokens == sum(chunk.tokens for chunk in self._chunks.values())
        assert not self.max_tokens or self._tokens <= self.max_tokens
        assert all(count > 0 and self._chunks[name].run is None for name, count in self._promised.items())
        assert all(self._chunks[name].run is None for name in self._engine_only)
        assert not self._engine_only.keys() & self._promised.keys()
        assert not self._engine_only or self._tokens <= self._engine_tokens
        depends: dict[bytes, set[int]] = {}
        runs: dict[int, _Run] = {}
        for name, chunk in self._chunks.items():
            if chunk.run is not None:
                assert 0 < chunk.end <= len(chunk.run.blocks)
                assert 0 < chunk.own <= chunk.end
                runs[id(chunk.run)] = chunk.run
                for block in self._own_blocks(chunk):
                    depends.setdefault(block, set()).add(name)
        assert depends == self._by_block
        assert self._references == sum(len(run.blocks) for run in runs.values())

    def _interned(self, blocks: Sequence[bytes]) -> tuple[bytes, ...]:
        """The same bytes objects wherever a block is known: long shared prefixes are stored once."""
        known = self._by_block
        result = []
        for block in blocks:
            holders = known.get(block)
            if holders:
                result.append(self._same(next(iter(holders)), block))
            else:
                result.append(block)
        return tuple(result)

    def _same(self, holder: int, block: bytes) -> bytes:
        chunk = self._chunks[holder]
        return next((own for own in self._own_blocks(chunk) if own == block), block)

    def _ends(
        self, chunks: Sequence[int], blocks: tuple[bytes, ...], prompt_tokens: int, prompt_bytes: int, block_size: int
    ) -> list[int]:
        """For each chunk that the blocks cover, how many blocks cover it and all before it."""
        anchor, common = self._anchor(chunks, blocks)
        tokens = common * block_size
        stretch = max(1.0, common / self._chunks[chunks[anchor - 1]].end) if anchor else 1.0
        left_bytes = prompt_bytes - anchor * CHUNK_BYTES
        per_byte = max(0.0, prompt_tokens - tokens) / left_bytes if left_bytes > 0 else 0.0
        ends: list[int] = []
        for index in range(len(chunks)):
            if index < anchor:
                end = min(common, -int(-self._chunks[chunks[index]].end * stretch // 1))
            else:
                reach = (tokens + per_byte * (index + 1 - anchor) * CHUNK_BYTES) / block_size
                if len(blocks) < int(reach):
                    break
                end = min(len(blocks), -int(-reach // 1))
            end = max(end, ends[-1] if ends else 0)
            if end == 0:
                break
            ends.append(end)
        return ends

    def _anchor(self, chunks: Sequence[int], blocks: tuple[bytes, ...]) -> tuple[int, int]:
        """Known chunks at the front, and the blocks up to their end, as another prompt's blocks tell them."""
        count = self._computed(chunks)
        if not count or count == len(chunks):
            return 0, 0
        last = self._chunks[chunks[count - 1]]
        if last.run is None:
            return 0, 0
        theirs = last.run.blocks
        common = 0
        for mine, their in zip(blocks, theirs, strict=False):
            if mine != their:
                return (count, common) if common else (0, 0)
            common += 1
        # One continues the other: its end was interpolated within its own prompt, and that is the best we know.
        return (count, last.end) if common >= last.end else (0, 0)

    def _computed(self, chunks: Iterable[int]) -> int:
        """As `matched`, up to the first chunk that is only promised."""
        count = 0
        for chunk in chunks:
            if chunk not in self._chunks or self._without_blocks(chunk):
                break
            count += 1
        return count

    def _without_blocks(self, name: int) -> bool:
        return name in self._promised or name in self._engine_only

    def _renew(self, name: int) -> None:
        """A chunk that the engine alone holds is used again."""
        if name in self._engine_only:
            self._chunks.move_to_end(name)
            del self._engine_only[name]
            self._engine_only[name] = None

    def _own_blocks(self, chunk: _Chunk) -> tuple[bytes, ...]:
        return chunk.run.blocks[chunk.end - chunk.own : chunk.end] if chunk.run is not None else ()

    def _put(self, name: int, chunk: _Chunk) -> bool:
        """Insert or replace, as most recently used. True when it was not there, or without blocks."""
        new = name not in self._chunks or self._without_blocks(name)
        if name in self._chunks:
            self._drop(name)
        self._chunks[name] = chunk
        self._tokens += chunk.tokens
        if chunk.run is not None:
            if not chunk.run.users:
                self._references += len(chunk.run.blocks)
            chunk.run.users += 1
            for block in self._own_blocks(chunk):
                self._by_block.setdefault(block, set()).add(name)
        return new

    def _drop(self, name: int) -> None:
        chunk = self._chunks.pop(name)
        self._promised.pop(name, None)
        self._engine_only.pop(name, None)
        self._tokens -= chunk.tokens
        self._release(name, chunk)

    def _release(self, name: int, chunk: _Chunk) -> None:
        """The chunk needs its blocks no more."""
        for block in self._own_blocks(chunk):
            holders = self._by_block.get(block)
            if holders is not None:
                holders.discard(name)
                if not holders:
                    del self._by_block[block]
        if chunk.run is not None:
            chunk.run.users -= 1
            if not chunk.run.users:
                self._references -= len(chunk.run.blocks)

    def _changes(self, added_backwards: list[int]) -> Changes:
        withdrawn = self._shrink()
        if not withdrawn:
            return Changes(tuple(reversed(added_backwards)))
        # What came and went at once may have been promised before, so that it is withdrawn too.
        gone = set(withdrawn)
        return Changes(tuple(chunk for chunk in reversed(added_backwards) if chunk not in gone), withdrawn)

    def _shrink(self) -> tuple[int, ...]:
        withdrawn: list[int] = []
        while self._engine_only and self._tokens > self._engine_tokens:
            oldest = next(iter(self._engine_only))
            self._drop(oldest)
            withdrawn.append(oldest)
        while self._chunks and (
            len(self._chunks) > self.max_chunks
            or self._references > self.max_references
            or (self.max_tokens and self._tokens > self.max_tokens)
        ):
            oldest = next(iter(self._chunks))
            self._drop(oldest)
            withdrawn.append(oldest)
        return tuple(withdrawn)
