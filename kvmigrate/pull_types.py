"""What is said about a pull: whom to ask, why it ended, what each source gave, how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from . import messages
from .planner import PRIOR_LOOKUP_S, PRIOR_NET_BYTES_S


class Reason(StrEnum):
    """Why a pull ended."""

    COMPLETE = "complete"  #: everything that the source has is here
    NOTHING = "nothing"  #: the source has no block of the chain
    UNREACHABLE = "unreachable"
    REFUSED = "refused"  #: wrong cluster, key, or another error that the source named
    MISMATCH = "mismatch"  #: the source's blocks are of another fingerprint
    BUSY = "busy"  #: the source, or we ourselves, have too many pulls
    GONE = "gone"  #: the source evicted a block in the meantime
    CORRUPT = "corrupt"  #: a block's bytes did not have their digest
    STALLED = "stalled"  #: no progress for too long
    SLOW = "slow"  #: others brought what it was asked for before it did
    DEADLINE = "deadline"
    BROKEN = "broken"  #: the connection was lost, or the source broke the protocol
    FULL = "full"  #: our pool has no slot to give, or was cleared
    UNCONFIGURED = "unconfigured"  #: no engine has said yet what our blocks are


#: Ends that are no failure.
FINE: Final = frozenset({Reason.COMPLETE, Reason.NOTHING})


@dataclass(frozen=True, slots=True)
class Source:
    """Where to pull from: "host:port", how many chunks of the chain, from its front, are asked for there, and what it
    is taken for: bytes per second, and seconds until the first block can be asked for."""

    address: str
    chunks: int = messages.MAX_CHUNKS
    rate: float = PRIOR_NET_BYTES_S
    lookup_s: float = PRIOR_LOOKUP_S


@dataclass(frozen=True, slots=True)
class Part:
    """What one source gave in one attempt: times in seconds, `seconds` without those in which it had nothing to do,
    `lookup_s` before the first block was asked for."""

    address: str
    reason: Reason
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    lookup_s: float = 0.0
    corrupt: int = 0
    way: str = ""  #: how blocks came: over `tcp`, or on the `same host`; empty when it came to nothing before
    detail: str = ""
    cut: bool = False  #: the connection was lost: worth another attempt


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did. `blocks` and `bytes` were committed now; `present` is the length of the prefix that is here
    afterwards, in blocks; `seconds` the whole time, `lookup_s` the part before the first block was asked for."""

    blocks: int
    bytes: int
    seconds: float
    reason: Reason
    corrupt: int = 0
    present: int = 0
    lookup_s: float = 0.0
    detail: str = ""
    joined: bool = False  #: another pull did this, and its caller got the same result: count it once
    parts: tuple[Part, ...] = ()  #: by source and attempt, in the order in which they were begun
    taken_over: int = 0  #: blocks that one source was asked for after another one had not brought them


@dataclass(frozen=True, slots=True)
class Look:
    """A pull as it stands. `answered`: sources that said what they have, or failed; `joined`: how many of them give
    blocks; `stuck`: none of them has the first missing one; `overdue`: one is late with what it was asked for."""

    answered: frozenset[int] = frozenset()
    joined: int = 0
    complete: bool = False
    stuck: bool = False
    overdue: bool = False
    missing_bytes: int = 0
    rate: float = 0.0
