"""Who is asked for blocks beside the plan's source, and for how much."""

from __future__ import annotations

from node.kv_sources import MORE_SOURCES, further


def asked(held: dict[str, int], reach: int = 100, **rates: float) -> dict[str, int]:
    return further(held, target="t", source="s", reach=reach, rate=lambda name: rates.get(name, 1.0), tie=str)


def test_those_that_could_give_most_are_asked() -> None:
    held = {"s": 100, "a": 100, "b": 90, "c": 40, "d": 100}
    assert list(asked(held)) == ["a", "d"] and len(asked(held)) == MORE_SOURCES
    assert list(asked(held, b=1.2, c=2.0)) == ["b", "a"]
    assert list(asked(held, c=3.0)) == ["c", "a"]
    # what the target has itself it needs from nobody
    assert list(asked({**held, "t": 40}, c=100.0)) == ["a", "d"] and "c" not in asked({**held, "t": 40}, c=100.0)
    assert list(asked({**held, "t": 85}, b=2.0)) == ["a", "d"]


def test_nobody_is_asked_for_more_than_the_plan_has_weighed() -> None:
    assert asked({"s": 100, "a": 900, "b": 7}) == {"a": 100, "b": 7}
    # a pull of a little, to learn how fast it is, stays one of a little
    assert asked({"s": 900, "a": 900}, 4) == {"a": 4}
    # and who holds more than that is not the better for it
    assert list(asked({"s": 100, "a": 100, "b": 100, "c": 900}, a=1.1, b=1.1)) == ["a", "b"]
