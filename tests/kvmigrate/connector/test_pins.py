"""Blocks of saves under way: held once, let go once, never too many."""

from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.connector.metadata import BlockSave
from kvmigrate.connector.pins import SHARE, Pins


class Blocks:
    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))
        self.references: Counter[int] = Counter()

    def touch(self, blocks: Sequence[int]) -> None:
        self.references.update(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        self.references.subtract(ordered_blocks)
        assert min(self.references.values()) >= 0


def saves(*block_ids: int) -> list[BlockSave]:
    return [BlockSave(block_id, bytes(32)) for block_id in block_ids]


def test_blocks_are_held_until_the_worker_of_every_rank_is_done() -> None:
    blocks = Blocks(64)
    pins = Pins(blocks, ranks=2)
    assert pins.hold(1, saves(3, 4)) == saves(3, 4)
    pins.release({1: 1})
    assert blocks.references[3] == blocks.references[4] == 1
    pins.release({1: 1, 7: 2})
    pins.release({1: 1})
    assert blocks.references.total() == 0 and not pins


def test_saves_hold_only_their_share_of_the_engines_blocks() -> None:
    pins = Pins(Blocks(4 * SHARE), ranks=1)
    assert pins.hold(1, saves(1, 2, 3)) == saves(1, 2, 3)
    assert pins.hold(2, saves(4, 5)) == saves(4)
    assert pins.hold(3, saves(6)) == []
    pins.release({1: 1})
    assert pins.hold(4, saves(7)) == saves(7)


@given(st.lists(st.one_of(st.lists(st.integers(0, 63), max_size=4), st.integers(0, 30)), max_size=60))
def test_whatever_the_order_every_block_is_let_go_in_the_end(events: list[list[int] | int]) -> None:
    blocks, step, reported = Blocks(64), 0, Counter[int]()
    pins = Pins(blocks, ranks=2)
    for event in events:
        if isinstance(event, list):
            step += 1
            pins.hold(step, saves(*event))
        elif reported[event] < 2:
            reported[event] += event <= step
            pins.release({event: 1})
    for late in range(1, step + 1):
        pins.release({late: 2 - reported[late]} if reported[late] < 2 else {})
    assert blocks.references.total() == 0 and not pins
