"""What pools say to each other: the messages of the transfer, without their encoding (`wire`) and order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

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
MAX_TAG: Final = 128
MAX_FILE_NAME: Final = 255
#: Tokens of one chunk; a chunk is a few hundred bytes.
MAX_LABEL_TOKENS: Final = 1 << 16
#: Readable fields of a fingerprint.
MAX_FIELDS: Final = 64
MAX_FIELD_TEXT: Final = 256
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """A puller introduces itself. The nonce is fresh for each connection."""

    version: int
    cluster: str
    name: str
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Challenge:
    """The source's nonce, and its proof that it has the cluster key."""

    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """The puller's proof that it has the cluster key."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """Requests are accepted from now on."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which blocks does the chain of chunks have there? Chunks are opaque 64-bit hashes in chain order.

    ``tag`` is whatever the puller's node wants the source's node to know of whose work this is.
    """

    fingerprint: bytes
    ranks: int
    chunks: tuple[int, ...]
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Find:
    """Which of these blocks, from the front on, are there? Answered as LOOKUP is."""

    fingerprint: bytes
    ranks: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Hot:
    """Which chains are used most there? At most so many blocks in all."""

    blocks: int


class Label(NamedTuple):
    """A chunk, how many blocks of its chain cover it and all before it, how many of them it alone, and its tokens."""

    chunk: int
    end: int
    own: int
    tokens: int


class Chain(NamedTuple):
    """Block hashes in chain order, and the chunks that they cover."""

    hashes: tuple[bytes, ...]
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Chains:
    """The hottest chains, the hottest first."""

    chains: tuple[Chain, ...]


class Entry(NamedTuple):
    """A block that the source holds."""

    block_hash: bytes
    rank: int
    nbytes: int
    digest: bytes


class Key(NamedTuple):
    """A block of one rank."""

    block_hash: bytes
    rank: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Blocks in chain order, all ranks of a block together, and the pool file they lie in.

    `file` is a bare file name and `instance` the number in that file's header: a puller on the same host finds the file
    in its own directory of pools and may then PIN instead of FETCH. Nobody else can do anything with them.
    """

    file: str
    instance: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Unlike:
    """The blocks here are of another fingerprint: its readable fields, so that people can be told what differs."""

    fields: tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send these."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """Hold these where they are: the puller reads them out of the pool file itself."""

    keys: tuple[Key, ...]


class Place(NamedTuple):
    """Where a pinned block lies in the pool file of the MANIFEST."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """One place for each key of the PIN; fewer when a block is gone. They stay for a limited time, or until UNPIN."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Unpin:
    """The oldest PIN is done with; no answer."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """`nbytes` raw bytes follow; `index` counts within the FETCH."""

    index: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Miss:
    """Block `index` of the FETCH is gone, and nothing after it will be sent."""

    index: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """These arrived with wrong bytes."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Busy:
    """Too many transfers at the moment; go elsewhere or recompute."""


@dataclass(frozen=True, slots=True)
class Error:
    """The request is refused; `code` for programs, `message` for people."""

    code: str
    message: str


Message = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Lookup
    | Find
    | Manifest
    | Unlike
    | Hot
    | Chains
    | Fetch
    | BlockHeader
    | Miss
    | Pin
    | Pinned
    | Unpin
    | Corrupt
    | Busy
    | Error
)
