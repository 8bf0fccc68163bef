"""Messages of the engine link.

engine -> node   Hello first, once a connection. Then
                 scheduler half: Started, Prefilled, Filled, Finished, Load, Reset
                 worker half:    Stored, Want, Failed, Loaded, Corrupt
node -> engine   Pool first; again whenever the pool's contents were dropped or its geometry changed
                 worker half:    Grant, Clear
                 scheduler half: Add, Drop, Clear, Pulled
local            Disconnected: what `LinkClient.poll` reports by itself, never sent

Rules:
1. A slot is named together with its generation wherever a late message could otherwise hit the slot's next user.
2. `Pool`, `Clear` and `Disconnected` void all grants and the whole mirror; what is still valid is sent again after
   `Pool` and `Clear`.
3. `Add` names a block once for each rank, and only when every rank has stored it.
4. Workers say what the blocks are (fingerprint, block_bytes); the scheduler half may send NO_FINGERPRINT and 0. It
   hears of the pool when all its workers are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """Which half of the connector speaks."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class SlotGrant(NamedTuple):
    """A slot that a worker may write; `generation` is odd and comes back in `StoredItem`."""

    slot: int
    generation: int


class StoredItem(NamedTuple):
    """A granted slot whose data is complete. `nbytes` counts bytes, `digest` is block_digest of them."""

    slot: int
    generation: int
    block_hash: bytes
    rank: int
    nbytes: int
    digest: bytes


class AddItem(NamedTuple):
    """A block that can be read; `generation` is even."""

    block_hash: bytes
    rank: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks. `supported` False: the engine serves, and its KV cannot migrate because of `why`."""

    role: Role
    rank: int
    ranks: int
    pid: int
    fingerprint: bytes
    block_bytes: int  #: of one rank
    block_size: int  #: tokens
    supported: bool = True
    why: str = ""
    fields: Mapping[str, str | int] = field(default_factory=dict)  #: readable fingerprint
    holds: bool = False  #: a scheduler half that keeps a request waiting until its `Pulled` has come


@dataclass(frozen=True, slots=True)
class Started:
    """A request was scheduled for the first time. Tokens: its prompt, found in the engine, found in our pool."""

    rid: str
    prompt_tokens: int
    local_tokens: int
    external_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A request's prompt is computed; seconds since it was started."""

    rid: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Filled:
    """Hashes of the full blocks that are computed, from block 0; `tokens` that they cover.

    No hashes: the engine has these tokens in its own cache, in blocks that cannot be exchanged.
    """

    rid: str
    hashes: tuple[bytes, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has left the engine (done or aborted)."""

    rid: str


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's own load: requests running and waiting, share of KV cache in use (0..1)."""

    running: int
    waiting: int
    kv_use: float


@dataclass(frozen=True, slots=True)
class Reset:
    """Weights or cache were reset: nothing in the pool is this model's any more."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that are in their slots now."""

    items: tuple[StoredItem, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """The worker would use `n` more slots than it was granted."""

    n: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Granted slots that the worker gives back unused."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker copied blocks from the pool into the engine; bytes, seconds."""

    rid: str
    blocks: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Slots whose bytes did not match their digest."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """Where the pool is, and its geometry. `path` empty: there is no pool (`why` says it), serve without."""

    path: str
    instance: int
    epoch: int
    block_bytes: int
    slots: int
    ranks: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots to write into."""

    slots: tuple[SlotGrant, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """The contents were dropped; forget grants and mirror, and map nothing from an older epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Add:
    """Blocks that can be read now."""

    items: tuple[AddItem, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Blocks that cannot be read any more."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """The pull for a request is over, whatever came of it; its blocks were added before."""

    rid: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Local: the node went away. Grants and mirror are void until the next `Pool`."""

    why: str


FromScheduler = Started | Prefilled | Filled | Finished | Load | Reset
FromWorker = Stored | Want | Failed | Loaded | Corrupt
FromEngine = Hello | FromScheduler | FromWorker
ToEngine = Pool | Grant | Clear | Add | Drop | Pulled
Message = FromEngine | ToEngine
