"""A node with a few places that is asked for too much, in virtual time: the waiting room in front of plain places."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from node.forecast import SHARE
from node.room import WaitingRoom
from node.turns import Denial, Entrance, Ticket

PLACES = 8
USUAL_S = 1.0
CAPACITY = PLACES / USUAL_S


@dataclass(slots=True)
class Request:
    client: str
    came: float
    mark: int = 0
    again: bool = False
    waited: float | None = None
    refused: int | None = None


class Service:
    """The places, those who come, and what becomes of them."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 0.0
        self.requests: list[Request] = []
        self.room = WaitingRoom(10_000, lambda: self.now)
        self.rng = random.Random(seed)
        self.free = PLACES
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
        assert len(self.room) == 0 and self.free == PLACES

    def come(self, request: Request) -> None:
        self.requests.append(request)
        if self.free and not self.room.waiting("m"):
            self.start(request, 0.0)
            return
        guess = CAPACITY
        joined = self.room.join(Entrance("m", request.client, request.mark, usual_s=USUAL_S, guess_per_s=guess))
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
        self.at(self.now + self.rng.uniform(0.5, 1.5) * USUAL_S, self.end)

    def end(self) -> None:
        self.free += 1
        self.take()


def overloaded(times: float, *, seconds: float, seed: int = 1, clients: int = 8) -> Service:
    service = Service(seed)
    for number in range(clients):
        service.offer(str(number), times * CAPACITY / clients, 0.0, seconds)
    return service


def within(service: Service, start: float, end: float) -> list[Request]:
    return [request for request in service.requests if start <= request.came < end]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("times", [1.5, 3.0])
def test_in_lasting_overload_nobody_that_is_taken_in_waits_long_and_no_place_is_empty(times: float, seed: int) -> None:
    service = overloaded(times, seconds=120.0, seed=seed)
    service.run()
    steady = [request for request in within(service, 20.0, 120.0) if request.waited is not None]
    waits = [request.waited or 0.0 for request in steady]
    assert quantile(waits, 0.5) <= 3 * SHARE * USUAL_S
    assert quantile(waits, 0.99) <= 2 * USUAL_S
    assert len(steady) >= 0.95 * 100.0 * CAPACITY


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_is_refused_and_comes_back_as_told_is_served(seed: int) -> None:
    """Overload that `MAX_AFTER_S` can outlast: all of them, while it still goes on."""
    service = overloaded(3.0, seconds=100.0, seed=seed)
    service.run()
    again = [request for request in service.requests if request.again]
    assert len(again) > 1000
    assert sum(request.waited is not None for request in again) >= 0.99 * len(again)


def test_a_modest_client_is_served_at_once_whatever_the_others_ask_for() -> None:
    service = overloaded(3.0, seconds=120.0)
    service.offer("modest", 0.05 * CAPACITY, 0.0, 120.0)
    service.run()
    mine = [request for request in within(service, 20.0, 120.0) if request.client == "modest" and not request.again]
    others = [request for request in within(service, 20.0, 120.0) if request.client == "1" and not request.again]
    assert sum(request.refused is not None for request in mine) <= 0.05 * len(mine)
    assert sum(request.refused is not None for request in others) >= 0.6 * len(others)


def test_a_burst_waits_and_is_served_whole() -> None:
    service = Service()
    for number in range(200):
        service.at(0.001 * number, lambda: service.come(Request("burst", service.now, service.rng.getrandbits(64))))
    service.run()
    assert all(request.waited is not None for request in service.requests)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_usual_load_is_hardly_ever_refused(seed: int) -> None:
    service = overloaded(0.7, seconds=300.0, seed=seed)
    service.run()
    refused = sum(request.refused is not None for request in service.requests)
    assert refused <= 0.01 * len(service.requests)


def test_when_those_who_were_refused_have_come_back_everybody_is_taken_in_again() -> None:
    service = overloaded(3.0, seconds=30.0)
    for number in range(8):
        service.offer(str(number), 0.3 * CAPACITY / 8, 30.0, 200.0)
    service.run()
    assert not [request for request in within(service, 150.0, 200.0) if request.refused is not None]
