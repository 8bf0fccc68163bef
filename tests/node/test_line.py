"""The order of those who wait: priorities, turns of clients, no starvation. Against a plain model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.line import OLDEST_EVERY, Line, gives_way


@dataclass(frozen=True, eq=False)
class Guest:
    client: str
    priority: int = 0


def serve(line: Line[Guest]) -> Guest:
    guest = line.next()
    assert guest is not None
    line.remove(guest, served=True)
    return guest


def test_the_lower_number_goes_first_and_the_same_client_in_the_order_of_coming() -> None:
    line: Line[Guest] = Line()
    guests = [Guest("a", 5), Guest("a"), Guest("b", -3), Guest("a"), Guest("b", 5)]
    for guest in guests:
        line.add(guest)
    assert [serve(line) for _ in guests] == [guests[2], guests[1], guests[3], guests[0], guests[4]]
    assert line.next() is None and len(line) == 0


def test_a_flood_of_one_client_does_not_hold_up_the_single_request_of_another() -> None:
    line: Line[Guest] = Line()
    for _ in range(500):
        line.add(Guest("flood"))
    single = Guest("single")
    line.add(single)
    assert line.ahead("third", 0, {}) == 2
    assert single in [serve(line), serve(line)]


@pytest.mark.parametrize("clients", [2, 5])
def test_clients_that_always_have_somebody_waiting_are_served_alike(clients: int) -> None:
    line: Line[Guest] = Line()
    for index in range(clients):
        for _ in range(1 + 7 * index):
            line.add(Guest(str(index)))
    served = Counter[str]()
    for _ in range(50 * clients):
        guest = serve(line)
        served[guest.client] += 1
        line.add(Guest(guest.client))
        assert max(served.values()) - min(served[str(index)] for index in range(clients)) <= 1


def test_the_least_important_is_served_in_the_end_however_many_important_ones_come() -> None:
    line: Line[Guest] = Line()
    low = Guest("low", 100)
    line.add(low)
    for _ in range(3):
        line.add(Guest("high", -100))
    places = 0
    while low in line:
        serve(line)
        line.add(Guest("high", -100))
        places += 1
        assert places <= OLDEST_EVERY


def test_one_whose_turn_came_to_nothing_is_left_out_and_keeps_its_turn() -> None:
    line: Line[Guest] = Line()
    first, second, third = Guest("a"), Guest("a"), Guest("b")
    for guest in (first, second, third):
        line.add(guest)
    assert line.next([first]) is third
    assert line.next([first, third]) is second
    assert line.next([first, second, third]) is None
    assert line.next() is first


def test_one_that_lost_its_place_goes_to_the_head_of_its_level() -> None:
    line: Line[Guest] = Line()
    line.add(Guest("a"))
    back = Guest("b")
    line.add(back, first=True)
    assert line.next() is back


def test_who_gives_way_in_a_full_room() -> None:
    assert gives_way((Guest("a", 1), 1), "b", 0, 0), "the less important"
    assert not gives_way((Guest("a", 0), 9), "b", 1, 0), "never the more important"
    assert gives_way((Guest("a", 0), 2), "b", 0, 0), "the client with more"
    assert not gives_way((Guest("a", 0), 1), "b", 0, 0) and not gives_way((Guest("a", 0), 3), "b", 0, 2)
    assert not gives_way((Guest("a", 0), 9), "a", 0, 0), "nobody sends his own away"


class LineMachine(RuleBasedStateMachine):
    """Whatever comes and goes: nobody is lost, served twice, or passed over too often."""

    def __init__(self) -> None:
        super().__init__()
        self.line: Line[Guest] = Line()
        self.inside: list[Guest] = []
        self.since_oldest = 0

    @rule(client=st.sampled_from("abc"), priority=st.integers(-2, 2), first=st.booleans())
    def come(self, client: str, priority: int, first: bool) -> None:
        guest = Guest(client, priority)
        ahead = self.line.ahead(client, priority, {})
        assert 0 <= ahead <= len(self.inside)
        self.line.add(guest, first=first)
        self.inside.append(guest)

    @precondition(lambda self: self.inside)
    @rule()
    def serve(self) -> None:
        guest = serve(self.line)
        oldest = self.inside[0].priority
        if guest.priority == oldest:
            self.since_oldest = 0
        else:
            self.since_oldest += 1
            assert guest.priority == min(other.priority for other in self.inside)
        assert self.since_oldest < OLDEST_EVERY
        self.inside.remove(guest)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        guest = data.draw(st.sampled_from(self.inside))
        level = self.inside[0].priority
        self.line.remove(guest, served=False)
        self.inside.remove(guest)
        if not self.inside or self.inside[0].priority != level:
            self.since_oldest = min(self.since_oldest, OLDEST_EVERY - 1)

    @invariant()
    def holds(self) -> None:
        self.line.validate()
        assert len(self.line) == len(self.inside)
        assert set(self.line.waiters()) == set(self.inside)
        assert (self.line.next() is None) == (not self.inside)


LineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLine = LineMachine.TestCase
