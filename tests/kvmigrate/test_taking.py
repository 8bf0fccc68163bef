"""A pool takes over what a node that goes offers: as far as there is room, and never in the place of what is hotter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.lru import SegmentedLru
from kvmigrate.messages import Chain, Label
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Room
from kvmigrate.pull_types import Reason
from kvmigrate.puller import Puller, PullLimits
from kvmigrate.server import TransferServer
from kvmigrate.warm import spare

from .helpers import BLOCK, OTHER_FINGERPRINT, SECRET, chain, store

Pools = Callable[..., BlockPool]
BLOCKS = 32


class Lab:
    """A source that serves its pool, and a target that takes from it."""

    def __init__(self, source: BlockPool, target: BlockPool) -> None:
        self.source, self.target = source, target
        self.server = TransferServer(source, lambda chunks: [], SECRET, "c")
        self.server.start()
        self.puller = Puller(target, SECRET, "c", name="target", limits=PullLimits(stall_s=0.3))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def offered(self, name: str, blocks: int, *, stored: bool = True) -> Chain:
        """A chain that the source offers, one chunk a block."""
        if stored:
            assert store(self.source, chain(blocks, name)) == blocks
        return Chain(tuple(chain(blocks, name)), tuple(Label(end, end, 1, 128) for end in range(1, blocks + 1)))

    def fill(self, name: str, blocks: int, uses: int) -> list[bytes]:
        """Blocks that the target holds already, used so often."""
        assert store(self.target, chain(blocks, name)) == blocks
        for _ in range(uses):
            self.target.touch(chain(blocks, name))
        return chain(blocks, name)

    def here(self, hashes: list[bytes] | tuple[bytes, ...]) -> int:
        return len(self.target.lookup(hashes, use=False))


@pytest.fixture
async def lab(pools: Pools) -> AsyncIterator[Lab]:
    made = Lab(pools(4 * BLOCKS), pools(BLOCKS))
    yield made
    await made.puller.close()
    made.server.close()
    assert made.source.stats().leases == made.target.stats().granted == made.target.stats().leases == 0


async def test_what_is_offered_is_taken_in_its_order_and_told_with_its_chunks(lab: Lab) -> None:
    chains = [lab.offered("a", 5), lab.offered("b", 4)]
    result = await lab.puller.take(lab.address, chains, 0, 10)
    assert (result.reason, result.whole, result.blocks, result.bytes) == (Reason.COMPLETE, True, 9, 9 * BLOCK)
    assert result.chains == tuple(chains) and lab.here(chains[0].hashes) == 5
    again = await lab.puller.take(lab.address, chains, 0, 10)
    assert (again.reason, again.blocks, len(again.chains)) == (Reason.COMPLETE, 0, 2)


async def test_a_single_prompt_gets_free_places_only_and_is_cut_to_them(lab: Lab) -> None:
    cold = lab.fill("cold", BLOCKS - 3, 1)
    result = await lab.puller.take(lab.address, [lab.offered("a", 5)], 0, 10)
    assert (result.reason, result.whole, result.blocks) == (Reason.FULL, False, 3)
    assert len(result.chains[0].hashes) == len(result.chains[0].labels) == 3
    assert lab.here(cold) == BLOCKS - 3, "a block was evicted for it"


async def test_a_shared_prefix_takes_the_place_of_blocks_that_nobody_came_back_for_and_of_no_other(lab: Lab) -> None:
    hot, cold = lab.fill("hot", 12, 2), lab.fill("cold", BLOCKS - 12, 1)
    most = BLOCKS // 2
    result = await lab.puller.take(lab.address, [lab.offered("a", 10), lab.offered("b", 10)], 2, 10)
    assert result.blocks == most, "half of the pool is for what the engine computes"
    assert (result.reason, result.whole) == (Reason.FULL, False)
    assert lab.here(hot) == 12 and sum(bool(lab.here([block])) for block in cold) == BLOCKS - 12 - most
    lab.target.validate()


async def test_where_all_is_hot_nothing_is_taken(lab: Lab) -> None:
    hot = lab.fill("hot", BLOCKS // 2, 2)
    rest = lab.fill("rest", BLOCKS // 2, 1)
    leases = [lab.target.lease(block, 0, 1e9, f"peer {block.hex()}") for block in rest]
    assert all(leases) and lab.target.room() == Room(0, 0)  # what is read at the moment cannot go either
    result = await lab.puller.take(lab.address, [lab.offered("a", 4)], 1, 10)
    assert (result.reason, result.blocks, result.chains) == (Reason.FULL, 0, ())
    assert lab.here(hot) == len(hot) and lab.here(rest) == len(rest)
    for lease in leases:
        if lease is not None:
            lab.target.release(lease)


async def test_what_is_here_of_a_prefix_is_not_what_makes_place_for_its_rest(lab: Lab) -> None:
    whole = lab.offered("a", 14)
    store(lab.target, whole.hashes[:7])
    lab.target.touch(whole.hashes[:7])
    younger = lab.fill("younger", BLOCKS - 7, 1)
    result = await lab.puller.take(lab.address, [whole], 1, 10)
    assert (result.reason, result.blocks, lab.here(whole.hashes)) == (Reason.COMPLETE, 7, 14)
    assert sum(bool(lab.here([block])) for block in younger) == BLOCKS - 14


async def test_what_was_copied_for_being_hot_stays_at_its_source(lab: Lab) -> None:
    offered = lab.offered("hot", 4)
    store(lab.source, chain(4 * BLOCKS - 4, "cold"))
    lab.source.touch(offered.hashes)
    assert (await lab.puller.take(lab.address, [offered], 1, 10)).blocks == 4
    store(lab.source, chain(8, "more"))
    assert len(lab.source.lookup(offered.hashes, use=False)) == 4


async def test_one_copy_at_a_time(lab: Lab) -> None:
    lab.puller._warming.add(None)  # type: ignore[arg-type]
    assert (await lab.puller.take(lab.address, [lab.offered("a", 1)], 0, 10)).reason is Reason.BUSY
    lab.puller._warming.clear()


async def test_a_source_that_goes_in_the_middle_leaves_what_came(lab: Lab) -> None:
    first, gone = lab.offered("a", 3), lab.offered("b", 3)
    lab.source.subscribe(lambda event: None)
    commits = []

    def close(block: bytes) -> None:
        commits.append(block)
        if len(commits) == len(first.hashes):
            lab.server.close()

    lab.target.on_commit = close
    result = await lab.puller.take(lab.address, [first, gone], 0, 10)
    assert not result.whole and result.blocks < 6 and result.reason in {Reason.BROKEN, Reason.UNREACHABLE}
    assert result.chains[0] == first


async def test_blocks_of_another_fingerprint_are_not_taken(lab: Lab, pools: Pools) -> None:
    chains = [lab.offered("a", 3)]
    lab.source.configure(OTHER_FINGERPRINT, BLOCK, 1)
    result = await lab.puller.take(lab.address, chains, 1, 10)
    assert (result.reason, result.blocks, result.chains) == (Reason.MISMATCH, 0, ())


async def test_a_pool_that_no_engine_has_configured_takes_nothing(lab: Lab, pools: Pools) -> None:
    lab.target.close()
    bare = BlockPool(lab.target.path.with_name("bare"), 1 << 20)
    puller = Puller(bare, SECRET, "c", name="bare")
    assert (await puller.take(lab.address, [lab.offered("a", 1)], 0, 10)).reason is Reason.UNCONFIGURED
    await puller.close()
    bare.close()


def test_room_is_what_is_free_and_what_nobody_came_back_for(pools: Pools) -> None:
    pool = pools(8, ranks=2)
    assert pool.room() == Room(8, 0)
    store(pool, chain(3, "cold"), 2)
    store(pool, chain(2, "hot"), 2)
    for _ in range(2):
        pool.touch(chain(2, "hot"))
    assert pool.room() == Room(3, 3) and pool.room(chain(2, "cold")) == Room(3, 1)
    assert spare(pool) == Room(3, 1), "four blocks are half of it"
    pool.close()
    assert pool.room() == Room(0, 0)


@given(st.lists(st.tuples(st.sampled_from(("add", "use", "remove", "give_way")), st.integers(0, 9)), max_size=60))
def test_what_is_unproven_is_what_goes_first(steps: list[tuple[str, int]]) -> None:
    lru = SegmentedLru(8)
    for what, number in steps:
        key = bytes([number])
        if what == "add" and key not in lru:
            lru.add(key)
        elif what != "add" and key in lru:
            getattr(lru, what)(key)
        assert what != "give_way" or key not in lru or lru.victim(()) == key
        order = list(lru)
        assert [lru.is_unproven(key) for key in order] == [True] * lru.unproven + [False] * lru.protected
