"""The worker half with real torch memory, and a pool that can misbehave on command."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kvmigrate.connector.copies import CpuCopies
from kvmigrate.connector.metadata import BlockLoad, BlockSave, LoadJob, SlotRef
from kvmigrate.connector.regions import BlockMemory, map_blocks
from kvmigrate.connector.worker import WorkerHalf
from kvmigrate.digest import block_digest
from kvmigrate.errors import LocalError
from kvmigrate.link.messages import SlotGrant
from kvmigrate.reader import ReadFault

BLOCKS, LAYERS, PAGE = 6, 3, 64


@dataclass
class Placement:
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


def layer_outermost() -> tuple[dict[str, torch.Tensor], list[Placement]]:
    buffer = torch.arange(LAYERS * BLOCKS * PAGE, dtype=torch.int64).to(torch.uint8)
    view = buffer.view(LAYERS, BLOCKS, PAGE)
    return {f"l{i}": view[i] for i in range(LAYERS)}, [Placement([f"l{i}" for i in range(LAYERS)], BLOCKS * PAGE, PAGE)]


def block_outermost() -> tuple[dict[str, torch.Tensor], list[Placement]]:
    buffer = torch.arange(LAYERS * BLOCKS * PAGE, dtype=torch.int64).to(torch.uint8)
    view = buffer.view(BLOCKS, LAYERS, PAGE)
    return {f"l{i}": view[:, i] for i in range(LAYERS)}, [
        Placement([f"l{i}" for i in range(LAYERS)], PAGE, LAYERS * PAGE)
    ]


@pytest.mark.parametrize("make", [layer_outermost, block_outermost])
def test_a_block_is_the_same_bytes_in_layer_order_whatever_the_layout(
    make: Callable[[], tuple[dict[str, torch.Tensor], list[Placement]]],
) -> None:
    caches, placements = make()
    memory = map_blocks(caches, placements, BLOCKS)
    assert memory.block_bytes == LAYERS * PAGE
    slot = bytearray(memory.block_bytes)
    CpuCopies(memory).save([(4, memoryview(slot))], None)
    assert bytes(slot) == b"".join(bytes(caches[f"l{i}"][4].tolist()) for i in range(LAYERS))


@pytest.mark.parametrize("make", [layer_outermost, block_outermost])
def test_loading_touches_only_its_own_block(
    make: Callable[[], tuple[dict[str, torch.Tensor], list[Placement]]],
) -> None:
    caches, placements = make()
    before = {name: cache.clone() for name, cache in caches.items()}
    memory = map_blocks(caches, placements, BLOCKS)
    CpuCopies(memory).load(2, memoryview(bytearray(b"\xaa" * memory.block_bytes)), None)
    for name, cache in caches.items():
        assert (cache[2] == 0xAA).all()
        others = [block for block in range(BLOCKS) if block != 2]
        assert torch.equal(cache[others], before[name][others])


def test_two_buffers_lie_one_after_the_other_in_a_slot() -> None:
    first, placed_first = layer_outermost()
    second, placed_second = layer_outermost()
    renamed = {f"m{name}": cache + 1 for name, cache in second.items()}
    renamed = {name: cache.contiguous() for name, cache in renamed.items()}
    memory = map_blocks(
        {**first, "ml0": renamed["ml0"]}, [*placed_first, Placement(["ml0"], BLOCKS * PAGE, PAGE)], BLOCKS
    )
    assert memory.block_bytes == LAYERS * PAGE + PAGE
    slot = bytearray(memory.block_bytes)
    CpuCopies(memory).save([(1, memoryview(slot))], None)
    assert bytes(slot[-PAGE:]) == bytes(renamed["ml0"][1].tolist())
    assert placed_second


def test_layouts_that_split_a_page_are_refused_with_the_reason() -> None:
    caches, _ = layer_outermost()
    with pytest.raises(LocalError, match="LHBNC"):
        map_blocks(caches, [Placement(["l0"], 2 * BLOCKS * PAGE, PAGE)], BLOCKS)


def test_a_placement_beyond_the_buffer_is_refused() -> None:
    caches, placements = layer_outermost()
    with pytest.raises(LocalError, match="placement needs"):
        map_blocks(caches, placements, BLOCKS + 1)


@dataclass
class FakeSlots:
    """A pool of bytes: reads fail as told, writes land in `data`."""

    data: dict[int, bytearray]
    grants: list[SlotGrant] = field(default_factory=list)
    faults: dict[int, ReadFault | Exception] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    told: list[object] = field(default_factory=list)
    mapped: bool = False

    def poll(self) -> None:
        self.mapped = True

    def begin_write(self) -> tuple[SlotGrant, memoryview] | None:
        if not self.grants:
            return None
        grant = self.grants.pop(0)
        return grant, memoryview(self.data[grant.slot])

    def stored(self, items: Sequence[tuple[SlotGrant, bytes, bytes]]) -> None:
        assert all(digest == block_digest(self.data[grant.slot]) for grant, _, digest in items)
        self.told.append(("stored", [(grant.slot, block_hash) for grant, block_hash, _ in items]))

    def unused(self, grants: Sequence[SlotGrant]) -> None:
        self.told.append(("unused", [grant.slot for grant in grants]))

    def read(self, ref: SlotRef, block_hash: bytes, copy: Callable[[memoryview], None]) -> ReadFault | None:
        self.gate.wait(5)
        if not self.mapped:
            return ReadFault.GONE
        fault = self.faults.get(ref.slot)
        if isinstance(fault, Exception):
            raise fault
        if fault is not ReadFault.CORRUPT:
            copy(memoryview(self.data[ref.slot]))
        return fault

    def loaded(self, rid: str, blocks: int, seconds: float) -> None:
        self.told.append(("loaded", rid, blocks))

    def corrupt(self, slots: Sequence[int]) -> None:
        self.told.append(("corrupt", list(slots)))


@pytest.fixture
def memory() -> BlockMemory:
    caches, placements = layer_outermost()
    return map_blocks(caches, placements, BLOCKS)


@pytest.fixture
def slots(memory: BlockMemory) -> FakeSlots:
    return FakeSlots({n: bytearray([n] * memory.block_bytes) for n in range(8)})


def load_job(request_id: str, *pairs: tuple[int, int]) -> LoadJob:
    return LoadJob(
        request_id, f"rid-{request_id}", tuple(BlockLoad(b, bytes([s] * 32), (SlotRef(0, s, 2),)) for b, s in pairs)
    )


def finish(worker: WorkerHalf, wanted: set[str]) -> set[int]:
    """Drive steps until the requests are reported, as vLLM's polling steps do; exactly once is asserted."""
    done: set[str] = set()
    failed: set[int] = set()
    settled = threading.Event()
    for _ in range(2000):
        now = worker.take_finished()
        assert not now & done
        done |= now
        failed |= worker.take_failed()
        if done >= wanted:
            return failed
        settled.wait(0.005)
    raise AssertionError(f"never reported: {wanted - done}")


def saved_bytes(memory: BlockMemory, block_id: int) -> bytes:
    slot = bytearray(memory.block_bytes)
    CpuCopies(memory).save([(block_id, memoryview(slot))], None)
    return bytes(slot)


def test_a_load_puts_the_slots_bytes_into_the_blocks_and_reports_once(memory: BlockMemory, slots: FakeSlots) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 0, lambda: 0.0)
    slots.gate.set()
    assert not slots.mapped  # the node's answer to our hello waits: an engine's first step may be a load
    worker.start_loads([load_job("a", (0, 3), (1, 4)), load_job("b", (2, 5))])
    assert finish(worker, {"a", "b"}) == set()
    assert [saved_bytes(memory, block)[0] for block in (0, 1, 2)] == [3, 4, 5]
    assert ("loaded", "rid-a", 2) in slots.told
    worker.close()


def test_nothing_is_reported_while_the_thread_may_still_write(memory: BlockMemory, slots: FakeSlots) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 0, lambda: 0.0)
    worker.start_loads([load_job("a", (0, 3))])
    assert worker.take_finished() == set()
    slots.gate.set()
    finish(worker, {"a"})
    worker.close()


def test_a_step_that_computes_nothing_waits_for_a_load_and_no_other_step_does(
    memory: BlockMemory, slots: FakeSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 0, lambda: 0.0)
    worker.start_loads([load_job("a", (0, 3)), load_job("b", (1, 4))])
    assert worker.take_finished(idle=True) == set()  # it does not wait for ever
    monkeypatch.setattr("kvmigrate.connector.worker.IDLE_WAIT_S", 3600.0)
    assert worker.take_finished() == set()
    slots.gate.set()
    done = [worker.take_finished(idle=True)]
    if done != [{"a", "b"}]:
        done.append(worker.take_finished(idle=True))
    assert set.union(*done) == {"a", "b"} and done[0]
    assert worker.take_finished(idle=True) == set()  # nothing is loading
    worker.close()


@pytest.mark.parametrize("fault", [ReadFault.GONE, ReadFault.CORRUPT, RuntimeError("copy failed")])
def test_a_bad_block_fails_itself_and_all_that_follow_and_the_request_still_wakes(
    memory: BlockMemory, slots: FakeSlots, fault: ReadFault | Exception
) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 0, lambda: 0.0)
    slots.gate.set()
    slots.faults[4] = fault
    worker.start_loads([load_job("a", (0, 3), (1, 4), (2, 5))])
    assert finish(worker, {"a"}) == {1, 2}
    assert (("corrupt", [4]) in slots.told) == (fault is ReadFault.CORRUPT)
    assert worker.counters.failed_blocks == 2
    worker.start_loads([load_job("b", (3, 5))])
    assert finish(worker, {"b"}) == set()
    worker.close()


def test_a_block_without_a_shard_for_this_rank_is_not_loaded(memory: BlockMemory, slots: FakeSlots) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 1, lambda: 0.0)
    slots.gate.set()
    worker.start_loads([load_job("a", (0, 3))])
    assert finish(worker, {"a"}) == {0}
    worker.close()


def test_saves_fill_granted_slots_and_skip_what_was_not_granted(memory: BlockMemory, slots: FakeSlots) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 0, lambda: 0.0)
    slots.grants = [SlotGrant(6, 3), SlotGrant(7, 5)]
    worker.save(5, [BlockSave(block, bytes([block] * 32)) for block in (1, 2, 3)])
    assert worker.take_saved() == [5]
    assert worker.take_saved() == []
    assert slots.told == [("stored", [(6, bytes([1] * 32)), (7, bytes([2] * 32))])]
    assert bytes(slots.data[6]) == saved_bytes(memory, 1)
    assert worker.counters.skipped_saves == 1
    worker.close()


def test_a_step_without_a_granted_slot_still_ends_and_one_without_saves_is_no_news(
    memory: BlockMemory, slots: FakeSlots
) -> None:
    worker = WorkerHalf(CpuCopies(memory), slots, 0, lambda: 0.0)
    worker.save(7, [BlockSave(1, bytes(32))])
    worker.save(8, [])
    assert worker.take_saved() == [7]
    assert slots.told == []
    worker.close()
