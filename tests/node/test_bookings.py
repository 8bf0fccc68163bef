"""When refused clients should come back, and whether they are known again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.bookings import BOOKED_SHARE, EARLY_S, LATE_S, MAX_AFTER_S, MAX_BOOKINGS, SWEEP_S, Bookings


def test_refusals_are_told_to_come_one_after_the_other_as_fast_as_places_become_free() -> None:
    bookings, rate = Bookings(), 2.0
    told = [bookings.book("a", 0, 100.0, rate=rate) for _ in range(40)]
    assert told == sorted(told) and told[0] == 1
    assert told[-1] == round(40 / (BOOKED_SHARE * rate))
    bookings.validate()


def test_who_comes_as_told_is_known_and_once_only() -> None:
    bookings = Bookings()
    after = bookings.book("a", 0, 100.0, rate=0.5)
    assert not bookings.take("a", 0, 100.0 + after - 1), "too early"
    assert not bookings.take("b", 0, 100.0 + after), "somebody else"
    assert not bookings.take("a", 1, 100.0 + after), "another request"
    assert bookings.take("a", 0, 100.0 + after)
    assert not bookings.take("a", 0, 100.0 + after)
    bookings.validate()
    assert len(bookings) == 0


def test_who_never_comes_is_forgotten() -> None:
    bookings = Bookings()
    after = bookings.book("a", 0, 0.0, rate=1.0)
    assert bookings.soon(float(after), 0.0) == {(0, "a"): 1}
    late = after + LATE_S + after + SWEEP_S
    assert not bookings.take("a", 0, late)
    assert not bookings.soon(late, 100.0) and len(bookings) == 0


def test_what_is_too_far_away_is_not_promised() -> None:
    bookings = Bookings()
    told = [bookings.book("a", 0, 0.0, rate=0.1) for _ in range(40)]
    assert told[-1] == MAX_AFTER_S and len(bookings) < 40


def test_the_number_of_bookings_is_bounded() -> None:
    bookings = Bookings()
    for client in range(MAX_BOOKINGS + 50):
        assert 1 <= bookings.book(str(client), 0, 0.0, rate=1e6) <= MAX_AFTER_S
    assert len(bookings) == MAX_BOOKINGS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3), st.floats(0.05, 50))), st.floats(0, 0.04))
def test_every_promise_is_kept_to_whoever_comes_in_time(refusals: list[tuple[str, float, float]], early: float) -> None:
    """Each comes back exactly when it was told: none is turned away, in whatever order they were refused."""
    assert early < EARLY_S
    bookings, now, due = Bookings(), 0.0, list[tuple[float, str]]()
    for client, pause, rate in refusals:
        now += pause
        for at, name in sorted(item for item in due if item[0] <= now):
            assert bookings.take(name, 0, at - early)
            due.remove((at, name))
        known = len(bookings)
        after = bookings.book(client, 0, now, rate=rate)
        if len(bookings) > known:
            due.append((now + after, client))
        bookings.validate()
    for at, name in sorted(due):
        assert bookings.take(name, 0, at - early)
    assert len(bookings) == 0
