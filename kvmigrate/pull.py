"""One pull, as its thread runs it: source after source, each resumed once when its connection is cut.

Every attempt looks the chain up anew and fetches what is missing then, so a resumed one goes on at the block where the
one before it stopped, and so does the next source. The deadline is one for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from . import messages
from .dialer import Dialer
from .errors import KvError, LocalError, RemoteError
from .fetch import Fetching
from .fingerprint import differences
from .neighbour import NeighbourFile, Neighbours
from .pool import BlockPool
from .transport import Deadline, Transport, unexpected
from .ways import FromFile, OverTcp, Way

#: Times that a source is dialled again after its connection was cut in a transfer.
RESUMES: Final = 1
#: Bytes that are pinned together; two such windows are under way. Small, because a source lets one peer hold only a
#: part of its pool, and large against the time of a round trip on one host.
PIN_WINDOW_BYTES: Final = 8 << 20
#: Sources that one pull asks.
MAX_SOURCES: Final = 4


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
    DEADLINE = "deadline"
    BROKEN = "broken"  #: the connection was lost, or the source broke the protocol
    FULL = "full"  #: our pool has no slot to give, or was cleared
    UNCONFIGURED = "unconfigured"  #: no engine has said yet what our blocks are


#: Makes the question, from our fingerprint and ranks.
Ask = Callable[[bytes, int], messages.Message]
#: What no other source could change.
_FINAL: Final = frozenset({Reason.DEADLINE, Reason.FULL, Reason.UNCONFIGURED})


@dataclass(frozen=True, slots=True)
class Source:
    """Where to pull from: "host:port", and how many chunks of the chain, from its front, are asked for there."""

    address: str
    chunks: int = messages.MAX_CHUNKS


@dataclass(frozen=True, slots=True)
class Part:
    """What one source gave in one attempt: times in seconds, `lookup_s` before the first block was asked for."""

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
    parts: tuple[Part, ...] = ()  #: by source and attempt, in order


class Pull:
    """Use it once, in one thread. `connect_s` and `lookup_s` bound an attempt's beginning (seconds)."""

    def __init__(
        self,
        pool: BlockPool,
        dialer: Dialer,
        neighbours: Neighbours | None,
        *,
        begin_s: float,
        window_bytes: int,
        describe: Callable[[], dict[str, str | int]],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._dialer = dialer
        self._neighbours = neighbours
        self._begin_s = begin_s
        self._window_bytes = window_bytes
        self._describe = describe
        self._clock = clock
        self._hashes: list[bytes] = []

    def run(self, sources: Sequence[Source], chain: Sequence[int], deadline: Deadline, tag: str = "") -> PullResult:
        """Pull; never raises for anything that a source or the network does. Sources are told ``tag``."""
        started = self._clock()
        parts = tuple(self._attempts(sources[:MAX_SOURCES], chain, deadline, tag))
        self._pool.touch(self._hashes, use=False)  # the head of the chain is the last to be evicted
        telling = next((p for p in reversed(parts) if p.blocks or p.reason is Reason.COMPLETE), parts[0])
        return PullResult(
            blocks=sum(part.blocks for part in parts),
            bytes=sum(part.bytes for part in parts),
            seconds=self._clock() - started,
            reason=telling.reason,
            corrupt=sum(part.corrupt for part in parts),
            present=len(self._pool.lookup(self._hashes, use=False)),
            lookup_s=parts[0].lookup_s,
            detail=telling.detail,
            parts=parts,
        )

    def _attempts(
        self, sources: Sequence[Source], chain: Sequence[int], deadline: Deadline, tag: str
    ) -> Iterator[Part]:
        covered = 0  # chunks that a source was asked for and gave whole
        for place, source in enumerate(sources):
            if place and (source.chunks <= covered or deadline.left() <= 0):
                continue
            for _ in range(1 + RESUMES):
                part = self.attempt(source.address, _lookup(chain[: source.chunks], tag), deadline)
                yield part
                if not part.cut or deadline.left() <= 0:
                    break
            if part.reason in _FINAL:
                return
            if part.reason is Reason.COMPLETE:
                covered = source.chunks

    def attempt(self, address: str, ask: Ask, deadline: Deadline) -> Part:
        """Ask one source once, and fetch what it has and we lack."""
        attempt = _Attempt(self._clock())
        cut = False
        try:
            reason = self._over_connection(address, ask, deadline, attempt)
        except TimeoutError as error:
            reason, attempt.detail = (Reason.DEADLINE if deadline.left() <= 0 else Reason.STALLED), str(error)
        except (OSError, KvError) as error:
            reason, attempt.detail, cut = Reason.BROKEN, str(error), isinstance(error, OSError)
        fetching = attempt.fetching
        return Part(
            address=address,
            reason=reason,
            blocks=fetching.blocks if fetching else 0,
            bytes=fetching.bytes if fetching else 0,
            seconds=self._clock() - attempt.started,
            lookup_s=(attempt.looked_up or self._clock()) - attempt.started,
            corrupt=len(fetching.corrupt) if fetching else 0,
            way=attempt.way,
            detail=attempt.detail,
            cut=cut,
        )

    def _over_connection(self, address: str, ask: Ask, deadline: Deadline, attempt: _Attempt) -> Reason:
        header = self._pool.header
        if not header.geometry.slots:
            return Reason.UNCONFIGURED
        request = ask(header.fingerprint, header.geometry.ranks)
        try:
            transport, answer = self._dialer.ask(address, request, deadline.within(self._begin_s))
        except RemoteError as error:
            attempt.detail = str(error)
            return Reason.REFUSED
        except (OSError, LocalError) as error:
            attempt.detail = str(error)
            return Reason.DEADLINE if deadline.left() <= 0 else Reason.UNREACHABLE
        attempt.looked_up = self._clock()
        try:
            reason = self._act_on(transport, answer, deadline, attempt)
        except BaseException:
            self._dialer.discard(transport)
            raise
        self._dialer.keep(address, transport)
        return reason

    def _act_on(self, transport: Transport, answer: messages.Message, deadline: Deadline, attempt: _Attempt) -> Reason:
        match answer:
            case messages.Manifest():
                return self._fetch(transport, answer, deadline, attempt)
            case messages.Busy():
                return Reason.BUSY
            case messages.Unlike():
                attempt.detail = differences(self._describe(), dict(answer.fields))
                return Reason.MISMATCH
            case messages.Error():
                attempt.detail = answer.message
                return Reason.MISMATCH if answer.code == "ranks" else Reason.REFUSED
            case _:
                raise unexpected(answer)

    def _fetch(
        self, transport: Transport, manifest: messages.Manifest, deadline: Deadline, attempt: _Attempt
    ) -> Reason:
        """Fetch what is missing."""
        geometry = self._pool.header.geometry
        hashes = check_manifest(manifest, geometry.ranks, geometry.block_bytes)
        if not hashes:
            return Reason.NOTHING
        self._hashes = max(self._hashes, hashes, key=len)
        have = len(self._pool.lookup(hashes, use=False))
        # A chain longer than half of the pool would push out its own head.
        missing = manifest.entries[have * geometry.ranks : geometry.slots // 2]
        file = self._neighbour(manifest) if missing else None
        way = self._way(transport, file)
        attempt.way = way.name if missing else ""
        window_bytes = min(self._window_bytes, PIN_WINDOW_BYTES) if file is not None else self._window_bytes
        attempt.fetching = fetching = Fetching(self._pool, way, missing, window_bytes)
        try:
            reason = Reason(fetching.run(deadline))
        finally:
            fetching.give_back()
            if file is not None and self._neighbours is not None:
                self._neighbours.give_back(manifest.file, file)
        if fetching.corrupt:
            transport.send(messages.Corrupt(tuple(fetching.corrupt[: messages.MAX_FETCH])), deadline)
        return reason

    def _way(self, transport: Transport, file: NeighbourFile | None) -> Way:
        if file is None or self._neighbours is None:
            return OverTcp(transport)
        return FromFile(transport, file, self._neighbours.helpers)

    def _neighbour(self, manifest: messages.Manifest) -> NeighbourFile | None:
        return self._neighbours.borrow(manifest.file, manifest.instance) if self._neighbours is not None else None


def _lookup(chain: Sequence[int], tag: str) -> Ask:
    return lambda fingerprint, ranks: messages.Lookup(fingerprint, ranks, tuple(chain), tag)


class _Attempt:
    """An attempt's progress, kept apart so that it can be told after a failure too."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.looked_up: float | None = None
        self.fetching: Fetching | None = None
        self.way = ""
        self.detail = ""


def check_manifest(manifest: messages.Manifest, ranks: int, block_bytes: int) -> list[bytes]:
    """Return the block hashes of a manifest; RemoteError when it is not blocks in order with all their ranks."""
    if len(manifest.entries) % ranks:
        raise RemoteError("transfer: manifest with a part of a block")
    hashes = [entry.block_hash for entry in manifest.entries[::ranks]]
    if len(set(hashes)) != len(hashes):
        raise RemoteError("transfer: manifest names a block twice")
    for place, entry in enumerate(manifest.entries):
        if entry.block_hash != hashes[place // ranks] or entry.rank != place % ranks:
            raise RemoteError("transfer: manifest is out of order")
        if entry.nbytes > block_bytes:
            raise RemoteError("transfer: a block is larger than ours can be")
    return hashes
