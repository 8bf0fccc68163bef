"""A node with a few places that is asked for too much, in virtual time: the waiting room in front of plain places."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.room import WaitingRoom
from node.turns import Denial, Entrance, Ticket

PLACES = 8
USUAL_S = 1.0


@dataclass(slots=True)
class Request:
    client: str
    came: float
    mark: int = 0
    again: bool = False
    #: Seconds in line and on its place; None: it was refused, and told to come back after so many.
    waited: float | None = None
    took: float = 0.0
    refused: int | None = None


class Service:
    """The places, those who come, and what becomes of them."""

    def __init__(self, seed: int = 1, places: int = PLACES) -> None:
        self.now = 0.0
        self.places = places
        self.capacity = places / USUAL_S
        self.requests: list[Request] = []
        self.room = WaitingRoom(10_000, lambda: self.now)
        self.rng = random.Random(seed)
        self.free = places
        self.waiting: dict[Ticket, Request] = {}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def offer(self, client: str, rate: float, start: float, end: float) -> None:
        """Requests of one client at random times."""
        at = start
        while (at := at + self.rng.expovariate(rate)) < end:
            self.at(at, lambda at=at: self.come(Request(client, at, self.rng.getrandbits(64))))  # type: ignore[misc]

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.room.validate()
        assert len(self.room) == 0 and self.free == self.places

    def come(self, request: Request) -> None:
        self.requests.append(request)
        if self.free and not self.room.waiting("m"):
            self.start(request, 0.0)
            return
        entrance = Entrance("m", request.client, request.mark, usual_s=USUAL_S, guess_per_s=self.capacity)
        joined = self.room.join(entrance)
        if isinstance(joined, Denial):
            request.refused = joined.after_s
            if not request.again:
                late = self.rng.uniform(0.06, 0.3)
                back = Request(request.client, self.now + joined.after_s + late, request.mark, again=True)
                self.at(back.came, lambda: self.come(back))
        else:
            self.waiting[joined] = request
            self.take()

    def take(self) -> None:
        while self.free and self.waiting:
            self.room.stir()
            ticket = next(ticket for ticket in self.waiting if ticket.woken.is_set())
            ticket.woken.clear()
            request = self.waiting.pop(ticket)
            ticket.leave(served=True)
            self.start(request, self.now - ticket.joined_at)

    def start(self, request: Request, waited: float) -> None:
        request.waited = waited
        self.free -= 1
        request.took = self.rng.uniform(0.5, 1.5) * USUAL_S
        self.at(self.now + request.took, self.end)

    def end(self) -> None:
        self.free += 1
        self.take()


def overloaded(times: float, *, seconds: float, seed: int = 1, clients: int = 8, places: int = PLACES) -> Service:
    """Several equal clients that ask for so many ``times`` what can be done, for ``seconds``."""
    service = Service(seed, places)
    for number in range(clients):
        service.offer(str(number), times * service.capacity / clients, 0.0, seconds)
    return service


def within(service: Service, start: float, end: float) -> list[Request]:
    """Give the requests that came in that time."""
    return [request for request in service.requests if start <= request.came < end]


def quantile(values: Sequence[float], share: float) -> float:
    """Give the value that ``share`` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
