"""When an engine is asked how busy it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.engine.pace import EVERY_S, MOST_S, Pace


def test_an_engine_that_tells_is_asked_once_a_second_and_one_that_does_not_ever_more_rarely() -> None:
    pace, now, pauses = Pace(), 100.0, []
    assert pace.wait_s(now) == 0
    pace.told(now)
    assert (pace.wait_s(now), pace.wait_s(now + EVERY_S)) == (EVERY_S, 0)
    for _ in range(8):
        pace.missed(now)
        pauses.append(pace.wait_s(now))
        now += pauses[-1]
        assert pace.wait_s(now) == 0
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    pace.told(now)
    pace.missed(now)
    assert pace.wait_s(now) == 2 * EVERY_S


def test_another_engine_is_asked_at_once() -> None:
    pace = Pace()
    for _ in range(5):
        pace.missed(7.0)
    pace.afresh()
    assert pace.wait_s(7.0) == 0
    pace.missed(7.0)
    assert pace.wait_s(7.0) == 2 * EVERY_S


@given(st.lists(st.booleans(), max_size=40))
def test_it_is_never_asked_more_often_and_never_forgotten(answers: list[bool]) -> None:
    pace, now = Pace(), 0.0
    for answer in answers:
        (pace.told if answer else pace.missed)(now)
        assert EVERY_S <= pace.wait_s(now) <= MOST_S
        now += pace.wait_s(now)
