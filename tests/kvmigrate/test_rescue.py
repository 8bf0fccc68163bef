"""What a node that goes leaves to whom: chains are drawn as paths of one tree, as the prompts of a cluster are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.messages import MAX_CHAINS, MAX_ENTRIES, Chain, Label
from kvmigrate.rescue import Heir, Rescue, Why, Wish, first, plan

from .helpers import block_hash

BLOCK = 1 << 20
FAST = 1e12
NAMES = ("a", "b", "c", "d")


def path(*steps: int) -> tuple[bytes, ...]:
    """Block hashes of a prompt whose blocks are these: equal as far as two paths are."""
    return tuple(block_hash(0, ".".join(map(str, steps[: depth + 1]))) for depth in range(len(steps)))


def labels(hashes: Sequence[bytes], every: int = 1) -> tuple[Label, ...]:
    """A chunk ends behind every so many blocks."""
    ends = range(every, len(hashes) + 1, every)
    return tuple(Label(int.from_bytes(hashes[end - 1][:8]), end, every, 128 * every) for end in ends)


def wish(*steps: int, shared: bool = False, every: int = 1, **held: int) -> Wish:
    hashes = path(*steps)
    return Wish(Chain(hashes, labels(hashes, every)), shared, held)


def heir(name: str, free: int = 100, cold: int = 0, bytes_s: float = FAST, load: float = 0.0) -> Heir:
    return Heir(name, free, cold, bytes_s, load)


def taken(rescue: Rescue) -> dict[str, int]:
    return {share.heir: share.blocks for share in rescue.shares}


@st.composite
def wish_lists(draw: st.DrawFn) -> list[Wish]:
    steps = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    found = []
    for _ in range(draw(st.integers(0, 12))):
        made = draw(steps)
        held = draw(st.dictionaries(st.sampled_from((*NAMES, "elsewhere")), st.integers(0, len(made)), max_size=2))
        found.append(wish(*made, shared=draw(st.booleans()), every=draw(st.sampled_from((1, 1, 2))), **held))
    return [one for one in found if one.labels]


HEIRS = st.lists(
    st.builds(
        Heir,
        st.sampled_from(NAMES),
        st.integers(0, 12),
        st.integers(0, 12),
        st.sampled_from((BLOCK / 4, BLOCK * 1.0, FAST)),
        st.floats(0, 1),
    ),
    unique_by=lambda heir: heir.name,
)
SECONDS = st.floats(0, 40)


def lacking(share_chains: Sequence[Chain], has: set[bytes]) -> set[bytes]:
    return {block for chain in share_chains for block in chain.hashes} - has


def had(name: str, wishes: Sequence[Wish]) -> set[bytes]:
    return {block for one in wishes for block in one.chain.hashes[: one.held.get(name, 0)]}


@given(wish_lists(), HEIRS, SECONDS)
def test_no_heir_gets_more_than_it_has_room_for_and_no_hotter_block_makes_place(
    wishes: list[Wish], heirs: list[Heir], seconds: float
) -> None:
    by_name = {heir.name: heir for heir in heirs}
    for share in plan(wishes, heirs, BLOCK, seconds).shares:
        one, has = by_name[share.heir], had(share.heir, wishes)
        assert share.blocks == len(lacking(share.chains, has)) <= one.free + one.cold
        assert len(lacking(share.chains[: share.shared], has)) <= one.free + one.cold
        single = lacking(share.chains, has) - lacking(share.chains[: share.shared], has)
        assert len(single) <= one.free  # these take no other block's place
        assert sum(wish.shared for wish in wishes) >= share.shared


@given(wish_lists(), HEIRS, SECONDS)
def test_all_copies_together_fit_into_the_time(wishes: list[Wish], heirs: list[Heir], seconds: float) -> None:
    rates = {heir.name: heir.bytes_s for heir in heirs}
    shares = plan(wishes, heirs, BLOCK, seconds).shares
    assert sum(share.blocks * BLOCK / rates[share.heir] for share in shares) <= seconds + 1e-6


@given(wish_lists(), HEIRS, SECONDS)
def test_what_is_copied_is_the_beginning_of_a_prefix_up_to_the_end_of_a_chunk_and_held_whole_by_nobody(
    wishes: list[Wish], heirs: list[Heir], seconds: float
) -> None:
    for share in plan(wishes, heirs, BLOCK, seconds).shares:
        for chain in share.chains:
            meant = [one for one in wishes if one.chain.hashes[: len(chain.hashes)] == chain.hashes]
            ends = {len(one.chain.hashes) for one in meant} | {label.end for one in meant for label in one.labels}
            assert meant and len(chain.hashes) in ends
            assert all(label.end <= len(chain.hashes) for label in chain.labels)
            assert any(max([0, *one.held.values()]) < len(chain.hashes) for one in meant)


@given(wish_lists(), HEIRS, SECONDS)
def test_every_block_is_held_or_copied_or_counted_with_a_reason(
    wishes: list[Wish], heirs: list[Heir], seconds: float
) -> None:
    rescue = plan(wishes, heirs, BLOCK, seconds)
    copied = {block for share in rescue.shares for chain in share.chains for block in chain.hashes}
    held = {block for one in wishes for block in one.chain.hashes[: max([0, *one.held.values()])]}
    every = {block for one in wishes for block in one.chain.hashes}
    lost = every - copied - held
    assert sum(rescue.left.values()) >= len(lost)  # one that is counted may come with a later, longer prefix
    assert bool(rescue.left) >= bool(lost)
    if not heirs:
        assert set(rescue.left) <= {Why.NOBODY} and not rescue.shares


@given(wish_lists(), HEIRS, SECONDS, st.randoms(use_true_random=False))
def test_the_order_in_which_peers_are_known_changes_nothing(
    wishes: list[Wish], heirs: list[Heir], seconds: float, rng: random.Random
) -> None:
    before = plan(wishes, heirs, BLOCK, seconds)
    rng.shuffle(heirs)
    assert plan(wishes, heirs, BLOCK, seconds) == before


@given(st.integers(1, 4), st.integers(1, 20))
def test_prefixes_spread_over_equal_heirs(peers: int, prefixes: int) -> None:
    wishes = [wish(number, 0, 0) for number in range(prefixes)]
    shares = taken(plan(wishes, [heir(name) for name in NAMES[:peers]], BLOCK, 60))
    counts = [shares.get(name, 0) for name in NAMES[:peers]]
    assert sum(counts) == 3 * prefixes and max(counts) - min(counts) <= 3


def test_the_hottest_comes_first_where_room_is_short_and_a_prefix_that_is_shared_before_a_single_one() -> None:
    wishes = [wish(1, 1), wish(2, 1), wish(3, 1, shared=True)]
    rescue = plan(wishes, [heir("a", free=4)], BLOCK, 60)
    assert [chain.hashes for chain in rescue.shares[0].chains] == [path(3, 1), path(1, 1)]
    assert rescue.shares[0].shared == 1 and rescue.left == {Why.ROOM: 2}


def test_only_a_shared_prefix_takes_the_place_of_blocks_that_nobody_came_back_for() -> None:
    wishes = [wish(1, 1), wish(2, 1, shared=True)]
    rescue = plan(wishes, [heir("a", free=0, cold=10)], BLOCK, 60)
    assert [chain.hashes for chain in rescue.shares[0].chains] == [path(2, 1)]
    assert rescue.left == {Why.ROOM: 2}


def test_who_has_the_beginning_gets_the_rest_and_only_that_travels() -> None:
    rescue = plan([wish(1, 1, 1, 1, b=3)], [heir("a"), heir("b", load=0.9)], BLOCK, 60)
    assert taken(rescue) == {"b": 1} and rescue.shares[0].chains[0].hashes == path(1, 1, 1, 1)


def test_prefixes_that_begin_alike_stay_together_as_long_as_that_is_less_work() -> None:
    system = (7,) * 6
    wishes = [wish(*system, shared=True), wish(*system, 1), wish(*system, 2)]
    assert taken(plan(wishes, [heir("a"), heir("b")], BLOCK, 60)) == {"a": 8}


def test_what_does_not_fit_whole_is_cut_at_the_end_of_a_chunk() -> None:
    rescue = plan([wish(1, 1, 1, 1, 1, every=2)], [heir("a", free=3)], BLOCK, 60)
    (chain,) = rescue.shares[0].chains
    assert chain.hashes == path(1, 1) and [label.end for label in chain.labels] == [2]
    assert rescue.left == {Why.ROOM: 3}


def test_a_beginning_that_somebody_has_is_not_copied_without_its_rest() -> None:
    rescue = plan([wish(1, 1, 1, 1, elsewhere=3)], [heir("a", free=3)], BLOCK, 60)
    assert rescue.shares == () and rescue.left == {Why.ROOM: 1}


def test_a_slow_network_says_no_with_its_reason() -> None:
    slow = heir("a", bytes_s=BLOCK / 10)
    assert plan([wish(1, 1)], [slow], BLOCK, 5) == Rescue((), {Why.TIME: 2})
    assert taken(plan([wish(1, 1)], [slow], BLOCK, 25)) == {"a": 2}
    assert plan([wish(1, 1)], [], BLOCK, 5) == Rescue((), {Why.NOBODY: 2})


def test_the_faster_and_the_less_busy_heir_is_preferred() -> None:
    assert taken(plan([wish(1)], [heir("a", bytes_s=1e6), heir("b", bytes_s=1e7)], BLOCK, 60)) == {"b": 1}
    assert taken(plan([wish(1)], [heir("a", load=0.5), heir("b", load=0.25)], BLOCK, 60)) == {"b": 1}


def test_chunks_of_the_front_that_came_with_another_prompt_go_along() -> None:
    hashes = path(1, 1, 1)
    known = labels(hashes)
    one = Wish(Chain(hashes, known[2:]), front=known[:2])
    assert plan([one], [heir("a")], BLOCK, 60).shares[0].chains == (Chain(hashes, known),)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 40)), max_size=400))
def test_what_is_planned_at_a_time_fits_into_one_message(shapes: list[tuple[int, int]]) -> None:
    wishes = [Wish(Chain((b"",) * blocks, (Label(1, 1, 1, 1),) * min(blocks, chunks))) for blocks, chunks in shapes]
    batch = first(wishes)
    sizes = Counter({"hashes": 0, "labels": 0})
    for one in batch:
        sizes.update(hashes=len(one.chain.hashes), labels=len(one.labels))
    assert batch == wishes[: len(batch)] and max(sizes.values()) <= MAX_ENTRIES and len(batch) <= MAX_CHAINS
    assert batch or not wishes
