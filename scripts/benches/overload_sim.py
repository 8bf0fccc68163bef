"""Nodes with a few places that are asked for too much, in virtual time: their waiting rooms in front of plain places.

Each node is an entry too, with a line of its own. A place that becomes free is its own node's first; while nobody waits
there, the others hear of it a moment later. So a line that is often empty moves faster than one of many that stand.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node.room import WaitingRoom
from node.turns import Denial, Entrance, Ticket

PLACES = 8
USUAL_S = 1.0
#: From when a place is free until the other entries know it, seconds: from and to.
HEARD_S = (0.02, 0.25)


@dataclass(slots=True)
class Request:
    client: str
    came: float
    mark: int = 0
    again: bool = False
    entry: int = 0
    #: Seconds in line and on its place; None: it was refused, and told to come back after so many.
    waited: float | None = None
    took: float = 0.0
    refused: int | None = None


@dataclass(slots=True)
class Entry:
    """One node: its line, its places."""

    room: WaitingRoom
    free: int
    waiting: dict[Ticket, Request] = field(default_factory=dict)


class Service:
    """The places, those who come, and what becomes of them. `places`: of each of the `entries`."""

    def __init__(self, seed: int = 1, places: int = PLACES, entries: int = 1) -> None:
        self.now = 0.0
        self.places = places
        self.capacity = entries * places / USUAL_S
        self.requests: list[Request] = []
        self.rng = random.Random(seed)
        self.entries = [Entry(WaitingRoom(10_000, lambda: self.now), places) for _ in range(entries)]
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def offer(self, client: str, rate: float, start: float, end: float) -> None:
        """Requests of one client at random times, at random entries."""
        at = start
        while (at := at + self.rng.expovariate(rate)) < end:
            request = Request(client, at, self.rng.getrandbits(64), entry=self.rng.randrange(len(self.entries)))
            self.at(at, lambda request=request: self.come(request))  # type: ignore[misc]

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        for entry in self.entries:
            entry.room.validate()
            assert len(entry.room) == 0 and entry.free == self.places

    def come(self, request: Request) -> None:
        self.requests.append(request)
        entry = self.entries[request.entry]
        if not entry.room.waiting("m") and (target := self._free(entry)) is not None:
            self.start(request, 0.0, target)
            return
        guess = self.places / USUAL_S
        joined = entry.room.join(Entrance("m", request.client, request.mark, usual_s=USUAL_S, guess_per_s=guess))
        if isinstance(joined, Denial):
            request.refused = joined.after_s
            if not request.again:
                late = self.rng.uniform(0.06, 0.3)
                came = self.now + joined.after_s + late
                back = Request(request.client, came, request.mark, again=True, entry=request.entry)
                self.at(back.came, lambda: self.come(back))
        else:
            entry.waiting[joined] = request
            self.take(entry)

    def take(self, entry: Entry) -> None:
        while entry.waiting and (target := self._free(entry)) is not None:
            entry.room.stir()
            ticket = next(ticket for ticket in entry.waiting if ticket.woken.is_set())
            ticket.woken.clear()
            request = entry.waiting.pop(ticket)
            ticket.leave(served=True)
            self.start(request, self.now - ticket.joined_at, target)

    def _free(self, own: Entry) -> Entry | None:
        if own.free:
            return own
        others = [entry for entry in self.entries if entry.free]
        return self.rng.choice(others) if others else None

    def start(self, request: Request, waited: float, target: Entry) -> None:
        request.waited = waited
        target.free -= 1
        request.took = self.rng.uniform(0.5, 1.5) * USUAL_S
        self.at(self.now + request.took, lambda: self.end(target))

    def end(self, target: Entry) -> None:
        target.free += 1
        self.take(target)
        if target.free and len(self.entries) > 1:
            self.at(self.now + self.rng.uniform(*HEARD_S), self._heard)

    def _heard(self) -> None:
        for entry in self.rng.sample(self.entries, len(self.entries)):
            self.take(entry)


def overloaded(
    times: float, *, seconds: float, seed: int = 1, clients: int = 8, places: int = PLACES, entries: int = 1
) -> Service:
    """Several equal clients that ask for so many ``times`` what can be done, for ``seconds``."""
    service = Service(seed, places, entries)
    for number in range(clients):
        service.offer(str(number), times * service.capacity / clients, 0.0, seconds)
    return service


def stepped(loads: Sequence[float], *, seconds: float, rest_s: float, seed: int, places: int, entries: int) -> Service:
    """The same at each of these loads in turn, with ``rest_s`` in between for those who come back."""
    service = Service(seed, places, entries)
    for phase, times in enumerate(loads):
        start = phase * (seconds + rest_s)
        for client in map(str, range(8)):
            service.offer(client, times * service.capacity / 8, start, start + seconds)
    return service


def within(service: Service, start: float, end: float) -> list[Request]:
    """Give the requests that came in that time."""
    return [request for request in service.requests if start <= request.came < end]


def quantile(values: Sequence[float], share: float) -> float:
    """Give the value that ``share`` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
