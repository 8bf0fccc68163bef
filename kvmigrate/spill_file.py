"""Format of a spill file: a pool's blocks on disk, from a planned stop of their node to its next start.

    head      one fixed record     magic, version, ranks, block_bytes, blocks, sizes, fingerprint, digest
    table     64 bytes a block     hash, rank, nbytes, digest, uses: in the order of the data, most wanted first
    chains    msgpack              which chunks of prompts the blocks belong to
    data      one after another    the bytes of each block

Rules:
1. The head is written last, so a file without its end is no spill file. It ends with one digest over itself, table and
   chains, and the table has one over each block: a changed byte anywhere is noticed, in a block's name as in its bytes.
2. `unpack` and `read_table` raise RemoteError, whatever the bytes: the disk is somebody else.
3. Integers are little-endian: a file may be read by another machine with the same model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgpack

from .digest import DIGEST_BYTES, block_digest
from .errors import RemoteError
from .layout import HASH_BYTES, MAX_BLOCK_BYTES, MAX_RANKS, MAX_SLOTS
from .messages import MAX_CHAINS, MAX_ENTRIES, Chain, Label

MAGIC: Final = b"GVSPILL\0"
VERSION: Final = 1
# magic, version, ranks, block_bytes, blocks, table bytes, chains bytes, fingerprint; then the digest
_HEAD: Final = struct.Struct("<8sIIQQQQ16s")
_ROW: Final = struct.Struct("<32sIIQ16s")
HEAD_BYTES: Final = _HEAD.size + DIGEST_BYTES
ROW_BYTES: Final = _ROW.size
#: As large as the largest set of chains that a peer may send.
MAX_CHAINS_BYTES: Final = 2 << 20
_WORD: Final = 1 << 64


class Row(NamedTuple):
    """One block of one rank."""

    block_hash: bytes
    rank: int
    nbytes: int
    uses: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """What the file holds."""

    fingerprint: bytes
    block_bytes: int
    ranks: int
    blocks: int  #: rows
    table_bytes: int  #: room for rows, some of it perhaps unused
    chains_bytes: int

    @property
    def data_offset(self) -> int:
        """Where the first block's bytes are."""
        return HEAD_BYTES + self.table_bytes + self.chains_bytes

    def pack(self, table: bytes, chains: bytes) -> bytes:
        """Return the record, with the digest over everything but the data."""
        fields = _HEAD.pack(
            MAGIC,
            VERSION,
            self.ranks,
            self.block_bytes,
            self.blocks,
            self.table_bytes,
            self.chains_bytes,
            self.fingerprint,
        )
        return fields + block_digest(fields + table + chains)


def unpack(data: bytes) -> Head:
    """Read the head; `read_table` says whether it is what was written."""
    if len(data) != HEAD_BYTES:
        raise RemoteError("it is too short to be a spill file")
    magic, version, ranks, block_bytes, blocks, table, chains, fingerprint = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise RemoteError("it is no spill file, or was not written to its end")
    if version != VERSION:
        raise RemoteError(f"it has version {version}, this is version {VERSION}")
    if not (0 < ranks <= MAX_RANKS and 0 < block_bytes <= MAX_BLOCK_BYTES and blocks <= MAX_SLOTS):
        raise RemoteError("its head is damaged")
    if not (blocks * ROW_BYTES <= table <= MAX_SLOTS * ROW_BYTES and chains <= MAX_CHAINS_BYTES):
        raise RemoteError("its head is damaged")
    return Head(fingerprint, block_bytes, ranks, blocks, table, chains)


def pack_table(rows: Iterable[Row], room: int) -> bytes:
    """Return the rows, filled up to `room` bytes."""
    packed = b"".join(_ROW.pack(row.block_hash, row.rank, row.nbytes, row.uses, row.digest) for row in rows)
    return packed.ljust(room, b"\0")


def read_table(packed_head: bytes, table: bytes, chains: bytes) -> tuple[list[Row], list[Chain]]:
    """Read the rows and the chains, after the digest was found right."""
    head = unpack(packed_head)
    if head.pack(table, chains) != packed_head:
        raise RemoteError("its table is damaged")
    rows = [Row(*_ROW.unpack_from(table, place * ROW_BYTES)) for place in range(head.blocks)]
    for row in rows:
        if row.rank >= head.ranks or not 0 < row.nbytes <= head.block_bytes:
            raise RemoteError("its table contradicts its head")
    return rows, _unpack_chains(chains)


def pack_chains(chains: Sequence[Chain]) -> bytes:
    """Return the chains that fit; the rest are left out."""
    kept = list(chains[:MAX_CHAINS])
    while len(packed := bytes(msgpack.packb(kept))) > MAX_CHAINS_BYTES:
        kept = kept[: len(kept) // 2]
    return packed


def _unpack_chains(data: bytes) -> list[Chain]:
    try:
        raw = msgpack.unpackb(data, max_array_len=MAX_ENTRIES)
        return [_chain(*item) for item in raw]
    except RemoteError:
        raise
    except Exception as error:  # msgpack raises many kinds; a map or a number in the wrong place raises more
        raise RemoteError("its chains are damaged") from error


def _chain(hashes: list[bytes], labels: list[list[int]]) -> Chain:
    if not all(isinstance(h, bytes) and len(h) == HASH_BYTES for h in hashes):
        raise RemoteError("its chains are damaged")
    return Chain(tuple(hashes), tuple(_label(*label) for label in labels))


def _label(*values: int) -> Label:
    if not all(type(value) is int and 0 <= value < _WORD for value in values):
        raise RemoteError("its chains are damaged")
    return Label(*values)
