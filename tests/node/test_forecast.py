"""How fast a line moves and how long it may be, in virtual time."""

from __future__ import annotations

import pytest

from node.forecast import (
    CALM_SHARE,
    FEWEST_PLACES,
    FLOOD,
    FLOOD_SHARE,
    LEAST_WAIT_S,
    MAX_WAIT_S,
    SHARE,
    STANDING_MOST_S,
    STANDING_TIMES,
    STEADY_PLACES,
    Forecast,
    short_wait,
)

USUAL_S = 2.0
STANDING_S = STANDING_TIMES * USUAL_S


def steady(forecast: Forecast, now: float, seconds: float, *, every_s: float, waited_s: float) -> float:
    """Somebody has a place every so often, and always somebody waits."""
    end = now + seconds
    while now < end:
        now += every_s
        forecast.served("a", now, waited_s=waited_s, usual_s=USUAL_S)
    return now


def test_the_rate_is_that_of_the_last_places_while_somebody_waited() -> None:
    forecast = Forecast()
    assert forecast.rate(0.0, 7.0) == 7.0, "a guess until it is measured"
    forecast.opened(0.0, USUAL_S)
    now = steady(forecast, 0.0, 20.0, every_s=0.25, waited_s=0.1)
    assert forecast.rate(now, 7.0) == pytest.approx(4.0)
    forecast.emptied(now, USUAL_S)
    assert forecast.rate(now + 1000, 7.0) == pytest.approx(4.0), "a quiet time says nothing"
    forecast.opened(now + 1000, USUAL_S)
    assert forecast.rate(now + 1031, 7.0) < 1.1, "a line that stands still is slow"


def test_a_line_that_stands_forgets_how_fast_it_moved_when_it_was_often_empty() -> None:
    forecast, now = Forecast(), 0.0
    for _ in range(40):  # one place after a tenth of a second, and nobody waits any more
        forecast.opened(now, USUAL_S)
        forecast.served("a", now + 0.1, waited_s=0.1, usual_s=USUAL_S)
        forecast.emptied(now + 0.1, USUAL_S)
        now += 1.0
    assert forecast.rate(now, 0.0) == pytest.approx(10.0)
    forecast.opened(now, USUAL_S)
    now = steady(forecast, now, STEADY_PLACES * 0.5, every_s=0.5, waited_s=1.0)
    assert forecast.rate(now, 0.0) == pytest.approx(2.0)
    forecast.emptied(now, USUAL_S)
    assert forecast.rate(now, 99.0) < 10.0, "nobody waits now: the last places count"
    forecast.opened(now, USUAL_S)
    now = steady(forecast, now, 60.0, every_s=0.25, waited_s=1.0)
    assert forecast.rate(now, 0.0) == pytest.approx(4.0), "and goes on with the last places"


def test_a_line_that_is_flooded_is_a_standing_one_sooner_and_a_burst_alone_is_not() -> None:
    for joins, standing in ((int(FLOOD * STEADY_PLACES), True), (int(FLOOD * STEADY_PLACES) - 1, False)):
        forecast = Forecast()
        forecast.opened(0.0, USUAL_S)
        for _ in range(joins):
            forecast.joined()
        soon = FLOOD_SHARE * STANDING_S
        assert not forecast.standing(soon, USUAL_S), "no place yet: nothing is known of its speed"
        for place in range(STEADY_PLACES):
            forecast.served("a", place / 10, waited_s=3.0, usual_s=USUAL_S)
        assert forecast.standing(soon, USUAL_S) is standing


def test_a_few_places_say_nothing_yet() -> None:
    forecast = Forecast()
    forecast.opened(0.0, USUAL_S)
    for place in range(1, FEWEST_PLACES):
        forecast.served("a", float(place), waited_s=0.0, usual_s=USUAL_S)
        assert not forecast.measured()
    forecast.served("a", 4.0, waited_s=0.0, usual_s=USUAL_S)
    assert forecast.measured()


def test_a_burst_may_wait_and_a_standing_line_may_not() -> None:
    forecast = Forecast()
    forecast.opened(0.0, USUAL_S)
    assert forecast.longest_s(1.0, USUAL_S) == MAX_WAIT_S
    now = steady(forecast, 0.0, STANDING_S + 1, every_s=0.5, waited_s=3.0)
    assert forecast.longest_s(now, USUAL_S) == short_wait(USUAL_S) == SHARE * USUAL_S


def test_a_line_that_is_served_quickly_is_none_however_long_it_lasts() -> None:
    forecast = Forecast()
    forecast.opened(0.0, USUAL_S)
    now = steady(forecast, 0.0, 300.0, every_s=0.1, waited_s=SHARE * USUAL_S)
    assert not forecast.standing(now, USUAL_S)


def test_overload_ends_when_the_line_is_often_empty_and_not_before() -> None:
    forecast = Forecast()
    forecast.opened(0.0, USUAL_S)
    now = steady(forecast, 0.0, 60.0, every_s=0.5, waited_s=3.0)
    for _ in range(5):
        assert forecast.standing(now, USUAL_S)
        forecast.emptied(now, USUAL_S)
        now += 0.5 * CALM_SHARE
        forecast.opened(now, USUAL_S)
        now += 0.5
    for _ in range(40):
        forecast.emptied(now, USUAL_S)
        now += 0.5
        forecast.opened(now, USUAL_S)
        now += 0.5
    assert not forecast.standing(now, USUAL_S)


def test_the_share_has_bounds() -> None:
    assert short_wait(0.0) == LEAST_WAIT_S and short_wait(1e9) == MAX_WAIT_S
    forecast = Forecast()
    forecast.opened(0.0, 1e9)
    assert forecast.standing(STANDING_MOST_S, 1e9)
