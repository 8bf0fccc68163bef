from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from node.chunks import CHUNK_BYTES
from node.digest import Changes, PrefixDigest

BLOCK = 16


def block(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def prompt(path: str, chunks: int, blocks: int) -> tuple[list[int], list[bytes]]:
    """Chunks and blocks of a text that is told by its path: equal beginnings, equal hashes."""
    rng = random.Random(0)
    shift = rng.getrandbits(40)
    return (
        [hash_of(path[: i + 1]) ^ shift for i in range(chunks)],
        [block(path[: i // 8 + 1] + f"/{i}") for i in range(blocks)],
    )


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode().rjust(8, b"\0")[-8:], "big")


def confirm(digest: PrefixDigest, chunks: list[int], blocks: list[bytes], tokens: int | None = None) -> Changes:
    changes = digest.confirm(
        chunks,
        blocks,
        prompt_tokens=len(blocks) * BLOCK if tokens is None else tokens,
        prompt_bytes=len(chunks) * CHUNK_BYTES,
        block_size=BLOCK,
    )
    digest.validate()
    return changes


def test_a_prompt_is_known_after_the_engine_confirmed_it() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 32)
    assert confirm(digest, chunks, blocks) == Changes(tuple(chunks))
    assert digest.resolve(chunks) == tuple(blocks)
    assert digest.resolve(chunks[:2]) == tuple(blocks[:16])
    assert digest.resolve([99, *chunks]) == ()
    assert digest.matched([*chunks, 99]) == 4
    assert confirm(digest, chunks, blocks) == Changes()


def test_chunks_without_blocks_are_not_known() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 32)
    changes = digest.confirm(chunks, blocks[:16], prompt_tokens=512, prompt_bytes=4 * CHUNK_BYTES, block_size=BLOCK)
    assert changes.added == tuple(chunks[:2])
    assert digest.resolve(chunks) == tuple(blocks[:16])
    assert confirm(PrefixDigest(), chunks, []) == Changes()


def test_blocks_larger_than_chunks_cover_several() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 2)  # 512 tokens would be 4 blocks of 128: two are full
    digest.confirm(chunks, blocks, prompt_tokens=512, prompt_bytes=4 * CHUNK_BYTES, block_size=128)
    digest.validate()
    assert digest.chunks() and digest.matched(chunks) == 2
    assert digest.resolve(chunks[:1]) == tuple(blocks[:1])
    assert digest.evicted(blocks[0]) == Changes(withdrawn=(chunks[0],))


def test_blocks_of_the_output_are_not_the_prompts() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 40)
    confirm(digest, chunks, blocks, tokens=512)
    assert digest.resolve(chunks) == tuple(blocks[:32])


def test_an_evicted_block_withdraws_its_chunk_and_hides_what_lies_behind() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 32)
    confirm(digest, chunks, blocks)
    assert digest.evicted(blocks[20]) == Changes(withdrawn=(chunks[2],))
    digest.validate()
    assert digest.resolve(chunks) == tuple(blocks[:16])
    assert digest.evicted(blocks[20]) == Changes()
    assert digest.evicted(block("unknown")) == Changes()
    assert confirm(digest, chunks[:3], blocks[:24]).added == (chunks[2],)
    assert digest.resolve(chunks) == tuple(blocks)  # the last chunk's own blocks were never gone


def test_two_prompts_that_part_teach_where_their_chunks_end() -> None:
    """The second prompt's tail has twice as many tokens a byte; its shared chunks must not claim tail blocks."""
    digest = PrefixDigest()
    english, blocks = prompt("ab" + "c" * 6, 8, 64)
    other = prompt("ab" + "d" * 6, 8, 16 + 96)
    confirm(digest, english, blocks)
    assert english[:2] == other[0][:2] and blocks[:16] == other[1][:16] and blocks[16] != other[1][16]
    confirm(digest, other[0], other[1])
    assert digest.resolve(other[0][:2]) == tuple(blocks[:16])
    assert digest.resolve(other[0]) == tuple(other[1])
    assert digest.resolve(english) == tuple(blocks)


def test_the_other_way_round_the_shared_part_grows_to_where_they_part() -> None:
    digest = PrefixDigest()
    dense, blocks = prompt("ab" + "d" * 6, 8, 16 + 96)
    confirm(digest, dense, blocks)
    assert len(digest.resolve(dense[:2])) == 28  # interpolated over the whole prompt
    english, theirs = prompt("ab" + "c" * 6, 8, 64)
    confirm(digest, english, theirs)
    assert digest.resolve(english[:2]) == tuple(theirs[:16])


def test_clear_withdraws_everything() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 32)
    confirm(digest, chunks, blocks)
    assert set(digest.clear()) == set(chunks)
    digest.validate()
    assert len(digest) == 0 and digest.resolve(chunks) == ()


def test_the_least_recently_used_prompt_shrinks_from_its_end() -> None:
    digest = PrefixDigest(max_chunks=6)
    old, old_blocks = prompt("abcd", 4, 32)
    new, new_blocks = prompt("wxyz", 4, 32)
    confirm(digest, old, old_blocks)
    changes = confirm(digest, new, new_blocks)
    assert changes.withdrawn == (old[3], old[2])
    assert digest.resolve(old) == tuple(old_blocks[:16])
    digest.resolve(new)
    assert confirm(digest, [1, 2], [block("1")] * 16).withdrawn == (old[1], old[0])


def test_a_prompt_larger_than_the_digest_keeps_its_beginning() -> None:
    digest = PrefixDigest(max_chunks=3)
    chunks, blocks = prompt("abcdef", 6, 48)
    changes = confirm(digest, chunks, blocks)
    assert changes == Changes(tuple(chunks[:3]), tuple(reversed(chunks[3:])))


def test_references_to_blocks_are_bounded() -> None:
    digest = PrefixDigest(max_references=40)
    confirm(digest, *prompt("abcd", 4, 32))
    changes = confirm(digest, *prompt("wxyz", 4, 32))
    assert len(changes.withdrawn) == 4 and len(digest) == 4


def test_an_engine_without_connector_is_trusted_up_to_what_its_cache_holds() -> None:
    digest = PrefixDigest(max_tokens=1000)
    assert digest.used([1, 2, 3], prompt_tokens=600, prompt_bytes=3 * CHUNK_BYTES).added == (1, 2, 3)
    assert digest.resolve([1, 2, 3]) == () and digest.matched([1, 2, 3]) == 3
    changes = digest.used([7, 8, 9], prompt_tokens=600, prompt_bytes=3 * CHUNK_BYTES)
    assert changes == Changes((7, 8, 9), (3,))
    digest.validate()


def test_a_limit_that_comes_later_withdraws_what_was_used_longest_ago() -> None:
    digest = PrefixDigest()
    digest.used([1, 2], prompt_tokens=400, prompt_bytes=2 * CHUNK_BYTES)
    digest.used([3, 4], prompt_tokens=400, prompt_bytes=2 * CHUNK_BYTES)
    assert digest.limit(600) == (2,) and digest.chunks() == (1, 4, 3)
    assert digest.used([5, 6], prompt_tokens=400, prompt_bytes=2 * CHUNK_BYTES).withdrawn == (1, 4)
    assert digest.limit(0) == ()
    digest.validate()


def promise(digest: PrefixDigest, chunks: list[int]) -> Changes:
    return promised(digest, chunks)[0]


def promised(digest: PrefixDigest, chunks: list[int]) -> tuple[Changes, tuple[int, ...]]:
    found = digest.promise(chunks, prompt_tokens=128 * len(chunks), prompt_bytes=len(chunks) * CHUNK_BYTES)
    digest.validate()
    return found


def test_a_promise_is_matched_gives_no_blocks_and_becomes_known_when_the_engine_confirms() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 32)
    confirm(digest, chunks[:2], blocks[:16])
    assert promise(digest, chunks) == Changes(promised=tuple(chunks[2:]))
    assert digest.matched(chunks) == 4 and digest.resolve(chunks) == tuple(blocks[:16])
    assert promise(digest, chunks) == Changes()
    assert confirm(digest, chunks, blocks) == Changes(tuple(chunks[2:]))
    assert digest.resolve(chunks) == tuple(blocks)
    assert digest.unpromise(chunks) == () and digest.matched(chunks) == 4


def test_a_promise_that_is_not_kept_is_withdrawn_and_takes_nothing_with_it() -> None:
    digest = PrefixDigest()
    chunks, blocks = prompt("abcd", 4, 32)
    _, ours = promised(digest, chunks)
    confirm(digest, chunks[:3], blocks[:24])
    assert digest.unpromise(ours) == (chunks[3],) and digest.matched(chunks) == 3
    promise(digest, chunks)
    assert digest.lost() == (chunks[3],)


def test_who_shares_a_promised_beginning_keeps_it_when_the_first_one_goes() -> None:
    digest = PrefixDigest()
    (first, ours), (second, theirs) = promised(digest, [1, 2, 3]), promised(digest, [1, 2, 9])
    assert (first.promised, ours) == ((1, 2, 3), (1, 2, 3)) and (second.promised, theirs) == ((9,), (1, 2, 9))
    assert digest.unpromise(ours) == (3,) and digest.matched([1, 2, 9]) == 3
    assert digest.unpromise(theirs) == (1, 2, 9) and not len(digest)
    digest.validate()


def test_what_is_guessed_or_brought_by_a_peer_is_a_promise_no_more() -> None:
    digest = PrefixDigest()
    _, ours = promised(digest, [1, 2, 3, 4])
    assert digest.used([1, 2], prompt_tokens=256, prompt_bytes=2 * CHUNK_BYTES) == Changes((1, 2))
    assert digest.adopt([b"a", b"b", b"c"], [(3, 3, 3, 128)]) == Changes((3,))
    digest.validate()
    assert digest.unpromise(ours) == (4,) and digest.matched([1, 2, 3, 4]) == 3


def test_a_promised_chunk_that_finds_no_room_when_it_is_computed_is_withdrawn() -> None:
    digest = PrefixDigest(max_chunks=4)
    chunks, blocks = prompt("abcde", 5, 40)
    confirm(digest, chunks[:1], blocks[:8])
    assert promise(digest, chunks) == Changes(withdrawn=(chunks[0],), promised=tuple(chunks[1:]))
    assert confirm(digest, chunks, blocks) == Changes(tuple(chunks[:4]), (chunks[4],))
    assert digest.chunks() == tuple(reversed(chunks[:4]))


def test_promises_are_bounded_like_everything_else() -> None:
    digest = PrefixDigest(max_chunks=4)
    assert promise(digest, [1, 2, 3]) == Changes(promised=(1, 2, 3))
    assert promise(digest, [4, 5]) == Changes((), (3,), (4, 5))
    changes, ours = promised(digest, list(range(10, 20)))
    assert changes.promised == ours == (10, 11, 12, 13)


def wide(tokens: int) -> PrefixDigest:
    """The digest of an engine whose KV cache holds so many tokens."""
    digest = PrefixDigest()
    digest.engine_holds(tokens)
    return digest


def test_what_the_pool_drops_the_engine_has_still_while_its_cache_is_larger() -> None:
    digest = wide(5 * 128)
    chunks, blocks = prompt("abcd", 4, 32)
    confirm(digest, chunks, blocks)
    assert digest.evicted(blocks[20]) == Changes(promised=(chunks[2],))
    digest.validate()
    assert digest.matched(chunks) == 4 and digest.resolve(chunks) == tuple(blocks[:16])
    assert digest.evicted(blocks[31]) == Changes(promised=(chunks[3],))
    others, theirs = prompt("xy", 2, 16)
    assert confirm(digest, others, theirs) == Changes(tuple(others), (chunks[2],)), "six chunks, room for five"
    digest.validate()
    assert confirm(digest, chunks[:3], blocks[:24]) == Changes((chunks[2],), (chunks[3],)), "what has blocks goes first"
    assert digest.lost() == () and digest.resolve(chunks) == tuple(blocks[:24])


def test_what_the_engine_alone_has_goes_in_the_order_in_which_it_lost_its_blocks_or_was_used() -> None:
    digest = wide(3 * 128)
    for path in "abc":
        chunks, blocks = prompt(path, 1, 8)
        confirm(digest, chunks, blocks)
        digest.evicted(blocks[0])
    first, second, third = (prompt(path, 1, 8)[0] for path in "abc")
    assert promised(digest, first) == (Changes(), ()), "it is known: nobody waits for it"
    assert confirm(digest, *prompt("d", 1, 8)).withdrawn == tuple(second)
    assert digest.matched(first) == digest.matched(third) == 1
    assert set(digest.lost()) == {*first, *third}
    digest.validate()


def test_a_computed_prompt_that_the_pool_never_took_stays_until_the_engine_goes() -> None:
    digest = wide(3 * 128)
    chunks, _ = prompt("abcd", 4, 32)
    _, ours = promised(digest, chunks)
    assert digest.unpromise(ours, computed=True) == (chunks[3],), "four chunks, room for three: it shrinks from its end"
    digest.validate()
    assert digest.matched(chunks) == 3 and digest.resolve(chunks) == ()
    assert digest.adopt([b"a"], [(chunks[0], 1, 1, 128)]) == Changes((chunks[0],)), "a peer's blocks make it whole"
    assert digest.engine_holds(0) == (chunks[2], chunks[1])
    _, ours = promised(digest, chunks)
    assert digest.unpromise(ours, computed=True) == tuple(chunks[1:]), "nothing is known of this engine's cache"
    digest.validate()


PATHS = st.text(alphabet="ab", min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.just("confirm"), PATHS, st.integers(0, 60))
        | st.tuples(st.just("evict"), PATHS, st.integers(0, 7))
        | st.tuples(st.just("resolve"), PATHS, st.just(0))
        | st.tuples(st.sampled_from(["promise", "unpromise", "compute"]), PATHS, st.just(0)),
        max_size=25,
    ),
    st.sampled_from([4, 30]),
    st.sampled_from([0, 3 * 128, 12 * 128]),
)
def test_whatever_happens_blocks_are_those_of_the_text_and_present(
    steps: list[tuple[str, str, int]], size: int, cache: int
) -> None:
    digest = PrefixDigest(max_chunks=size, max_references=200)
    digest.engine_holds(cache)
    present: set[bytes] = set()
    published: set[int] = set()
    promises: list[tuple[int, ...]] = []
    for action, path, number in steps:
        chunks, blocks = prompt(path, len(path), 8 * len(path))
        if action == "confirm":
            filled = blocks[:number]
            present.update(filled)
            changes = confirm(digest, chunks, filled, tokens=128 * len(path))
            assert not set(changes.added) & set(changes.withdrawn)
            published |= set(changes.added)
            published -= set(changes.withdrawn)
        elif action == "promise":
            changes, ours = promised(digest, chunks)
            promises.append(ours)
            assert not changes.added and not set(changes.promised) & set(changes.withdrawn)
            published |= set(changes.promised)
            published -= set(changes.withdrawn)
        elif action == "unpromise":
            published -= set(digest.unpromise(promises.pop() if promises else ()))
        elif action == "compute":
            published -= set(digest.unpromise(promises.pop() if promises else (), computed=True))
        elif action == "evict":
            gone = blocks[min(number, len(blocks) - 1)]
            present.discard(gone)
            changes = digest.evicted(gone)
            assert not changes.added and set(changes.promised) <= published - set(changes.withdrawn)
            published -= set(changes.withdrawn)
        else:
            found = digest.resolve(chunks)
            # A few too many at the end may be another prompt's that begins with this text.
            assert list(found[: len(blocks)]) == blocks[: len(found)] and set(found) <= present
            assert all(extra.startswith(path.encode()) for extra in found[len(blocks) :])
            while promises:
                published -= set(digest.unpromise(promises.pop()))
            assert cache or len(found) >= math.floor(digest.matched(chunks) * 8)
        digest.validate()
        assert published == set(digest.chunks())
