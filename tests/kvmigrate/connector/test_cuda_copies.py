"""Copies on a GPU, without one: the order of copies and the engine's work, and that every step and load ends once."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kvmigrate.connector.cuda_copies import CudaCopies
from kvmigrate.connector.metadata import BlockSave
from kvmigrate.connector.regions import BlockMemory, map_blocks
from kvmigrate.connector.worker import WorkerHalf
from kvmigrate.link.messages import SlotGrant

from .fake_cuda import FakeCuda
from .test_worker import BLOCKS, FakeSlots, finish, layer_outermost, load_job


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return layer_outermost()[0]


@pytest.fixture
def memory(caches: dict[str, torch.Tensor]) -> BlockMemory:
    return map_blocks(caches, layer_outermost()[1], BLOCKS)


@pytest.fixture
def slots(memory: BlockMemory) -> FakeSlots:
    slots = FakeSlots({n: bytearray([n] * memory.block_bytes) for n in range(8)})
    slots.gate.set()
    return slots


@pytest.fixture
def worker(cuda: FakeCuda, memory: BlockMemory, slots: FakeSlots) -> Iterator[WorkerHalf]:
    worker = WorkerHalf(CudaCopies(memory, cuda), slots, 0, lambda: 0.0)
    yield worker
    cuda.allow()
    worker.close()
    assert not cuda.pinned


def saved_steps(worker: WorkerHalf, wanted: list[int]) -> None:
    """Drive steps until these are reported; exactly once is asserted."""
    done: list[int] = []
    pause = threading.Event()
    for _ in range(2000):
        done += worker.take_saved()
        if len(done) >= len(wanted):
            break
        pause.wait(0.005)
    assert done == wanted


def compute(cuda: FakeCuda, caches: dict[str, torch.Tensor], block: int, value: int) -> None:
    """The engine queues a forward pass that fills a block."""

    def fill() -> bool:
        for cache in caches.values():
            cache[block] = value
        return True

    cuda.engine.queue(fill)


def test_a_save_takes_what_the_step_before_it_computed(
    cuda: FakeCuda, caches: dict[str, torch.Tensor], worker: WorkerHalf, slots: FakeSlots
) -> None:
    compute(cuda, caches, 2, 0xEE)
    slots.grants = [SlotGrant(6, 3)]
    worker.save(1, [BlockSave(2, bytes(32))])
    assert worker.take_saved() == []  # returned at once: the engine has not even begun
    cuda.until_waits(1)
    assert slots.data[6][0] == 6
    cuda.allow()
    saved_steps(worker, [1])
    assert set(slots.data[6]) == {0xEE}
    assert slots.told == [("stored", [(6, bytes(32))])]


def test_saves_of_several_steps_end_once_each_and_in_order(
    cuda: FakeCuda, caches: dict[str, torch.Tensor], worker: WorkerHalf, slots: FakeSlots
) -> None:
    slots.grants = [SlotGrant(slot, 3) for slot in range(3)]
    for step in range(3):
        compute(cuda, caches, step, 0x50 + step)
        worker.save(step, [BlockSave(step, bytes([step] * 32))])
    assert worker.take_saved() == []
    cuda.allow()
    saved_steps(worker, [0, 1, 2])
    assert [slots.data[slot][-1] for slot in range(3)] == [0x50, 0x51, 0x52]


def test_a_save_that_fails_gives_its_slots_back_and_ends_its_step(
    cuda: FakeCuda, worker: WorkerHalf, slots: FakeSlots
) -> None:
    slots.grants = [SlotGrant(6, 3), SlotGrant(7, 5), SlotGrant(5, 7)]
    cuda.fail_copy = 2
    worker.save(1, [BlockSave(1, bytes(32)), BlockSave(2, bytes(32))])
    worker.save(2, [BlockSave(3, bytes(32))])
    cuda.allow()
    saved_steps(worker, [1, 2])
    assert slots.told == [("unused", [6, 7]), ("stored", [(5, bytes(32))])]
    assert worker.counters.saved_blocks == 1


def test_a_load_waits_for_the_engines_earlier_work_on_the_block(
    cuda: FakeCuda, caches: dict[str, torch.Tensor], worker: WorkerHalf, slots: FakeSlots
) -> None:
    compute(cuda, caches, 0, 0xDD)  # by the block's former user
    slots.poll()
    worker.start_loads([load_job("a", (0, 3), (1, 4))])
    cuda.until_waits(1)
    assert worker.take_finished() == set()
    cuda.allow()
    assert finish(worker, {"a"}) == set()
    assert [int(caches["l0"][block][0]) for block in (0, 1)] == [3, 4]


def test_a_load_that_fails_wakes_its_request_with_the_blocks_named(
    cuda: FakeCuda, worker: WorkerHalf, slots: FakeSlots
) -> None:
    cuda.fail_copy = 2
    worker.start_loads([load_job("a", (0, 3), (1, 4), (2, 5))])
    worker.start_loads([load_job("b", (3, 6))])
    cuda.allow()
    assert finish(worker, {"a", "b"}) == {1, 2}


def test_a_save_does_not_wait_for_a_load(cuda: FakeCuda, worker: WorkerHalf, slots: FakeSlots) -> None:
    slots.gate.clear()  # the load thread is stuck
    worker.start_loads([load_job("a", (0, 3))])
    slots.grants = [SlotGrant(6, 3)]
    worker.save(1, [BlockSave(2, bytes(32))])
    cuda.allow()
    saved_steps(worker, [1])
    slots.gate.set()
    cuda.allow()
    finish(worker, {"a"})


def test_a_slot_is_pinned_once_and_let_go_with_its_pool_file(
    cuda: FakeCuda, worker: WorkerHalf, slots: FakeSlots
) -> None:
    for step in (1, 2):
        slots.grants = [SlotGrant(6, 2 * step + 1)]
        worker.save(step, [BlockSave(step, bytes(32))])
        cuda.allow()
        saved_steps(worker, [step])
    assert len(cuda.pinned) == cuda.registrations == 1
    slots.data[6] = bytearray(slots.data[6])  # another file is mapped
    slots.grants = [SlotGrant(6, 7)]
    worker.save(3, [BlockSave(3, bytes(32))])
    cuda.allow()
    saved_steps(worker, [3])
    assert len(cuda.pinned) == 1 and cuda.registrations == 2


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(
    cuda: FakeCuda, worker: WorkerHalf, slots: FakeSlots, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.pins = False
    slots.grants = [SlotGrant(6, 3), SlotGrant(7, 3)]
    data = bytearray(2 * len(slots.data[6]))
    for place, slot in enumerate((6, 7)):  # of one file
        slots.data[slot] = memoryview(data)[place * len(data) // 2 :][: len(data) // 2]  # type: ignore[assignment]
    worker.save(1, [BlockSave(1, bytes(32)), BlockSave(2, bytes(32))])
    cuda.allow()
    saved_steps(worker, [1])
    assert cuda.registrations == 1
    assert worker.counters.saved_blocks == 2
    assert [record.message for record in caplog.records if "pin" in record.message] != []
