"""The persisted boot counter."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gossip import LocalError
from gossip.boot import DAMAGE_GAP, next_incarnation, raise_to


def test_each_boot_counts_one_more(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "boot"
    assert [next_incarnation(path) for _ in range(4)] == [1, 2, 3, 4]


def test_an_accusation_that_was_heard_is_recorded_and_never_lowers(tmp_path: Path) -> None:
    path = tmp_path / "boot"
    raise_to(path, 41)
    raise_to(path, 7)
    assert next_incarnation(path) == 42


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x00" * 4096, b"grapevine-boot 1 99 00000000\n"])
def test_a_damaged_file_never_takes_the_counter_backwards(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "boot"
    for _ in range(5):
        last = next_incarnation(path)
    path.write_bytes(damage)
    after = next_incarnation(path)
    assert last < after <= last + DAMAGE_GAP + 1
    assert next_incarnation(path) == after + 1


def test_a_damaged_predecessor_alone_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "boot"
    next_incarnation(path)
    next_incarnation(path)
    path.with_name("boot.prev").write_bytes(b"garbage")
    assert next_incarnation(path) == 3


def test_a_lost_file_beside_its_predecessor_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "boot"
    for _ in range(5):
        last = next_incarnation(path)
    path.unlink()
    assert next_incarnation(path) > last


def test_damage_without_any_predecessor_starts_high_enough_to_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "boot"
    path.write_bytes(b"garbage")
    assert next_incarnation(path) == DAMAGE_GAP + 1


def test_a_crash_between_writing_and_renaming_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "boot"
    next_incarnation(path)
    path.with_name("boot.new").write_bytes(b"half a fi")
    assert next_incarnation(path) == 2
    path.replace(path.with_name("boot.prev"))  # stopped between the two renames
    assert next_incarnation(path) > 2


def test_two_processes_never_get_the_same_number(tmp_path: Path) -> None:
    path, got = tmp_path / "boot", []
    threads = [threading.Thread(target=lambda: got.append(next_incarnation(path))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 13))


def test_a_directory_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="is a directory"):
        next_incarnation(tmp_path)
