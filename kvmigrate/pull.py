"""One pull: several sources at once, each worked on by a thread of its own, that share one split of the blocks.

`work` is what a thread does for one source: it looks the chain up there, joins the split, and fetches what that hands
out until nothing is left. A source is resumed once when its connection is cut; what it was asked for and did not bring
is others' from that moment on. The deadline is one for all of them. Whom to ask, and when, is `crew`'s.

Promises
1. A block is committed once, whoever brings it, and only with the digest that its source took when it was stored.
2. After `end` no thread that has joined keeps a slot, and none that joins later takes one. Connections with blocks
   under way are closed by it: that ends the source's leases too.
3. What was asked for under one fingerprint is never stored under another, whenever our engine changes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from . import messages
from .attempt import Attempt
from .dialer import Dialer
from .errors import KvError, LocalError, RemoteError
from .fetch import Fetching
from .fingerprint import differences
from .layout import FileHeader, Geometry
from .leases import quota_of
from .manifest import check_manifest
from .neighbour import NeighbourFile, Neighbours
from .pool import BlockPool
from .pull_types import FINE, Look, Part, PullResult, Reason, Source
from .split import Split
from .transport import Deadline, Transport, unexpected
from .ways import FromFile, OverTcp, Way

#: Times that a source is dialled again after its connection was cut in a transfer.
RESUMES: Final = 1
#: Bytes that are pinned together, and asked for together where several sources give: a few are under way at a time.
#: Small, because a source lets one peer hold only a part of its pool, and because others wait for what a slow source
#: was asked for; large against a round trip.
RUN_BYTES: Final = 8 << 20
#: And for a slow source so many seconds of its time.
RUN_S: Final = 0.025
#: Sources that one pull asks.
MAX_SOURCES: Final = 4
#: How often a source without work looks for some that is overdue elsewhere, seconds.
LOOK_S: Final = 0.02


#: Makes the question, from our fingerprint and ranks.
Ask = Callable[[bytes, int], messages.Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What pulls are made with. `begin_s` bounds an attempt's beginning, seconds; `window_bytes` one FETCH."""

    pool: BlockPool
    dialer: Dialer
    neighbours: Neighbours | None
    sharers: int  #: pulls that may have blocks of one source pinned at a time
    begin_s: float
    window_bytes: int
    describe: Callable[[], dict[str, str | int]]
    clock: Callable[[], float]


class Pull:
    """Use it for one chain. Thread-safe. `several`: more sources than one may be asked; `on_news` is called in any
    thread when there may be something to decide."""

    def __init__(self, means: Means, *, several: bool = False, on_news: Callable[[], None] = lambda: None) -> None:
        self._means = means
        self._several = several
        self._on_news = on_news
        self._started = means.clock()
        self._changed = threading.Condition()
        self._split = Split()
        self._hashes: list[bytes] = []
        self._attempts: list[Attempt] = []
        self._parts: dict[Attempt, Part] = {}
        self._ended = False

    # -- in a thread for each source -----------------------------------------------------------------------------------

    def work(self, number: int, source: Source, chain: Sequence[int], deadline: Deadline, tag: str = "") -> None:
        """Bring what this source can give; never raises for anything that it or the network does. It is told `tag`."""
        ask, pin = _lookup(chain[: source.chunks], tag), True
        for _ in range(1 + RESUMES):
            part = self.attempt(source, ask, deadline, number, pin=pin)
            unpinned = part.reason is Reason.BUSY and part.way == FromFile.name
            if not (part.cut or unpinned) or deadline.left() <= 0 or self._ended:
                break
            pin = pin and not unpinned  # others of ours have pinned all that it grants: send instead

    def attempt(self, source: Source, ask: Ask, deadline: Deadline, number: int = 0, *, pin: bool = True) -> Part:
        """Ask a source once, and fetch what it has and we lack. `pin` False: over the connection, on one host too."""
        attempt = Attempt(number, source, self._means.clock(), pin=pin)
        with self._changed:
            self._attempts.append(attempt)
        cut = False
        try:
            reason = self._over_connection(ask, deadline, attempt)
        except TimeoutError as error:
            reason, attempt.detail = (Reason.DEADLINE if deadline.left() <= 0 else Reason.STALLED), str(error)
        except (OSError, KvError) as error:
            reason, attempt.detail, cut = Reason.BROKEN, str(error), isinstance(error, OSError)
        finally:
            self._leave(number)
        if attempt.ended:  # we closed the connection ourselves
            reason, attempt.detail, cut = (Reason.DEADLINE if deadline.left() <= 0 else Reason.SLOW), "", False
        part = attempt.part(reason, self._means.clock(), cut=cut)
        with self._changed:
            self._parts[attempt] = part
        return part

    def _over_connection(self, ask: Ask, deadline: Deadline, attempt: Attempt) -> Reason:
        header, dialer, address = self._means.pool.header, self._means.dialer, attempt.source.address
        if not header.geometry.slots:
            return Reason.UNCONFIGURED
        request = ask(header.fingerprint, header.geometry.ranks)
        try:
            transport, answer = dialer.ask(address, request, deadline.within(self._means.begin_s))
        except RemoteError as error:
            attempt.detail = str(error)
            return Reason.REFUSED
        except (OSError, LocalError) as error:
            attempt.detail = str(error)
            return Reason.DEADLINE if deadline.left() <= 0 else Reason.UNREACHABLE
        attempt.looked_up = self._means.clock()
        try:
            reason = self._act_on(transport, answer, header, deadline, attempt)
            with self._changed:
                attempt.transport = None
                if attempt.ended:
                    raise ConnectionAbortedError("ended")
        except BaseException:
            dialer.discard(transport)
            raise
        dialer.keep(address, transport)
        return reason

    def _act_on(
        self, transport: Transport, answer: messages.Message, header: FileHeader, deadline: Deadline, attempt: Attempt
    ) -> Reason:
        match answer:
            case messages.Manifest():
                return self._fetch(transport, answer, header, deadline, attempt)
            case messages.Busy():
                return Reason.BUSY
            case messages.Unlike():
                attempt.detail = differences(self._means.describe(), dict(answer.fields))
                return Reason.MISMATCH
            case messages.Error():
                attempt.detail = answer.message
                return Reason.MISMATCH if answer.code == "ranks" else Reason.REFUSED
            case _:
                raise unexpected(answer)

    def _fetch(
        self,
        transport: Transport,
        manifest: messages.Manifest,
        header: FileHeader,
        deadline: Deadline,
        attempt: Attempt,
    ) -> Reason:
        """Fetch what is missing. `header`: the pool's when this was asked for."""
        geometry = header.geometry
        hashes = check_manifest(manifest, geometry.ranks, geometry.block_bytes)
        if not hashes:
            return Reason.NOTHING
        file = self._neighbour(manifest) if attempt.pin else None
        try:
            if not self._join(transport, manifest, hashes, geometry, attempt, most_bytes=self._run_bytes(file)):
                return Reason.COMPLETE
            way = self._way(transport, file)
            attempt.way = way.name
            share = _Share(self, attempt, manifest.entries, geometry.ranks, deadline)
            attempt.fetching = fetching = Fetching(self._means.pool, way, share, header.epoch)
            try:
                reason = Reason(fetching.run(deadline))
            finally:
                fetching.give_back()
        finally:
            if file is not None and self._means.neighbours is not None:
                self._means.neighbours.give_back(manifest.file, file)
        if fetching.corrupt:
            transport.send(messages.Corrupt(tuple(fetching.corrupt[: messages.MAX_FETCH])), deadline)
        return reason

    def _way(self, transport: Transport, file: NeighbourFile | None) -> Way:
        if file is None or self._means.neighbours is None:
            return OverTcp(transport)
        return FromFile(transport, file, self._means.neighbours.helpers)

    def _neighbour(self, manifest: messages.Manifest) -> NeighbourFile | None:
        neighbours = self._means.neighbours
        return neighbours.borrow(manifest.file, manifest.instance) if neighbours is not None else None

    def _run_bytes(self, file: NeighbourFile | None) -> int:
        """Bytes asked for together. What all our pulls have pinned at once fits into what the source grants a peer."""
        window = self._means.window_bytes
        if file is not None:
            pins = self._means.sharers * (FromFile.depth + 1)  # one is given back while the others are under way
            return min(window, RUN_BYTES, quota_of(file.geometry.total_bytes) // pins)
        return min(window, RUN_BYTES) if self._several else window

    def _join(
        self,
        transport: Transport,
        manifest: messages.Manifest,
        hashes: Sequence[bytes],
        geometry: Geometry,
        attempt: Attempt,
        *,
        most_bytes: int,
    ) -> bool:
        """Take part with what this source has of the chain. False: nothing of it is missing here, or the pull is over.

        The first manifest says what the chain is; a source that goes on differently is of use up to there.
        """
        ranks = geometry.ranks
        # A chain longer than half of the pool would push out its own head.
        hashes = hashes[: geometry.slots // 2 // ranks]
        held = self._means.pool.held(hashes)
        with self._changed:
            if self._ended:
                return False
            known = len(self._hashes)
            same = next((n for n, pair in enumerate(zip(hashes, self._hashes, strict=False)) if pair[0] != pair[1]), -1)
            reach = min(known, len(hashes)) if same < 0 else same
            if reach == known:
                sizes = [
                    sum(entry.nbytes for entry in manifest.entries[n * ranks : (n + 1) * ranks])
                    for n in range(known, len(hashes))
                ]
                self._split.extend(sizes, [n for n in range(known, len(hashes)) if held[n]])
                self._hashes += hashes[known:]
                reach = len(hashes)
            if self._split.hole >= reach:
                return False
            self._split.join(
                attempt.number,
                reach,
                attempt.source.rate,
                most_bytes=most_bytes,
                most_blocks=messages.MAX_FETCH // ranks,
                most_s=RUN_S if self._several else math.inf,
            )
            attempt.joined, attempt.transport = True, transport
            self._changed.notify_all()
        self._on_news()
        return True

    def _leave(self, number: int) -> None:
        with self._changed:
            self._split.leave(number)
            self._changed.notify_all()
        self._on_news()

    # -- from outside --------------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Return how it stands."""
        with self._changed:
            split = self._split
            last = {attempt.number: attempt for attempt in self._attempts}
            return Look(
                answered=frozenset(n for n, attempt in last.items() if attempt.looked_up or attempt in self._parts),
                joined=split.sources,
                complete=bool(self._hashes) and split.complete,
                stuck=bool(self._hashes) and split.stuck,
                overdue=split.overdue(self._means.clock()),
                missing_bytes=split.missing_bytes,
                rate=split.rate,
            )

    def end(self) -> set[int]:
        """Take no more blocks; returns the sources that have joined and whose threads are not done.

        Those that have blocks under way give up at once. Others end what they are at by themselves: see `cut`.
        """
        with self._changed:
            self._ended = True
            working = [attempt for attempt in self._attempts if attempt.joined and attempt not in self._parts]
            for attempt in working:
                if self._split.busy(attempt.number):
                    attempt.cut()
            self._changed.notify_all()
            return {attempt.number for attempt in working}

    def cut(self) -> None:
        """Close the connections that are still in use: their threads end at once."""
        with self._changed:
            for attempt in self._attempts:
                attempt.cut()

    def result(self) -> PullResult:
        """Return what it came to; at least one attempt is over."""
        pool = self._means.pool
        pool.touch(self._hashes, use=False)  # the head of the chain is the last to be evicted
        with self._changed:
            parts = tuple(self._parts[attempt] for attempt in self._attempts if attempt in self._parts)
            complete = bool(self._hashes) and self._split.complete
        failed = [part for part in parts if part.reason not in FINE]
        telling = next((part for part in reversed(failed) if part.blocks), failed[0] if failed else parts[0])
        return PullResult(
            blocks=sum(part.blocks for part in parts),
            bytes=sum(part.bytes for part in parts),
            seconds=self._means.clock() - self._started,
            reason=Reason.COMPLETE if complete else telling.reason,
            corrupt=sum(part.corrupt for part in parts),
            present=len(pool.lookup(self._hashes, use=False)),
            lookup_s=next((part.lookup_s for part in parts if part.way), parts[0].lookup_s),
            detail="" if complete else telling.detail,
            parts=parts,
            taken_over=self._split.taken_over,
        )

    @property
    def parts(self) -> int:
        """How many attempts are over."""
        with self._changed:
            return len(self._parts)


class _Share:
    """A source's view of the split, for its `Fetching`."""

    def __init__(
        self, pull: Pull, attempt: Attempt, entries: Sequence[messages.Entry], ranks: int, deadline: Deadline
    ) -> None:
        self._pull = pull
        self._attempt = attempt
        self._entries = entries
        self._ranks = ranks
        self._deadline = deadline
        self._lock, self._split, self._clock = pull._changed, pull._split, pull._means.clock

    def take(self) -> range | None:
        """See `Supply`."""
        with self._lock:
            if self._pull._ended:
                return None
            return self._split.take(self._attempt.number, self._clock(), self._deadline.left())

    def wait(self, deadline: Deadline) -> bool:
        """See `Supply`."""
        began, left_s = self._clock(), deadline.left()
        with self._lock:
            if self._pull._ended or self._split.complete or left_s <= 0:
                return False
            self._lock.wait(min(LOOK_S, left_s))
        self._attempt.idle_s += self._clock() - began
        return True

    def entries(self, run: range) -> Sequence[messages.Entry]:
        """See `Supply`."""
        return self._entries[run.start * self._ranks : run.stop * self._ranks]

    def refuse(self, run: range) -> None:
        """See `Supply`."""
        with self._lock:
            self._split.refuse(self._attempt.number, run)
            self._lock.notify_all()

    def wanted(self, block: int) -> bool:
        """See `Supply`."""
        with self._lock:
            return not self._pull._ended and self._split.wanted(block)

    def arrived(self, block: int) -> None:
        """See `Supply`."""
        with self._lock:
            self._split.arrived(self._attempt.number, block, self._clock())
            complete = self._split.complete
            if complete:
                self._lock.notify_all()
        if complete:
            self._pull._on_news()

    def passed(self, block: int) -> None:
        """See `Supply`."""
        with self._lock:
            self._split.passed(self._attempt.number, block, self._clock())

    def end(self) -> None:
        """See `Supply`."""
        self._pull._leave(self._attempt.number)


def _lookup(chain: Sequence[int], tag: str) -> Ask:
    return lambda fingerprint, ranks: messages.Lookup(fingerprint, ranks, tuple(chain), tag)
