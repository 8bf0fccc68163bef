"""The copies of one drain, with peers, prefixes and a clock that tests hold in their hands."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvmigrate.messages import Chain, Label
from kvmigrate.pool import BlockPool
from kvmigrate.pool_types import Room
from kvmigrate.pull_types import Reason
from kvmigrate.rescue import Wish
from node.errors import RemoteError
from node.kv_hot import Run, hottest, wishes
from node.kv_offer import STEP_S, Offer, Taken
from node.kv_rescue import MAX_HEIRS, Rescue
from node.load import LoadVector
from node.metrics import Metrics
from node.view import Candidate
from tests.waiting import PATIENCE_S

BLOCK = 1 << 20
UNTIL_S = 20.0


def hashes(name: str, count: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name}.{number}".encode()).digest() for number in range(count))


def prefix(name: str, blocks: int) -> Wish:
    found = hashes(name, blocks)
    return Wish(Chain(found, tuple(Label(int.from_bytes(one[:8]), at + 1, 1, 16) for at, one in enumerate(found))))


class Lab:
    """Peers take what they are offered at `rate` bytes a second of the lab's clock, as far as they have room."""

    def __init__(self, pool: BlockPool) -> None:
        self.now = 100.0
        self.found: list[Wish] = []
        self.rooms: dict[str, Room] = {}
        self.rates: dict[str, float] = {}
        self.elsewhere: set[int] = set()
        self.has: dict[str, set[bytes]] = {}
        self.announced: dict[str, set[int]] = {}
        self.offers: list[tuple[str, Offer]] = []
        self.at_once = self.most_at_once = 0
        self.special: dict[str, Callable[[Offer], Awaitable[Taken]]] = {}
        self.slow = self.look_s = 0.0
        self.rescue = Rescue(
            "us",
            pool=lambda: pool,
            prefixes=self,
            cluster=self,
            offer=self._offer,
            metrics=Metrics(lambda: self.now),
            clock=lambda: self.now,
        )

    def peer(self, name: str, free: int = 1000, cold: int = 0, rate: float = 0.0) -> None:
        self.rooms[name], self.rates[name], self.has[name] = Room(free, cold), rate, set()

    def wishes(self) -> list[Wish]:
        return list(self.found)

    def candidates(self) -> dict[str, Candidate]:
        return {name: Candidate(name, LoadVector(rates={"us": self.rates[name]})) for name in self.rooms}

    def held(self, chunks: Sequence[int]) -> Mapping[str, int]:
        self.now += self.look_s
        every = {**self.announced, "elsewhere": self.elsewhere}
        counts = {
            name: next((at for at, one in enumerate(chunks) if one not in has), len(chunks))
            for name, has in every.items()
        }
        return {name: count for name, count in counts.items() if count}

    async def run(self, seconds: float = UNTIL_S) -> dict[str, object]:
        async with asyncio.timeout(PATIENCE_S):
            await self.rescue.run(self.now + seconds)
        return self.rescue.status()

    def copied(self) -> dict[str, int]:
        copied = self.rescue.status()["copied"]
        assert isinstance(copied, dict)
        return {name: one["blocks"] for name, one in copied.items()}

    async def _offer(self, name: str, offer: Offer) -> Taken:
        self.offers.append((name, offer))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        try:
            if name in self.special:
                return await self.special[name](offer)
            return self.take(name, offer)
        finally:
            self.at_once -= 1

    def take(self, name: str, offer: Offer, most: int = 1 << 30) -> Taken:
        if not offer.chains:
            return Taken(Reason.NOTHING, room=self.rooms[name])
        has, came = self.has[name], 0
        for chain in offer.chains:
            for block in chain.hashes:
                if block not in has and came < min(most, sum(self.rooms[name])):
                    has.add(block)
                    came += 1
            self.announced.setdefault(name, set()).update(
                label.chunk for label in chain.labels if chain.hashes[label.end - 1] in has
            )
        self.rescue.stir()
        self.now += came * BLOCK / self.slow if self.slow else 0.0
        free = max(0, self.rooms[name].free - came)
        self.rooms[name] = Room(free, self.rooms[name].cold)
        held = [sum(block in has for block in chain.hashes) for chain in offer.chains]
        return Taken(Reason.COMPLETE, "", came, came * BLOCK, held, self.rooms[name])


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    pool = BlockPool(tmp_path / "pool", 16 * BLOCK)
    pool.configure(b"f" * 16, BLOCK, 1)
    yield Lab(pool)
    pool.close()


async def test_without_anything_to_copy_nobody_is_asked(lab: Lab) -> None:
    lab.peer("a")
    assert (await lab.run())["copied"] == {} and lab.offers == []
    lab.found = [prefix("p", 3)]
    lab.elsewhere = {label.chunk for label in lab.found[0].labels}
    assert (await lab.run())["copied"] == {} and lab.offers == []


async def test_each_peer_is_asked_for_its_room_and_then_takes_its_share(lab: Lab) -> None:
    lab.peer("a")
    lab.peer("b")
    lab.found = [prefix(str(number), 3) for number in range(4)]
    told = await lab.run()
    assert lab.copied() == {"a": 6, "b": 6} and (told["left"], told["refused"]) == ({}, {})
    assert [len(offer.chains) for _, offer in lab.offers] == [0, 0, 2, 2]
    assert all(offer.seconds <= STEP_S for _, offer in lab.offers)
    await lab.run()
    assert len(lab.offers) == 4, "what has been copied is not offered again"


async def test_few_peers_are_asked_and_two_at_a_time_pull(lab: Lab) -> None:
    for number in range(2 * MAX_HEIRS):
        lab.peer(f"peer{number}")
    lab.found = [prefix(str(number), 1) for number in range(3 * MAX_HEIRS)]
    await lab.run()
    assert len(lab.copied()) == MAX_HEIRS == len({name for name, _ in lab.offers})
    lab.most_at_once = 0
    lab.found += [prefix(f"more{number}", 1) for number in range(3 * MAX_HEIRS)]
    await lab.run()
    assert lab.most_at_once == 2


async def test_a_peer_that_took_a_part_is_offered_the_rest(lab: Lab) -> None:
    lab.peer("a")

    async def some(offer: Offer) -> Taken:
        taken = lab.take("a", offer, 2)
        return taken if not offer.chains else Taken(Reason.DEADLINE, "", 2, 2 * BLOCK, taken.held, taken.room)

    lab.special["a"] = some
    lab.found = [prefix("p", 6)]
    told = await lab.run()
    assert lab.copied() == {"a": 6} and told["left"] == {} and len(lab.offers) == 4


@pytest.mark.parametrize("words", [(), (9,), (0, 0, 0)])
async def test_a_peer_that_says_that_it_took_some_and_has_nothing_new_is_not_asked_for_ever(
    lab: Lab, words: tuple[int, ...]
) -> None:
    lab.peer("a")

    async def lies(offer: Offer) -> Taken:
        return Taken(Reason.COMPLETE, "", 5, 5, words, Room(99, 99)) if offer.chains else lab.take("a", offer)

    lab.special["a"] = lies
    lab.found = [prefix("p", 3)]
    await lab.run()
    assert len(lab.offers) <= 3


async def test_who_cannot_be_asked_or_takes_nothing_is_told_with_the_reason_and_others_take_it(lab: Lab) -> None:
    for name in "abcd":
        lab.peer(name)

    async def gone(offer: Offer) -> Taken:
        raise RemoteError("it is gone")

    async def full(offer: Offer) -> Taken:
        return Taken(Reason.FULL, room=Room(0, 0)) if offer.chains else lab.take("b", offer)

    async def unlike(offer: Offer) -> Taken:
        return Taken(Reason.UNCONFIGURED, "it has no KV pool")

    lab.special = {"a": gone, "b": full, "c": unlike}
    lab.found = [prefix(str(number), 2) for number in range(4)]
    told = await lab.run()
    assert lab.copied() == {"d": 8} and told["left"] == {}
    assert told["refused"] == {
        "a": "it is gone",
        "b": "it has no room",
        "c": "it keeps no blocks now (it has no KV pool)",
    }


async def test_a_network_that_turns_out_to_be_slow_is_believed(lab: Lab) -> None:
    lab.peer("a")
    lab.slow = BLOCK  # a second for each block, against a rate that nobody has measured yet

    async def a_few(offer: Offer) -> Taken:
        return lab.take("a", offer, int(STEP_S))

    lab.special["a"] = a_few
    lab.found = [prefix("p", 40)]
    told = await lab.run()
    assert lab.copied() == {"a": 20} and told["left"] == {"there is not enough time": 20}
    sizes = [len(offer.chains[0].hashes) for _, offer in lab.offers if offer.chains]
    assert sizes[0] == 40 and set(sizes[1:]) == {20}, "from the first measurement on it is planned with"


async def test_a_rate_that_was_measured_is_believed_from_the_start(lab: Lab) -> None:
    lab.peer("a", rate=BLOCK / 10)
    lab.slow = BLOCK / 10
    lab.found = [prefix("p", 10)]
    assert (await lab.run(50))["left"] == {"there is not enough time": 5}
    assert lab.copied() == {"a": 5}


async def test_what_was_copied_makes_no_place_for_what_comes_later(lab: Lab) -> None:
    lab.peer("a", free=0, cold=4)  # what came counts as cold there, as all that nobody came back for
    lab.found = [replace(prefix("p", 4), shared=True)]
    await lab.run()
    lab.found.append(replace(prefix("q", 4), shared=True))
    told = await lab.run()
    assert lab.copied() == {"a": 4} and told["left"] == {"no peer has room for them": 4}


async def test_a_peer_that_has_died_has_nothing_and_another_one_is_asked(lab: Lab) -> None:
    lab.peer("a")
    lab.found = [prefix("p", 4)]
    await lab.run()
    assert lab.copied() == {"a": 4}
    del lab.rooms["a"], lab.announced["a"]
    lab.peer("b")
    await lab.run()
    assert lab.copied() == {"a": 4, "b": 4}


async def test_an_announcement_that_never_comes_is_waited_for_a_short_time(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.kv_rescue.HEARD_S", 0.01)
    lab.peer("a")

    async def silent(offer: Offer) -> Taken:
        taken = lab.take("a", offer)
        lab.announced.clear()
        return taken

    lab.special["a"] = silent
    lab.found = [prefix("p", 4)]
    await lab.run()
    assert lab.copied() == {"a": 4}


async def test_looking_for_what_to_copy_ends_with_the_time_too(lab: Lab) -> None:
    lab.peer("a")
    lab.look_s = 1.0  # as in a large cluster that holds the beginning of every prompt
    lab.found = [prefix(str(number), 1) for number in range(100)]
    await lab.run(5)
    assert lab.now < 100 + 5 + 2


async def test_a_bug_costs_the_drain_nothing(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.peer("a")

    async def bug(offer: Offer) -> Taken:
        raise ZeroDivisionError

    lab.special["a"] = bug
    lab.found = [prefix("p", 4)]
    await lab.run()
    assert any("copying KV blocks before the end failed" in record.message for record in caplog.records)


def test_a_prompt_goes_with_the_chunks_of_its_front_that_another_prompt_brought() -> None:
    """Three prompts with one front of two blocks: its chunks are known with the last of them."""
    front = hashes("front", 2)
    runs: list[Run] = [
        ((*front, b"x"), [(1, 1, 1, 16), (2, 2, 1, 16), (13, 3, 1, 16)]),
        ((*front, b"y"), [(23, 3, 1, 16)]),
        ((b"z",), [(33, 1, 1, 16)]),
    ]
    found = wishes(runs, lambda blocks: [2 if block in front else 1 for block in blocks])
    assert [(wish.shared, [label.chunk for label in wish.labels]) for wish in found] == [
        (True, [1, 2]),
        (False, [1, 2, 13]),
        (False, [1, 2, 23]),
        (False, [33]),
    ]
    # `kv warm` copies the same.
    chains = hottest(runs, lambda blocks: [2 if block in front else 1 for block in blocks], 100)
    assert [[label.chunk for label in chain.labels] for chain in chains] == [[1, 2], [1, 2, 13], [1, 2, 23], [33]]
