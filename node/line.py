"""Who of those that wait is next. Pure: no clock, no events, no requests, only their order.

Rules:
1. Lower priority numbers go first (vLLM's meaning). Those of one number are a level.
2. Within a level the clients take turns, each with its oldest request (round robin, the case of deficit round robin
   in which every request costs one place): of clients that all have somebody waiting, none is served more than once
   more often than another, however many requests it sends.
3. No level starves: after `OLDEST_EVERY` - 1 places in a row that went past the level with the oldest request of all,
   that level has the next one.
4. When the room is full, the place of somebody who is less important is given to a newcomer: the newest request of the
   client with most of them in the last level, if that level is behind the newcomer's, or if it is the newcomer's own
   and that client has at least two more than the newcomer's (the longest queue pays: stochastic fair queueing,
   McKenney 1990).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

#: One place of so many goes to the level with the oldest request, however many more important ones wait.
OLDEST_EVERY = 8


class Waiter(Protocol):
    """One waiting request, as its line sees it."""

    @property
    def client(self) -> str:
        """Whose it is, for fairness."""
        ...

    @property
    def priority(self) -> int:
        """Lower is earlier."""
        ...


W = TypeVar("W", bound=Waiter)


class _Level(Generic[W]):
    """Those of one priority."""

    def __init__(self) -> None:
        #: In the order of their turns.
        self.clients: OrderedDict[str, deque[W]] = OrderedDict()
        #: All of them in the order of their coming, with their number.
        self.numbers: dict[W, int] = {}

    def add(self, waiter: W, number: int, *, first: bool) -> None:
        queue = self.clients.setdefault(waiter.client, deque())
        if first:
            queue.appendleft(waiter)
            self.clients.move_to_end(waiter.client, last=False)
        else:
            queue.append(waiter)
        self.numbers[waiter] = number

    def remove(self, waiter: W, *, served: bool) -> None:
        queue = self.clients[waiter.client]
        queue.remove(waiter)
        del self.numbers[waiter]
        if not queue:
            del self.clients[waiter.client]
        elif served:
            self.clients.move_to_end(waiter.client)

    @property
    def oldest(self) -> int:
        return next(iter(self.numbers.values()))

    def turns(self, most: int) -> Iterator[W]:
        """The next in order, down to the ``most``-th of each client."""
        for depth in range(most):
            for queue in self.clients.values():
                if depth < len(queue):
                    yield queue[depth]

    def longest(self) -> deque[W]:
        return max(self.clients.values(), key=len)


class Line(Generic[W]):
    """One line. A waiter is in it once, from `add` to `remove`."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[W]] = {}
        self._numbers = 0
        #: Places in a row that went past the level with the oldest request.
        self._passed = 0

    def __len__(self) -> int:
        return sum(len(level.numbers) for level in self._levels.values())

    def __contains__(self, waiter: W) -> bool:
        level = self._levels.get(waiter.priority)
        return level is not None and waiter in level.numbers

    def add(self, waiter: W, *, first: bool = False) -> None:
        """Stand in line. ``first``: it had its turn and lost what it got, so its client's turn is not over."""
        self._numbers += 1
        self._levels.setdefault(waiter.priority, _Level()).add(waiter, self._numbers, first=first)

    def remove(self, waiter: W, *, served: bool) -> None:
        """Leave the line, with a place (``served``) or without."""
        level = self._levels[waiter.priority]
        if served:
            self._passed = 0 if level is self._oldest() else self._passed + 1
        level.remove(waiter, served=served)
        if not level.numbers:
            del self._levels[waiter.priority]

    def next(self, tried: Collection[W] = ()) -> W | None:
        """Whose turn it is, leaving out those that have ``tried`` in vain."""
        for level in self._order():
            for waiter in level.turns(len(tried) + 1):
                if waiter not in tried:
                    return waiter
        return None

    def ahead(self, client: str, priority: int, booked: Mapping[tuple[int, str], int]) -> int:
        """How many would have their turn before a newcomer. ``booked``: those not here yet, by priority and client."""
        counts = dict(booked)
        for number, level in self._levels.items():
            for name, queue in level.clients.items():
                counts[number, name] = counts.get((number, name), 0) + len(queue)
        own = counts.pop((priority, client), 0)
        before = sum(count for (number, _), count in counts.items() if number < priority)
        beside = sum(min(count, own + 1) for (number, _), count in counts.items() if number == priority)
        return before + beside + own

    def count(self, client: str, priority: int) -> int:
        """Return how many requests of one client wait on one level."""
        level = self._levels.get(priority)
        return len(level.clients.get(client, ())) if level is not None else 0

    def least(self) -> tuple[W, int] | None:
        """Who would have to go first, and how many its client has on that level."""
        if not self._levels:
            return None
        queue = self._levels[max(self._levels)].longest()
        return queue[-1], len(queue)

    def clients(self) -> int:
        """Return how many clients wait."""
        return len({name for level in self._levels.values() for name in level.clients})

    def waiters(self) -> Iterator[W]:
        """Everybody, level by level."""
        for number in sorted(self._levels):
            yield from self._levels[number].numbers

    def validate(self) -> None:
        """Check the invariants; raises AssertionError with the broken one."""
        for level in self._levels.values():
            assert level.numbers, "an empty level was kept"
            assert all(level.clients.values()), "an empty queue was kept"
            queued = [waiter for queue in level.clients.values() for waiter in queue]
            assert len(queued) == len(level.numbers) and set(queued) == set(level.numbers), "queues and order disagree"
        assert 0 <= self._passed < OLDEST_EVERY or len(self._levels) > 1, "the oldest level was passed over too often"

    def _order(self) -> list[_Level[W]]:
        levels = [self._levels[number] for number in sorted(self._levels)]
        if self._passed >= OLDEST_EVERY - 1 and levels:
            oldest = self._oldest()
            levels.sort(key=lambda level: level is not oldest)  # stable: the others keep their order
        return levels

    def _oldest(self) -> _Level[W]:
        return min(self._levels.values(), key=lambda level: level.oldest)


def gives_way(least: tuple[Waiter, int], client: str, priority: int, own: int) -> bool:
    """Whether rule 4 gives the place of ``least`` to a newcomer whose client has ``own`` on that level."""
    waiter, count = least
    if waiter.priority != priority:
        return waiter.priority > priority
    return waiter.client != client and count >= own + 2
