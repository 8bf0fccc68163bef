"""What a fetch tells its supply: each block once, when it is here on all ranks, and at once when nothing more comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvmigrate import messages
from kvmigrate.digest import block_digest
from kvmigrate.fetch import Fetching
from kvmigrate.pool import BlockPool
from kvmigrate.transport import Deadline
from kvmigrate.ways import Arrived, Stopped, Targets

from .helpers import BLOCK, block_hash, content

Pools = Callable[..., BlockPool]


class Given:
    """Hands out runs, and notes what it is told. `unwanted`: blocks that came from elsewhere."""

    def __init__(self, *runs: range, ranks: int = 1, unwanted: Sequence[int] = ()) -> None:
        self._runs = list(runs)
        self._ranks = ranks
        self._unwanted = unwanted
        self.told: list[tuple[str, object]] = []

    def take(self) -> range | None:
        return self._runs.pop(0) if self._runs else None

    def wait(self, deadline: Deadline) -> bool:
        return bool(self._runs)

    def entries(self, run: range) -> Sequence[messages.Entry]:
        return [
            messages.Entry(block_hash(block), rank, BLOCK, block_digest(content(block_hash(block), rank)))
            for block in run
            for rank in range(self._ranks)
        ]

    def refuse(self, run: range) -> None:
        self.told.append(("refused", run))

    def wanted(self, block: int) -> bool:
        return block not in self._unwanted

    def arrived(self, block: int) -> None:
        self.told.append(("arrived", block))

    def passed(self, block: int) -> None:
        self.told.append(("passed", block))

    def end(self) -> None:
        self.told.append(("end", None))


class FromMemory:
    """A way on which every block is there, except those that are `gone` or `bad`; it says when one is taken."""

    name, depth = "memory", 2

    def __init__(self, given: Given, gone: Sequence[bytes] = (), bad: Sequence[bytes] = ()) -> None:
        self._given = given
        self._gone = gone
        self._bad = bad

    def ask(self, entries: Sequence[messages.Entry], deadline: Deadline) -> None: ...

    def begin(self, entries: Sequence[messages.Entry], targets: Targets, deadline: Deadline) -> None: ...

    def take(
        self, place: int, entry: messages.Entry, target: memoryview | None, deadline: Deadline
    ) -> Arrived | Stopped | None:
        self._given.told.append(("taken", place))
        if entry.block_hash in self._gone:
            return Stopped("gone")
        if target is None:
            return None
        target[:] = content(entry.block_hash, entry.rank)
        return Arrived(entry.digest, b"x" * 16 if entry.block_hash in self._bad else block_digest(target))

    def finish(self, deadline: Deadline) -> None: ...

    def stop(self) -> None: ...


def fetched(pool: BlockPool, given: Given, **faults: Sequence[bytes]) -> tuple[str, Fetching]:
    fetching = Fetching(pool, FromMemory(given, **faults), given, pool.header.epoch)
    reason = fetching.run(Deadline(time.monotonic, 60, 60))
    fetching.give_back()
    assert pool.stats().granted == 0
    return reason, fetching


def told(given: Given) -> list[tuple[str, object]]:
    return [what for what in given.told if what[0] != "taken"]


def test_a_block_has_arrived_when_it_is_here_on_all_ranks(pools: Pools) -> None:
    pool, given = pools(32, ranks=2), Given(range(2), range(2, 3), ranks=2)
    reason, fetching = fetched(pool, given)
    assert (reason, fetching.blocks, fetching.bytes) == ("complete", 3, 6 * BLOCK)
    assert told(given) == [("arrived", 0), ("arrived", 1), ("arrived", 2)]


def test_what_came_from_elsewhere_is_passed_over_and_not_stored(pools: Pools) -> None:
    pool, given = pools(32, ranks=2), Given(range(3), ranks=2, unwanted=[1])
    reason, fetching = fetched(pool, given)
    assert (reason, fetching.blocks) == ("complete", 2)
    assert told(given) == [("arrived", 0), ("passed", 1), ("arrived", 2)]
    assert pool.stats().blocks == 2


def test_others_may_bring_the_rest_before_what_is_under_way_has_passed(pools: Pools) -> None:
    pool, given = pools(32), Given(range(3), range(3, 6))
    reason, fetching = fetched(pool, given, bad=[block_hash(1)])
    assert (reason, fetching.blocks, len(fetching.corrupt)) == ("corrupt", 1, 1)
    taken = [("taken", place) for place in (0, 1, 2)]
    assert given.told == [taken[0], ("arrived", 0), taken[1], ("end", None), taken[2], *taken]


def test_a_block_that_is_gone_ends_it_there(pools: Pools) -> None:
    pool, given = pools(32), Given(range(4))
    assert fetched(pool, given, gone=[block_hash(2)])[0] == "gone"
    assert told(given) == [("arrived", 0), ("arrived", 1), ("end", None)]


def test_what_there_is_no_slot_for_is_refused_and_asked_for_by_others(pools: Pools) -> None:
    pool, given = pools(8), Given(range(4))  # one writer may have a quarter of the slots
    reason, fetching = fetched(pool, given)
    assert (reason, fetching.blocks) == ("complete", 2)
    assert told(given) == [("refused", range(2, 4)), ("arrived", 0), ("arrived", 1)]
