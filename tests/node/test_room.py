"""The waiting room: turns, bounds, displacement, refusals with a time to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.bookings import MAX_AFTER_S
from node.forecast import FEW, MAX_WAIT_S
from node.room import MAX_LINES, MAX_MODEST, WaitingRoom
from node.turns import MAX_PASSES, RETRY_S, Denial, Entrance, Ticket


class Hall:
    """A room and its clock."""

    def __init__(self, limit: int = 100) -> None:
        self.now = 0.0
        self.room = WaitingRoom(limit, lambda: self.now)

    def join(self, client: str = "a", line: str = "m", **more: object) -> Ticket:
        ticket = self.room.join(replace(Entrance(line, client), **more))  # type: ignore[arg-type]
        assert isinstance(ticket, Ticket), ticket
        return ticket

    def turns(self, *tickets: Ticket) -> list[bool]:
        return [ticket.woken.is_set() for ticket in tickets]

    def serve_steadily(self, places: int, every_s: float, client: str = "z") -> None:
        """Teach the room how fast the line moves; somebody waits all the time."""
        stays = self.join(client, usual_s=4 * every_s)
        for _ in range(places):
            ticket = self.join(client, usual_s=4 * every_s)
            self.now += every_s
            ticket.leave(served=True)
        stays.leave()


# --- turns


async def test_one_of_each_line_has_the_turn_and_the_next_when_it_leaves() -> None:
    hall = Hall()
    first, second, other = hall.join(), hall.join(), hall.join(line="n")
    assert hall.turns(first, second, other) == [False, False, False]
    hall.room.stir()
    assert hall.turns(first, second, other) == [True, False, True]
    assert await first.turn(1)
    assert not await first.turn(0)
    first.leave(served=True)
    first.leave()
    assert hall.turns(second) == [True] and len(hall.room) == 2
    second.leave()
    other.leave()
    hall.room.validate()
    assert len(hall.room) == 0 and not hall.room.waiting("m")


async def test_a_turn_that_came_to_nothing_goes_on_to_a_few_others() -> None:
    hall = Hall()
    tickets = [hall.join(str(number)) for number in range(MAX_PASSES + 3)]
    hall.room.stir()
    for index, ticket in enumerate(tickets):
        asked = index <= MAX_PASSES
        assert hall.turns(ticket) == [asked]
        if asked:
            await ticket.turn(0)
            ticket.give_way()
    hall.room.stir()
    assert hall.turns(tickets[0]) == [True], "the next event begins with the first again"


async def test_what_changes_while_somebody_tries_is_not_lost() -> None:
    hall = Hall()
    only = hall.join()
    hall.room.stir()
    await only.turn(0)
    hall.room.stir()  # a place became free after it had looked
    assert hall.turns(only) == [False]
    only.give_way()
    assert hall.turns(only) == [True]


async def test_a_more_important_newcomer_has_the_next_turn() -> None:
    hall = Hall()
    usual = hall.join()
    hall.room.stir()
    await usual.turn(0)
    urgent = hall.join(priority=-1)
    usual.give_way()
    hall.room.stir()
    assert hall.turns(urgent, usual) == [True, False]


async def test_without_any_event_one_tries_now_and_then_even_those_who_seem_full() -> None:
    hall = Hall()
    only = hall.join()
    hall.room.retry("m")
    assert hall.turns(only) == [False], "not so soon"
    for _ in range(3):
        hall.now += RETRY_S
        hall.room.retry("m")
        assert hall.turns(only) == [True] and only.probing
        await only.turn(0)
        only.give_way()
        hall.room.stir()
        assert hall.turns(only) == [True] and not only.probing
        await only.turn(0)
        only.give_way()


async def test_those_who_seem_full_are_asked_however_much_happens() -> None:
    hall, probes = Hall(), 0
    only = hall.join()
    for _ in range(100):
        hall.now += RETRY_S / 10
        hall.room.stir()
        await only.turn(0)
        probes += only.probing
        only.give_way()
    assert probes >= 9


async def test_changes_of_the_view_come_together() -> None:
    hall = Hall()
    hall.room.stir_soon()  # nobody waits: nothing is planned
    ticket = hall.join()
    for _ in range(100):
        hall.room.stir_soon()
    assert await ticket.turn(5)


async def test_who_lost_the_place_it_was_given_goes_to_the_head() -> None:
    hall = Hall(limit=2)
    hall.join("a"), hall.join("b")
    back = hall.join("c", first=True)
    hall.room.stir()
    assert hall.turns(back) == [True] and len(hall.room) == 2


# --- bounds


def test_a_full_room_refuses_the_newcomer_unless_somebody_is_less_important() -> None:
    hall = Hall(limit=3)
    low = hall.join("a", priority=5)
    flood = [hall.join("b") for _ in range(2)]
    denial = hall.room.join(Entrance("m", "c", priority=9))
    assert isinstance(denial, Denial) and 1 <= denial.after_s <= MAX_AFTER_S
    hall.join("c")
    assert low.denial is not None and low.denial.after_s >= 1 and low.woken.is_set()
    hall.join("d")
    assert [ticket.denial is not None for ticket in flood] == [False, True], "the newest of who has most"
    assert isinstance(hall.room.join(Entrance("m", "e")), Denial)
    assert len(hall.room) == 3
    hall.room.validate()


def test_one_in_another_line_makes_room_too() -> None:
    hall = Hall(limit=1)
    other = hall.join("a", line="n", priority=1)
    ticket = hall.join("b")
    assert other.denial is not None and len(hall.room) == 1 and ticket.denial is None
    hall.room.validate()


def test_without_room_nobody_waits() -> None:
    assert isinstance(Hall(limit=0).room.join(Entrance("m")), Denial)


def test_the_past_of_quiet_lines_is_bounded() -> None:
    hall = Hall()
    for number in range(MAX_LINES + 50):
        hall.join(line=str(number)).leave(served=True)
    hall.room.validate()


# --- how long a line may be


def test_a_request_is_refused_at_once_when_its_turn_would_come_too_late() -> None:
    hall = Hall(limit=10_000)
    hall.serve_steadily(40, 0.5)
    waiting = []
    while isinstance(ticket := hall.room.join(Entrance("m", "a")), Ticket):
        waiting.append(ticket)
    assert len(waiting) == pytest.approx(MAX_WAIT_S / 0.5, rel=0.1)
    assert isinstance(hall.room.join(Entrance("m", "b")), Ticket), "another client's turn comes soon"


def test_a_deadline_is_a_patience_of_its_own() -> None:
    hall = Hall()
    hall.serve_steadily(40, 0.5)
    waiting = [hall.join() for _ in range(6)]
    assert isinstance(hall.room.join(Entrance("m", "a", patience_s=2.0)), Denial)
    waiting.append(hall.join(patience_s=5.0))
    assert len(hall.room) == len(waiting)


def test_in_overload_only_a_few_wait_and_the_others_are_told_when_to_come() -> None:
    hall = Hall(limit=10_000)
    entrance = Entrance("m", "a", usual_s=2.0)
    line: list[Ticket] = [hall.join(usual_s=2.0) for _ in range(40)]
    for _ in range(38):  # one place in half a second, and always somebody waits for long
        hall.now += 0.5
        line.pop(0).leave(served=True)
    assert len(line) == FEW
    refused = [hall.room.join(replace(entrance, mark=mark)) for mark in range(10)]
    told = [denial.after_s for denial in refused if isinstance(denial, Denial)]
    assert len(told) == len(refused) and told == sorted(told) and told[0] < told[-1] < 15
    hall.now += told[-1]
    assert isinstance(hall.room.join(replace(entrance, mark=99)), Denial), "it was told nothing"
    assert isinstance(hall.room.join(replace(entrance, mark=9)), Ticket), "who comes as told is let in"
    line.pop().leave(served=True)
    assert isinstance(hall.room.join(Entrance("m", "new", usual_s=2.0)), Ticket), "there are always a few"
    hall.room.validate()


async def test_a_modest_client_is_let_into_a_line_that_is_too_long_and_before_the_others() -> None:
    hall = Hall(limit=10_000)
    line = [hall.join("abc"[number % 3], usual_s=2.0) for number in range(60)]
    for ticket in line[:40]:
        hall.now += 0.5
        ticket.leave(served=True)
    entrance = Entrance("m", "a", usual_s=2.0)
    assert isinstance(hall.room.join(entrance), Denial)
    new = [hall.room.join(replace(entrance, client=f"new-{number}")) for number in range(MAX_MODEST + 1)]
    assert [isinstance(ticket, Ticket) for ticket in new] == [True] * MAX_MODEST + [False]
    hall.room.stir()
    assert any(isinstance(ticket, Ticket) and ticket.woken.is_set() for ticket in new)


def test_what_is_shown_is_bounded_and_names_no_client() -> None:
    hall = Hall()
    for number in range(40):
        hall.join("secret", line=f"model-{number}\0")
    shown = hall.room.snapshot()
    assert shown["waiting"] == 40 and len(shown["lines"]) < 40  # type: ignore[arg-type]
    assert "secret" not in str(shown)


# --- whatever happens


class RoomMachine(RuleBasedStateMachine):
    """No wake-up is lost, nobody is forgotten, the bound holds."""

    LIMIT = 6

    def __init__(self) -> None:
        super().__init__()
        self.hall = Hall(self.LIMIT)
        self.inside: list[Ticket] = []
        self.trying: list[Ticket] = []

    @rule(
        client=st.sampled_from("abc"),
        line=st.sampled_from("mn"),
        priority=st.integers(-1, 1),
        first=st.booleans(),
        patience=st.none() | st.floats(0, 9),
    )
    def come(self, client: str, line: str, priority: int, first: bool, patience: float | None) -> None:
        entrance = Entrance(line, client, priority=priority, first=first, patience_s=patience)
        full = len(self.hall.room) == self.LIMIT
        joined = self.hall.room.join(entrance)
        if isinstance(joined, Ticket):
            self.inside.append(joined)
            gone = [ticket for ticket in self.inside if ticket.denial is not None]
            assert len(gone) == full
            for ticket in gone:
                assert ticket.woken.is_set()
                self.forget(ticket)
        else:
            assert 1 <= joined.after_s <= MAX_AFTER_S and not first

    @rule()
    def stir(self) -> None:
        self.hall.room.stir()
        for line in {ticket.line for ticket in self.inside}:
            assert any(ticket in self.trying or ticket.woken.is_set() for ticket in self.of(line)), "nobody was woken"

    @precondition(lambda self: any(ticket.woken.is_set() for ticket in self.inside))
    @rule()
    def try_it(self) -> None:
        ticket = next(ticket for ticket in self.inside if ticket.woken.is_set())
        ticket.woken.clear()
        self.trying.append(ticket)

    @precondition(lambda self: self.trying)
    @rule(outcome=st.sampled_from(["served", "full", "gone"]), missed=st.booleans())
    def end_of_try(self, outcome: str, missed: bool) -> None:
        ticket = self.trying.pop(0)
        if missed:
            self.hall.room.stir()
        others = [other for other in self.of(ticket.line) if other is not ticket]
        if outcome == "full":
            ticket.give_way()
            assert not missed or any(other.woken.is_set() for other in self.of(ticket.line)), "a wake-up was lost"
            return
        self.forget(ticket)
        ticket.leave(served=outcome == "served")
        assert not others or any(other.woken.is_set() for other in others), "its turn was lost"

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside))
        had_turn = ticket in self.trying or ticket.woken.is_set()
        self.forget(ticket)
        ticket.leave()
        assert not had_turn or not self.of(ticket.line) or any(o.woken.is_set() for o in self.of(ticket.line))

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.hall.now += seconds

    def of(self, line: str) -> list[Ticket]:
        return [ticket for ticket in self.inside if ticket.line == line]

    def forget(self, ticket: Ticket) -> None:
        self.inside.remove(ticket)
        if ticket in self.trying:
            self.trying.remove(ticket)

    @invariant()
    def holds(self) -> None:
        self.hall.room.validate()
        assert len(self.hall.room) == len(self.inside) <= self.LIMIT
        for line in "mn":
            turns = [t for t in self.of(line) if t in self.trying or t.woken.is_set()]
            assert len(turns) <= 1, "two have the turn"

    def teardown(self) -> None:
        for ticket in self.inside:
            ticket.leave()
        assert len(self.hall.room) == 0
        self.hall.room.validate()


RoomMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRoom = RoomMachine.TestCase
