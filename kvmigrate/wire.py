"""The transfer between pools, without I/O: frames, their codec, limits. The messages are in `messages`.

Every frame starts with the same 32 bytes: magic and version, kind, index, length, digest. Control frames carry a
msgpack list of `length` bytes. `BLOCK` is followed by `length` raw bytes of a block, so that a receiver can take them
straight into shared memory; `index` is the block's place in the FETCH, `digest` the digest of its bytes.

    puller                      source
    HELLO(version, cluster, name, nonce)
                                CHALLENGE(nonce, proof)       proofs are empty without a cluster key
    PROOF(proof)
                                WELCOME
    LOOKUP(fingerprint, ranks, chunks)
                                MANIFEST(file, instance, [hash, rank, nbytes, digest]...)   the longest prefix on all
                                                              ranks | UNLIKE(fields)   another fingerprint
    FIND(fingerprint, ranks, hashes)                          the same for block hashes
    HOT(blocks)                 CHAINS([hashes, [chunk, end, own, tokens]...]...)   what is used most there
    FETCH([hash, rank]...)
                                BLOCK + bytes | MISS(index)   in order, one for each; MISS ends the FETCH
    PIN([hash, rank]...)                                      on the same host, instead of FETCH
                                PINNED([slot, generation]...) a prefix of what was asked for
    UNPIN                                                     ends the oldest PIN; no answer
    CORRUPT([hash, rank]...)                                  the source checks its own copy; no answer
                                BUSY | ERROR(code, message)   instead of any answer

Promises:
1. Decoders raise RemoteError and nothing else, and what they return keeps the limits below.
2. A limit is checked before the memory it bounds is taken.
3. FETCHes and PINs are answered in order, so a puller may send the next one before the last one is done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgpack

from .digest import DIGEST_BYTES
from .errors import RemoteError
from .layout import FINGERPRINT_BYTES, HASH_BYTES, MAX_BLOCK_BYTES, MAX_RANKS, MAX_SLOTS
from .messages import (
    BlockHeader,
    Busy,
    Chain,
    Chains,
    Challenge,
    Corrupt,
    Entry,
    Error,
    Fetch,
    Find,
    Hello,
    Hot,
    Key,
    Label,
    Lookup,
    Manifest,
    Message,
    Miss,
    Pin,
    Pinned,
    Place,
    Proof,
    Unlike,
    Unpin,
    Welcome,
)

__all__ = [
    "BlockHeader",
    "Busy",
    "Chain",
    "Chains",
    "Challenge",
    "Corrupt",
    "Entry",
    "Error",
    "Fetch",
    "Find",
    "Hello",
    "Hot",
    "Key",
    "Kind",
    "Label",
    "Lookup",
    "Manifest",
    "Message",
    "Miss",
    "Pin",
    "Pinned",
    "Place",
    "Prefix",
    "Proof",
    "Unlike",
    "Unpin",
    "Welcome",
    "decode",
    "encode",
    "read_prefix",
]

PROTOCOL_VERSION: Final = 2
MAX_CONTROL_BYTES: Final = 1 << 20
#: Chunks of one LOOKUP: 8192 x 512 bytes of prompt = 4 MiB.
MAX_CHUNKS: Final = 8192
#: Blocks x ranks of one MANIFEST; as many fit MAX_CONTROL_BYTES.
MAX_ENTRIES: Final = 8192
#: Chains of one CHAINS; their hashes, and their chunks, are MAX_ENTRIES in all.
MAX_CHAINS: Final = 256
#: Blocks of one FETCH or PIN.
MAX_FETCH: Final = 1024
MAX_NAME: Final = 64
MAX_TEXT: Final = 1024
MAX_FILE_NAME: Final = 255
#: Tokens of one chunk; a chunk is a few hundred bytes.
MAX_LABEL_TOKENS: Final = 1 << 16
#: Readable fields of a fingerprint.
MAX_FIELDS: Final = 64
MAX_FIELD_TEXT: Final = 256
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
_MAX_WORD: Final = (1 << 64) - 1

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
    body: bytes = msgpack.packb([getattr(message, name) for name in message.__slots__])
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
    try:
        values = msgpack.unpackb(body, max_array_len=MAX_ENTRIES, max_map_len=0)
    except Exception as error:  # msgpack raises many kinds, among them plain ValueError
        raise RemoteError(f"transfer: not msgpack: {type(error).__name__}") from error
    width, build = _BUILDERS[prefix.kind]
    if not isinstance(values, list) or len(values) != width:
        raise RemoteError(f"transfer: bad {prefix.kind.name}")
    return build(values)


def _prefix(kind: Kind, index: int, length: int, digest: bytes) -> bytes:
    return _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, kind, index, length, digest)


def _int(value: object, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise RemoteError("transfer: number out of range")
    return value


def _bytes(value: object, *lengths: int) -> bytes:
    if not isinstance(value, bytes) or len(value) not in lengths:
        raise RemoteError("transfer: bytes of a wrong length")
    return value


def _text(value: object, maximum: int) -> str:
    if not isinstance(value, str) or len(value) > maximum:
        raise RemoteError("transfer: bad text")
    return value


def _list(value: object, maximum: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > maximum:
        raise RemoteError("transfer: bad list")
    return value


def _row(value: object, width: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != width:
        raise RemoteError("transfer: bad row")
    return value


def _keys(value: object) -> tuple[Key, ...]:
    rows = [_row(row, 2) for row in _list(value, MAX_FETCH)]
    return tuple(Key(_bytes(h, HASH_BYTES), _int(rank, MAX_RANKS - 1)) for h, rank in rows)


def _entry(row: Sequence[object]) -> Entry:
    block_hash, rank, nbytes, digest = row
    size = _int(nbytes, MAX_BLOCK_BYTES)
    if not size:
        raise RemoteError("transfer: empty block")
    return Entry(_bytes(block_hash, HASH_BYTES), _int(rank, MAX_RANKS - 1), size, _bytes(digest, DIGEST_BYTES))


def _hello(v: list[Any]) -> Hello:
    return Hello(_int(v[0], 255), _text(v[1], MAX_NAME), _text(v[2], MAX_NAME), _bytes(v[3], NONCE_BYTES))


def _lookup(v: list[Any]) -> Lookup:
    chunks = tuple(_int(c, _MAX_WORD) for c in _list(v[2], MAX_CHUNKS))
    return Lookup(_bytes(v[0], FINGERPRINT_BYTES), _int(v[1], MAX_RANKS), chunks)


def _manifest(v: list[Any]) -> Manifest:
    entries = tuple(_entry(_row(row, 4)) for row in _list(v[2], MAX_ENTRIES))
    return Manifest(_text(v[0], MAX_FILE_NAME), _int(v[1], _MAX_WORD), entries)


def _pinned(v: list[Any]) -> Pinned:
    rows = [_row(row, 2) for row in _list(v[0], MAX_FETCH)]
    return Pinned(tuple(Place(_int(slot, MAX_SLOTS - 1), _int(number, _MAX_WORD)) for slot, number in rows))


def _unlike(v: list[Any]) -> Unlike:
    rows = [_row(row, 2) for row in _list(v[0], MAX_FIELDS)]
    return Unlike(tuple((_text(name, MAX_NAME), _value(value)) for name, value in rows))


def _find(v: list[Any]) -> Find:
    hashes = tuple(_bytes(h, HASH_BYTES) for h in _list(v[2], MAX_ENTRIES))
    return Find(_bytes(v[0], FINGERPRINT_BYTES), _int(v[1], MAX_RANKS), hashes)


def _chains(v: list[Any]) -> Chains:
    chains = tuple(_chain(_row(row, 2)) for row in _list(v[0], MAX_CHAINS))
    if max(sum(len(c.hashes) for c in chains), sum(len(c.labels) for c in chains)) > MAX_ENTRIES:
        raise RemoteError("transfer: too many blocks in chains")
    return Chains(chains)


def _chain(row: Sequence[object]) -> Chain:
    hashes = tuple(_bytes(h, HASH_BYTES) for h in _list(row[0], MAX_ENTRIES))
    return Chain(hashes, tuple(_label(_row(label, 4), len(hashes)) for label in _list(row[1], MAX_ENTRIES)))


def _label(row: Sequence[object], blocks: int) -> Label:
    end = _int(row[1], blocks)
    return Label(_int(row[0], _MAX_WORD), end, _int(row[2], end), _int(row[3], MAX_LABEL_TOKENS))


def _value(value: object) -> str | int:
    return _int(value, _MAX_WORD) if type(value) is int else _text(value, MAX_FIELD_TEXT)


_BUILDERS: Final[dict[Kind, tuple[int, Callable[[list[Any]], Message]]]] = {
    Kind.HELLO: (4, _hello),
    Kind.CHALLENGE: (2, lambda v: Challenge(_bytes(v[0], NONCE_BYTES), _bytes(v[1], 0, PROOF_BYTES))),
    Kind.PROOF: (1, lambda v: Proof(_bytes(v[0], 0, PROOF_BYTES))),
    Kind.WELCOME: (0, lambda _: Welcome()),
    Kind.LOOKUP: (3, _lookup),
    Kind.MANIFEST: (3, _manifest),
    Kind.UNLIKE: (1, _unlike),
    Kind.FIND: (3, _find),
    Kind.HOT: (1, lambda v: Hot(_int(v[0], MAX_ENTRIES))),
    Kind.CHAINS: (1, _chains),
    Kind.FETCH: (1, lambda v: Fetch(_keys(v[0]))),
    Kind.MISS: (1, lambda v: Miss(_int(v[0], MAX_FETCH - 1))),
    Kind.PIN: (1, lambda v: Pin(_keys(v[0]))),
    Kind.PINNED: (1, _pinned),
    Kind.UNPIN: (0, lambda _: Unpin()),
    Kind.CORRUPT: (1, lambda v: Corrupt(_keys(v[0]))),
    Kind.BUSY: (0, lambda _: Busy()),
    Kind.ERROR: (2, lambda v: Error(_text(v[0], MAX_NAME), _text(v[1], MAX_TEXT))),
}

_KINDS: Final[dict[type, Kind]] = {
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
