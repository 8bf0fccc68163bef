"""Chunk hashes: the identity of a prompt's beginning, for routing.

Rules
1. The text is cut into chunks of `CHUNK_BYTES`; a rest shorter than that has no hash.
2. Each hash is seeded with the hash before it, the first with the seed: equal hashes mean equal text from the
   first byte on (up to 64-bit collisions, which cost speed and never correctness: the engine looks up its own
   exact block hashes).
3. The seed holds everything that separates caches: model (or adapter) name, cache salt, kind of text.

Changing anything here makes nodes of different versions blind to each other's prefixes.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

#: Bytes of canonical text per chunk: about 128 tokens of English.
CHUNK_BYTES = 512

#: Chunks looked at in one prompt (8 MiB of text); what lies behind is recomputed like any miss.
MAX_CHUNKS = 16_384

_PIECES = struct.Struct(f"{CHUNK_BYTES}s")


def chunk_hashes(seed: bytes, text: bytes) -> list[int]:
    """The chained 64-bit hashes of the full chunks of `text`, first to last."""
    digest = xxh3_64_intdigest
    previous = digest(seed)
    end = min(len(text) // CHUNK_BYTES, MAX_CHUNKS) * CHUNK_BYTES
    # Cut in C: a prompt of 220 KB has 430 chunks, and slicing them one by one takes longer than hashing them.
    return [previous := digest(piece, previous) for (piece,) in _PIECES.iter_unpack(memoryview(text)[:end])]


def chunk_seed(*parts: str) -> bytes:
    """A seed from named parts, in an encoding where no two different lists of parts look the same."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
