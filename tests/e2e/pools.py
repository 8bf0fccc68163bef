"""What tests do to a node's pool behind its back, and to its engine's own cache."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp

from kvmigrate import layout
from kvmigrate.digest import block_digest
from kvmigrate.layout import SlotHeader
from kvmigrate.reader import PoolReader
from tests.e2e.client import Client, until
from tests.waiting import PATIENCE_S


async def reset_engine_cache(client: Client, name: str) -> None:
    """Empty the engine's own prefix cache, so that the pool is what is left.

    The engine does not as long as it holds a block for a request, and says so: it is asked again.
    """
    socket = (await client.state(name))["engine"]["address"].removeprefix("unix:")
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=socket)) as engine:

        async def emptied() -> bool:
            async with engine.post("http://engine/reset_prefix_cache") as response:
                assert response.status == 200
                return bool((await response.json())["success"])

        await until(emptied, PATIENCE_S, f"the engine of {name} empties its cache")


class PoolBytes:
    """The pool file of a node, opened for writing where only its owner should write. Slots are seen as when opened."""

    def __init__(self, path: Path) -> None:
        self._reader = PoolReader(path, writable=True)
        self._file = path.open("r+b")
        self._geometry = self._reader.file.geometry

    @classmethod
    async def of(cls, client: Client, name: str) -> "PoolBytes":
        return cls(Path((await client.state(name))["kv"]["path"]))

    def blocks(self, rank: int = 0) -> dict[bytes, int]:
        """Slots of the stored blocks by block hash, in the order in which they were stored."""
        stored = sorted((head.generation, slot, head) for slot, head in self._stored() if head.rank == rank)
        return {head.block_hash: slot for _, slot, head in stored}

    def flip(self, slot: int) -> None:
        """Flip one bit in the middle of a slot's bytes, as a bad memory cell would; a second call mends it."""
        self._file.seek(self._geometry.slot_offset(slot) + self._geometry.block_bytes // 2)
        byte = self._file.read(1)
        self._file.seek(-1, 1)
        self._file.write(bytes([byte[0] ^ 1]))
        self._file.flush()

    def flip_all(self) -> None:
        """Flip one bit in every stored block; a second call mends them."""
        for slot, _ in self._stored():
            self.flip(slot)

    def forge_zeros(self, slot: int) -> None:
        """Put zeros into a slot and make its digest right for them: what nobody can notice any more."""
        zeros = bytes(self._geometry.block_bytes)
        head = self._reader.header(slot)
        self._file.seek(self._geometry.slot_offset(slot))
        self._file.write(zeros)
        header = memoryview(bytearray(self._geometry.header_offset(slot) + layout.SLOT_HEADER_BYTES))
        layout.write_slot_body(
            header, self._geometry, slot, SlotHeader(head.generation, head.block_hash, head.rank, head.nbytes,
                                                     block_digest(zeros[: head.nbytes]))
        )  # fmt: skip
        start = self._geometry.header_offset(slot) + 8  # the generation stays
        self._file.seek(start)
        self._file.write(header[start:])
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self._reader.close()

    def _stored(self) -> Iterator[tuple[int, SlotHeader]]:
        for slot in range(self._geometry.slots):
            head = self._reader.header(slot)
            if head.valid:
                yield slot, head
