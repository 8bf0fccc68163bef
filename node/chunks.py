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

from xxhash import xxh3_64_intdigest

#: Bytes of canonical text per chunk: about 128 tokens of English.
CHUNK_BYTES = 512

#: Chunks looked at in one prompt (8 MiB of text); what lies behind is recomputed like any miss.
MAX_CHUNKS = 16_384


def chunk_hashes(seed: bytes, text: bytes) -> list[int]:
    """The chained 64-bit hashes of the full chunks of `text`, first to last."""
    digest = xxh3_64_intdigest
    previous = digest(seed)
    hashes: list[int] = []
    end = min(len(text) // CHUNK_BYTES, MAX_CHUNKS) * CHUNK_BYTES
    for start in range(0, end, CHUNK_BYTES):
        previous = digest(text[start : start + CHUNK_BYTES], previous)
        hashes.append(previous)
    return hashes


def chunk_seed(*parts: str) -> bytes:
    """A seed from named parts, in an encoding where no two different lists of parts look the same."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
