"""The transfer between pools, without I/O: frames, their codec, limits. The messages are in `messages`.

Every frame starts with the same 32 bytes: magic and version, kind, index, length, digest. Control frames carry
`length` bytes of msgpack (`bodies`). `BLOCK` is followed by `length` raw bytes of a block, so that a receiver can take
them straight into shared memory; `index` is the block's place in the FETCH, `digest` the digest of its bytes.

    puller                      source
    HELLO(version, cluster, name, nonce)
                                CHALLENGE(nonce, proof)       proofs are empty without a cluster key
    PROOF(proof)
                                WELCOME
    LOOKUP(fingerprint, ranks, chunks, tag)
                                MANIFEST(file, instance, [hash, rank, nbytes, digest]...)   the longest prefix on all
                                                              ranks | UNLIKE(fields)   another fingerprint
    FIND(fingerprint, ranks, hashes)                          the same for block hashes
    HOT(blocks)                 CHAINS([hashes, [chunk, end, own, tokens]...]...)   what is used most there
    FETCH([hash, rank]...)
                                BLOCK + bytes | MISS(index)   in order, one for each; MISS ends the FETCH
    PIN([hash, rank]...)                                      on the same host, instead of FETCH
                                PINNED([slot, generation]...) a prefix of what was asked for: the next one is gone
    UNPIN                                                     ends the oldest PIN; no answer
    CORRUPT([hash, rank]...)                                  the source checks its own copy; no answer
                                BUSY | ERROR(code, message)   instead of any answer

Promises:
1. Decoders raise RemoteError and nothing else, and what they return keeps the limits here and in `messages`.
2. A limit is checked before the memory it bounds is taken.
3. FETCHes and PINs are answered in order, so a puller may send the next one before the last one is done.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from . import bodies
from .digest import DIGEST_BYTES
from .errors import RemoteError
from .layout import MAX_BLOCK_BYTES
from .messages import (
    MAX_FETCH,
    BlockHeader,
    Busy,
    Chains,
    Challenge,
    Corrupt,
    Error,
    Fetch,
    Find,
    Hello,
    Hot,
    Lookup,
    Manifest,
    Message,
    Miss,
    Pin,
    Pinned,
    Proof,
    Unlike,
    Unpin,
    Welcome,
)

PROTOCOL_VERSION: Final = 3
MAX_CONTROL_BYTES: Final = 1 << 20

_MAGIC: Final = b"GVK"
_PREFIX: Final = struct.Struct("!3sBB3xII16s")
PREFIX_BYTES: Final = _PREFIX.size
_NO_DIGEST: Final = bytes(DIGEST_BYTES)
assert PREFIX_BYTES == 32


class Kind(IntEnum):
    """Frame kinds."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    LOOKUP = 5
    MANIFEST = 6
    FETCH = 7
    BLOCK = 8
    MISS = 9
    CORRUPT = 10
    BUSY = 11
    ERROR = 12
    PIN = 13
    PINNED = 14
    UNPIN = 15
    UNLIKE = 16
    FIND = 17
    HOT = 18
    CHAINS = 19


class Prefix(NamedTuple):
    """The first 32 bytes of a frame, checked. `body` bytes of msgpack follow; for BLOCK none, but raw data."""

    kind: Kind
    place: int
    length: int
    digest: bytes

    @property
    def body(self) -> int:
        """Bytes to read before `decode`."""
        return 0 if self.kind is Kind.BLOCK else self.length


def encode(message: Message) -> bytes:
    """Return a frame; for BlockHeader only its first 32 bytes, the raw data goes after them."""
    if isinstance(message, BlockHeader):
        return _prefix(Kind.BLOCK, message.index, message.nbytes, message.digest)
    body = bodies.pack(message)
    return _prefix(_KINDS[type(message)], 0, len(body), _NO_DIGEST) + body


def read_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    """Check a frame's first 32 bytes; RemoteError when they are none."""
    try:
        magic, version, kind, index, length, digest = _PREFIX.unpack(data)
        known = Kind(kind)
    except (struct.error, ValueError) as error:
        raise RemoteError("transfer: no frame") from error
    if magic != _MAGIC:
        raise RemoteError("transfer: the other side does not speak this protocol")
    if version != PROTOCOL_VERSION:
        raise RemoteError(f"transfer: protocol version {version}, this is {PROTOCOL_VERSION}")
    if length > (MAX_BLOCK_BYTES if known is Kind.BLOCK else MAX_CONTROL_BYTES):
        raise RemoteError("transfer: frame is too large")
    return Prefix(known, index, length, digest)


def decode(prefix: Prefix, body: bytes | bytearray | memoryview) -> Message:
    """Decode a frame whose prefix was read; RemoteError when the body is not what the kind demands."""
    if prefix.kind is Kind.BLOCK:
        if prefix.place >= MAX_FETCH or not prefix.length:
            raise RemoteError("transfer: bad block header")
        return BlockHeader(prefix.place, prefix.length, prefix.digest)
    return bodies.unpack(_TYPES[prefix.kind], body)


def _prefix(kind: Kind, index: int, length: int, digest: bytes) -> bytes:
    return _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, kind, index, length, digest)


_KINDS: Final[dict[type[Message], Kind]] = {
    Hello: Kind.HELLO,
    Challenge: Kind.CHALLENGE,
    Proof: Kind.PROOF,
    Welcome: Kind.WELCOME,
    Lookup: Kind.LOOKUP,
    Manifest: Kind.MANIFEST,
    Unlike: Kind.UNLIKE,
    Find: Kind.FIND,
    Hot: Kind.HOT,
    Chains: Kind.CHAINS,
    Fetch: Kind.FETCH,
    Pin: Kind.PIN,
    Pinned: Kind.PINNED,
    Unpin: Kind.UNPIN,
    Miss: Kind.MISS,
    Corrupt: Kind.CORRUPT,
    Busy: Kind.BUSY,
    Error: Kind.ERROR,
}

_TYPES: Final = {kind: message for message, kind in _KINDS.items()}
