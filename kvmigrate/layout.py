"""Layout of the shared-memory pool file, shared by its owner (the node) and its readers (the engine's processes).

    file header    one page           magic, version, geometry, fingerprint digest, epoch, instance
    slot headers   64 bytes a slot    generation, block hash, rank, nbytes, digest
    slot data      page-aligned, `stride` bytes a slot

Rules:
1. Only the owner writes headers. A writer that holds a granted slot writes that slot's data and nothing else.
2. Generation 0 = never used, odd = not readable (free, or being written), even = valid. The owner makes it odd
   before anybody may write the data, and even after the data and the header are complete. No even value is ever
   used twice in a file. Hence: generation even and as expected, hash equal, digest right, and the same generation
   after the copy = the block that was asked for.
3. The epoch grows whenever the contents are dropped or the geometry changes; a different epoch voids every slot
   number and offset that a process remembers. A different instance means another file.
4. Integers are in native byte order and naturally aligned: the file never leaves its host, and an aligned native
   8-byte store cannot be seen half done.

If you edit a format here, raise `LAYOUT_VERSION`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from .errors import LocalError, PoolSizeError, RemoteError

MAGIC: Final = b"GVKVPOOL"
LAYOUT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
HASH_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 16
#: A block of one rank; larger than any real one (8B, block of 128 tokens: 16 MiB), small enough to bound a lie.
MAX_BLOCK_BYTES: Final = 256 << 20
#: More slots than this would make the header scan and the mirror in the scheduler too heavy.
MAX_SLOTS: Final = 1 << 20
MAX_RANKS: Final = 64
#: A pool that cannot hold this many blocks of every rank evicts what it has just stored.
MIN_BLOCKS: Final = 8

# magic, version, ranks, block_bytes, slots, epoch, instance, fingerprint, capacity
_FILE_HEADER: Final = struct.Struct("@8sIIQQQQ16sQ")
# generation, block hash, rank, nbytes, digest
_SLOT_HEADER: Final = struct.Struct("@Q32sII16s")
SLOT_HEADER_BYTES: Final = _SLOT_HEADER.size
_SLOT_BODY: Final = struct.Struct("@32sII16s")
_WORD: Final = struct.Struct("@Q")
_EPOCH_OFFSET: Final = struct.calcsize("@8sIIQQ")
assert SLOT_HEADER_BYTES == 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything is in a pool file. Sizes in bytes."""

    block_bytes: int
    slots: int
    ranks: int
    stride: int = field(init=False, repr=False, compare=False)  #: from one slot's data to the next: whole pages
    data_offset: int = field(init=False, repr=False, compare=False)  #: of slot 0's data

    def __post_init__(self) -> None:
        """Compute once what every access needs."""
        object.__setattr__(self, "stride", _page_up(self.block_bytes))
        object.__setattr__(self, "data_offset", _page_up(PAGE_BYTES + SLOT_HEADER_BYTES * self.slots))

    @property
    def total_bytes(self) -> int:
        """Bytes of the file that are used."""
        return self.data_offset + self.stride * self.slots

    def header_offset(self, slot: int) -> int:
        """Offset of a slot's header; IndexError when there is no such slot."""
        self._check(slot)
        return PAGE_BYTES + SLOT_HEADER_BYTES * slot

    def slot_offset(self, slot: int) -> int:
        """Offset of a slot's data; IndexError when there is no such slot."""
        self._check(slot)
        return self.data_offset + self.stride * slot

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The first page of a pool file."""

    geometry: Geometry
    fingerprint: bytes
    epoch: int
    instance: int
    capacity: int


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds. `valid` only when the generation is even and not 0."""

    generation: int
    block_hash: bytes
    rank: int
    nbytes: int
    digest: bytes

    @property
    def valid(self) -> bool:
        """Whether the slot holds a complete block."""
        return self.generation > 0 and self.generation % 2 == 0


def plan_geometry(capacity_bytes: int, block_bytes: int, ranks: int) -> Geometry:
    """Fit as many slots as possible into a capacity; PoolSizeError when it is too small to be useful."""
    if not 0 < block_bytes <= MAX_BLOCK_BYTES:
        raise LocalError(f"block of {block_bytes} bytes: must be between 1 and {MAX_BLOCK_BYTES}")
    if not 0 < ranks <= MAX_RANKS:
        raise LocalError(f"{ranks} ranks: must be between 1 and {MAX_RANKS}")
    stride = _page_up(block_bytes)
    fixed = 2 * PAGE_BYTES  # the file header, and the rounding of the slot headers
    slots = min(max(0, capacity_bytes - fixed) // (stride + SLOT_HEADER_BYTES), MAX_SLOTS)
    if slots < MIN_BLOCKS * ranks:
        need = fixed + MIN_BLOCKS * ranks * (stride + SLOT_HEADER_BYTES)
        raise PoolSizeError(
            f"KV pool of {capacity_bytes} bytes is too small: {ranks} rank(s) with blocks of {block_bytes} bytes "
            f"need at least {need} bytes; give the pool more memory"
        )
    return Geometry(block_bytes, slots, ranks)


def pack_file_header(buffer: memoryview, header: FileHeader) -> None:
    """Write the file header at the start of `buffer`."""
    g = header.geometry
    _FILE_HEADER.pack_into(
        buffer,
        0,
        MAGIC,
        LAYOUT_VERSION,
        g.ranks,
        g.block_bytes,
        g.slots,
        header.epoch,
        header.instance,
        header.fingerprint,
        header.capacity,
    )


def unpack_file_header(buffer: memoryview) -> FileHeader:
    """Read the file header; RemoteError when this is not a pool file of our version, or it contradicts itself."""
    try:
        magic, version, ranks, block_bytes, slots, epoch, instance, fingerprint, capacity = _FILE_HEADER.unpack_from(
            buffer, 0
        )
    except struct.error as error:
        raise RemoteError("pool file is shorter than its header") from error
    if magic != MAGIC:
        raise RemoteError("not a KV pool file")
    if version != LAYOUT_VERSION:
        raise RemoteError(f"KV pool file has layout version {version}, this is version {LAYOUT_VERSION}")
    if slots > MAX_SLOTS or block_bytes > MAX_BLOCK_BYTES or ranks > MAX_RANKS:
        raise RemoteError("KV pool file header is out of range")
    header = FileHeader(Geometry(block_bytes, slots, ranks), fingerprint, epoch, instance, capacity)
    if slots and header.geometry.total_bytes > capacity:
        raise RemoteError("KV pool file header claims more than its file holds")
    return header


def unpack_slot_header(buffer: memoryview, geometry: Geometry, slot: int) -> SlotHeader:
    """Read one slot header. The caller checks the generation again after it has used the data."""
    generation, block_hash, rank, nbytes, digest = _SLOT_HEADER.unpack_from(buffer, geometry.header_offset(slot))
    return SlotHeader(generation, block_hash, rank, nbytes, digest)


def read_generation(buffer: memoryview, geometry: Geometry, slot: int) -> int:
    """Read a slot's generation alone."""
    generation: int = _WORD.unpack_from(buffer, geometry.header_offset(slot))[0]
    return generation


def read_epoch(buffer: memoryview) -> int:
    """Read the epoch alone: never torn, even while the owner rewrites the rest of the header."""
    epoch: int = _WORD.unpack_from(buffer, _EPOCH_OFFSET)[0]
    return epoch


def write_epoch(buffer: memoryview, epoch: int) -> None:
    """Owner only: void what readers remember, before the rest of the header changes."""
    _WORD.pack_into(buffer, _EPOCH_OFFSET, epoch)


def write_generation(buffer: memoryview, geometry: Geometry, slot: int, generation: int) -> None:
    """Owner only: set a slot's generation."""
    _WORD.pack_into(buffer, geometry.header_offset(slot), generation)


def write_slot_body(buffer: memoryview, geometry: Geometry, slot: int, body: SlotHeader) -> None:
    """Owner only, while the generation is odd: describe the block that the slot now holds.

    The generation in `body` is not written: that is the last step, and `write_generation`'s.
    """
    offset = geometry.header_offset(slot) + _WORD.size
    _SLOT_BODY.pack_into(buffer, offset, body.block_hash, body.rank, body.nbytes, body.digest)


def _page_up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
