"""The checkers bite: a block with other bytes is noticed, and a lost block breaks the engine's books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvmigrate.reader import ReadFault
from node.emulator import EmulatedEngine, Job
from node.emulator.config import preset
from node.emulator.serve.link import BLOCK_BYTES, EmulatedConnector, block_bytes

HASH = b"h" * 32


@pytest.mark.parametrize(("data", "loaded", "wrong"), [(block_bytes(HASH, BLOCK_BYTES), 1, 0), (b"x" * 4096, 0, 1)])
def test_a_block_with_other_bytes_is_counted_and_computed_again(
    tmp_path: Path, data: bytes, loaded: int, wrong: int
) -> None:
    connector = EmulatedConnector(tmp_path / "nobody.link", preset("8b-gpu"), "demo")

    def read(ref: object, block_hash: bytes, copy: Callable[[memoryview], None]) -> ReadFault | None:
        copy(memoryview(data))
        return None

    connector._slots.read = read  # type: ignore[method-assign]
    connector._mirror.add([(HASH, 0, 0, 2)])
    assert connector.load(Job("r", 20, 1, (HASH,)), 0, 1) == loaded
    assert connector.wrong == wrong
    connector.close()


def test_a_lost_block_breaks_the_books() -> None:
    engine = EmulatedEngine(preset("8b-gpu"))
    engine.submit(Job("a", 100, 5), 0.0)
    engine.advance(0.01)
    engine.validate()
    engine.cache._free -= 1
    with pytest.raises(AssertionError):
        engine.validate()
