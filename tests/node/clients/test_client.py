"""What one client may use, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.clients import Client, Denied, Limits
from node.clients.client import MAX_WAIT_S


def denied(answer: Denied | None) -> Denied:
    assert answer is not None
    return answer


def test_places_are_bounded_and_come_back() -> None:
    client = Client("a", Limits(running=2), 0.0)
    assert client.enter(0.0) is None and client.enter(0.0) is None
    assert denied(client.enter(0.0)).why == "running"
    client.leave(3.0)
    assert client.enter(3.0) is None
    assert (client.running, client.requests, client.refused["running"]) == (2, 3, 1)


def test_who_waits_for_a_place_is_told_how_long_requests_usually_take() -> None:
    client = Client("a", Limits(running=1), 0.0)
    client.enter(0.0)
    assert denied(client.enter(0.0)).after_s == 1, "nothing is known yet"
    client.leave(20.0)
    client.enter(20.0)
    assert denied(client.enter(25.0)).after_s == 15
    assert denied(client.enter(100.0)).after_s == 1
    client.leave(5000.0)
    client.enter(5020.0)
    assert denied(client.enter(5020.0)).after_s == MAX_WAIT_S


def test_a_request_that_never_fits_is_told_so() -> None:
    client = Client("a", Limits(tokens_per_minute=100), 0.0)
    assert client.spend(100, 0.0) is None
    answer = denied(client.spend(101, 1000.0))
    assert answer.after_s is None and "101" in answer.message


@given(
    per_minute=st.integers(1, 500),
    gaps=st.lists(st.floats(0, 20), min_size=1, max_size=60),
    amount=st.integers(1, 40),
    tokens=st.booleans(),
)
def test_a_minute_never_sees_more_than_its_limit_and_the_time_to_wait_is_true(
    per_minute: int, gaps: list[float], amount: int, tokens: bool
) -> None:
    limits = Limits(tokens_per_minute=per_minute) if tokens else Limits(requests_per_minute=per_minute)
    amount = min(amount, per_minute) if tokens else 1
    client = Client("a", limits, 0.0)
    now, taken = 0.0, 0
    for gap in gaps:
        now += gap
        answer = client.spend(amount, now) if tokens else client.enter(now)
        if answer is None:
            taken += amount
            continue
        assert answer.after_s is not None and answer.after_s >= 1
        if answer.after_s > 1:  # the moment before it is too early
            assert (client.spend(amount, now) if tokens else client.enter(now)) is not None
        now += answer.after_s
        assert (client.spend(amount, now) if tokens else client.enter(now)) is None, "told the truth"
        taken += amount
    assert taken <= per_minute + now * per_minute / 60 + 1e-6


def test_requests_that_are_told_of_out_of_order_cost_nobody_a_place() -> None:
    client = Client("a", Limits(requests_per_minute=5), 10.0)  # made a moment after the first of them came
    assert [client.enter(now) is None for now in (9.99, 10.02, 10.0, 9.99, 9.98, 10.01)] == [True] * 5 + [False]


def test_limits_that_change_leave_what_was_used() -> None:
    client = Client("a", Limits(requests_per_minute=10), 0.0)
    for _ in range(10):
        assert client.enter(0.0) is None
    client.change(Limits(requests_per_minute=5), 0.0)
    assert denied(client.enter(0.0)).after_s == 12
    client.change(Limits(running=20), 0.0)
    assert client.enter(0.0) is None and client.running == 11
