"""Whom one pull asks, and when. `recruits` decides, pure; `Crew` starts the threads, from the event loop.

Rules
1. The first source is asked alone: what is missing is not known before it has answered. If it has not after HEDGE_S,
   the next is asked too.
2. Another is asked when it shortens the pull enough (`sharing.helpers`): a small pull is not shared.
3. Whatever a source does not bring, the next one is asked for: it failed, or it is overdue and nobody else is there.
4. A pull ends when all is here, or when nobody is left who could give the first block that is not, or at its deadline.
   It waits for no source that has not answered by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from .pull import Pull
from .pull_types import Look, PullResult, Source
from .sharing import Giver, helpers
from .split import GRACE_S
from .transport import Deadline

#: A source that has not answered after so many seconds may never do: a dial and a lookup over a long way.
HEDGE_S: Final = 0.2
#: How often a pull is looked at while nothing is heard of it, seconds: not long against what a late source costs.
WATCH_S: Final = GRACE_S
#: Seconds that a source has to end by itself what nobody waits for, which keeps its connection.
DRAIN_S: Final = 0.1

#: Starts a source's thread; None when there is no turn at it, or no thread.
Start = Callable[[int, Source], "asyncio.Future[None] | None"]


def recruits(
    look: Look, sources: Sequence[Source], asked: Collection[int], pending: Collection[int], waited_s: float
) -> list[int]:
    """Return the numbers of the sources to ask now.

    `asked` already, of which `pending` have not answered; the last one was asked `waited_s` ago.
    """
    unused = [number for number in range(len(sources)) if number not in asked]
    if not look.joined and not look.complete:
        return unused[:1] if not pending or waited_s >= HEDGE_S else []
    if not look.complete and not pending and (look.stuck or (look.overdue and look.joined == 1)):
        return unused[:1]
    if not look.missing_bytes:
        return []
    most = max(sources[number].chunks for number in asked)
    rate = look.rate + sum(sources[number].rate for number in pending)
    others = [_giver(sources[number], look.missing_bytes, most) for number in unused]
    chosen, _ = helpers(Giver(rate, look.missing_bytes), others)
    return [unused[place] for place in chosen]


def _giver(source: Source, missing_bytes: int, most: int) -> Giver:
    """What it could give of the blocks that are missing, of a chain of `most` chunks."""
    return Giver(source.rate, missing_bytes * min(1.0, source.chunks / most), source.lookup_s)


class Crew:
    """The sources of one pull. `start` begins to work on one; `news` is set when there may be something to decide."""

    def __init__(
        self,
        pull: Pull,
        sources: Sequence[Source],
        deadline: Deadline,
        *,
        start: Start,
        news: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self._pull = pull
        self._sources = sources
        self._deadline = deadline
        self._start = start
        self._news = news
        self._clock = clock
        self._running: dict[int, asyncio.Future[None]] = {}
        self._asked: list[int] = []
        self._asked_at = clock()

    async def run(self) -> PullResult:
        """Have the chain pulled; returns within the deadline, or shortly after."""
        try:
            while True:
                look, now = self._pull.look(), self._clock()
                pending = self._running.keys() - look.answered
                self._recruit(look, now, pending)
                if self._over(look, pending):
                    break
                await self._wait()
        finally:
            ended = self._pull.end()
            await self._finish([work for number, work in self._running.items() if number in ended])
            if not self._pull.parts:  # nobody waits for a thread that has not joined, unless there is nothing to tell
                await self._finish(list(self._running.values()))
        return self._pull.result()

    def _recruit(self, look: Look, now: float, pending: Collection[int]) -> None:
        for number in recruits(look, self._sources, self._asked, pending, now - self._asked_at):
            work = self._start(number, self._sources[number])
            if work is None and self._running:
                break  # no turn or no thread now: perhaps later
            self._asked.append(number)
            self._asked_at = now
            if work is not None:
                self._running[number] = work
                work.add_done_callback(lambda _: self._news.set())

    def _over(self, look: Look, pending: Collection[int]) -> bool:
        if look.complete or self._deadline.left() <= 0:
            return True
        if self._running:
            alone = not pending and len(self._asked) == len(self._sources)
            return look.stuck and bool(look.joined) and alone
        return len(self._asked) == len(self._sources)

    async def _wait(self) -> None:
        """Until something was heard, but not for long."""
        try:
            async with asyncio.timeout(min(WATCH_S, max(0.0, self._deadline.left()))):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()
        for number, work in list(self._running.items()):
            if work.done():
                del self._running[number]
                work.result()  # a bug of ours is not hidden

    async def _finish(self, works: Sequence[asyncio.Future[None]]) -> None:
        if works:
            _, late = await asyncio.wait(works, timeout=DRAIN_S)
            if late:
                self._pull.cut()
                await asyncio.wait(late)
