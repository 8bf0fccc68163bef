"""The one digest of block bytes: xxh3_128.

It guards against accidents (a torn write, a flipped bit, a slot overwritten under a reader), not against forgery: who
may write is decided by file permissions and by the cluster key of the transfer.
"""

from __future__ import annotations

from typing import Final

import xxhash

DIGEST_BYTES: Final = 16


def block_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 16-byte digest of a block's bytes."""
    return xxhash.xxh3_128_digest(data)


class RunningDigest:
    """`block_digest` of bytes that arrive in pieces: each piece is hashed while it is still in the CPU's cache."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next piece."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """Return the digest of everything so far."""
        return self._state.digest()
