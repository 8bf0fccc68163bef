from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate import layout
from kvmigrate.errors import LocalError, PoolSizeError, RemoteError
from kvmigrate.layout import FileHeader, Geometry, SlotHeader

HEADER = FileHeader(Geometry(8192, 20, 2), b"f" * 16, 7, 99, 1 << 20)


@given(
    capacity=st.integers(0, 1 << 40),
    block=st.integers(1, layout.MAX_BLOCK_BYTES),
    ranks=st.integers(1, layout.MAX_RANKS),
)
def test_a_geometry_fits_its_capacity_is_page_aligned_and_wastes_less_than_a_slot(
    capacity: int, block: int, ranks: int
) -> None:
    try:
        g = layout.plan_geometry(capacity, block, ranks)
    except PoolSizeError:
        return
    assert g.total_bytes <= capacity
    assert g.slots >= layout.MIN_BLOCKS * ranks
    assert g.data_offset % layout.PAGE_BYTES == g.stride % layout.PAGE_BYTES == 0
    assert g.header_offset(g.slots - 1) + layout.SLOT_HEADER_BYTES <= g.data_offset
    assert g.slots == layout.MAX_SLOTS or capacity - g.total_bytes < g.stride + 3 * layout.PAGE_BYTES


def test_a_pool_that_is_too_small_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(PoolSizeError, match="need at least") as caught:
        layout.plan_geometry(1 << 20, 3 << 20, 1)
    need = int(str(caught.value).split("at least ")[1].split()[0])
    assert layout.plan_geometry(need, 3 << 20, 1).slots == layout.MIN_BLOCKS


@pytest.mark.parametrize(("block", "ranks"), [(0, 1), (layout.MAX_BLOCK_BYTES + 1, 1), (4096, 0), (4096, 65)])
def test_nonsense_sizes_are_refused(block: int, ranks: int) -> None:
    with pytest.raises(LocalError):
        layout.plan_geometry(1 << 30, block, ranks)


def test_file_header_and_slot_header_come_back_as_written() -> None:
    buffer = memoryview(bytearray(1 << 20))
    layout.pack_file_header(buffer, HEADER)
    assert layout.unpack_file_header(buffer) == HEADER
    assert layout.read_epoch(buffer) == 7
    body = SlotHeader(4, b"h" * 32, 1, 8000, b"d" * 16)
    layout.write_slot_body(buffer, HEADER.geometry, 19, body)
    assert layout.unpack_slot_header(buffer, HEADER.geometry, 19).generation == 0
    layout.write_generation(buffer, HEADER.geometry, 19, 4)
    assert layout.unpack_slot_header(buffer, HEADER.geometry, 19) == body


def test_a_generation_is_valid_only_when_even_and_not_zero() -> None:
    assert [SlotHeader(g, b"", 0, 0, b"").valid for g in range(4)] == [False, False, True, False]


def test_slots_outside_of_the_pool_have_no_offset() -> None:
    for slot in (-1, 20):
        with pytest.raises(IndexError):
            HEADER.geometry.slot_offset(slot)
        with pytest.raises(IndexError):
            HEADER.geometry.header_offset(slot)


@given(st.binary(max_size=256))
def test_a_foreign_file_header_raises_the_remote_kind_only(data: bytes) -> None:
    for head in (data, layout.MAGIC + data, layout.MAGIC + (1).to_bytes(4, "little") + data):
        try:
            layout.unpack_file_header(memoryview(head))
        except RemoteError:
            continue
