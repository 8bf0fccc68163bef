"""When a further source is asked, and how long a pull then takes: against the split itself in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmigrate.crew import recruits
from kvmigrate.pull import RUN_S
from kvmigrate.pull_types import Look, Source
from kvmigrate.sharing import WORTH_S, WORTH_SHARE, Giver, helpers, takes_s

from .test_split import DEPTH, GB_S, MB, Peer, Pulled

rates = st.floats(0.05 * GB_S, 5 * GB_S)


@pytest.mark.parametrize(
    ("pulling", "begin_s", "pays"),
    [
        ({"left": 80 * MB}, 0.005, True),
        ({"left": 8 * MB}, 0.005, False),  # over before the other one has answered
        ({"left": 80 * MB, "rate": 10 * GB_S}, 0.005, False),
        ({"left": 80 * MB, "more": 0.05 * GB_S}, 0.005, False),
        ({"left": 80 * MB, "most": 4 * MB}, 0.005, False),  # it has only the beginning
        ({"left": 800 * MB}, 0.3, True),
        ({"left": 800 * MB}, 0.9, False),
    ],
)
def test_another_source_is_asked_where_it_shortens_the_pull(
    pulling: dict[str, float], begin_s: float, pays: bool
) -> None:
    asked = {"rate": GB_S, "more": GB_S, "most": pulling["left"], **pulling}
    first, other = Giver(asked["rate"], asked["left"]), Giver(asked["more"], asked["most"], begin_s)
    assert helpers(first, [other])[0] == ([0] if pays else [])


def test_the_time_by_hand() -> None:
    first, front = Giver(GB_S, 8 * GB_S), Giver(3 * GB_S, 4 * GB_S)
    assert takes_s([first]) == 8.0
    assert takes_s([first, Giver(GB_S, 8 * GB_S, 1.0)]) == 4.5  # one second alone, then both
    assert takes_s([first, front]) == 4.0  # what lies behind the front comes from the first alone
    assert takes_s([first, front, Giver(3 * GB_S, 8 * GB_S)]) == pytest.approx(8 / 7)


@given(rates, st.floats(1 * MB, 4000 * MB), st.lists(st.tuples(rates, st.floats(0.01, 1), st.floats(0, 1)), max_size=4))
def test_each_further_source_makes_it_shorter_by_what_it_must_or_is_not_asked(
    rate: float, left: float, more: list[tuple[float, float, float]]
) -> None:
    first = Giver(rate, left)
    others = [Giver(gives, left * share, begin_s) for gives, share, begin_s in more]
    chosen, seconds = helpers(first, others)
    asked, before = [first], takes_s([first])
    assert before == pytest.approx(left / rate)
    for place in range(len(others)):
        after = takes_s([*asked, others[place]])
        assert (place in chosen) == (before - after >= max(WORTH_S, WORTH_SHARE * before))
        if place in chosen:
            asked, before = [*asked, others[place]], after
    assert seconds == before <= left / rate * (1 + 1e-9)


@given(rates, st.integers(64, 800), st.lists(st.tuples(rates, st.floats(0.1, 1), st.floats(0, 0.05)), max_size=2))
def test_what_is_foreseen_is_what_the_split_takes(
    rate: float, blocks: int, more: list[tuple[float, float, float]]
) -> None:
    first = Giver(rate, blocks * MB)
    reaches = [max(1, int(share * blocks)) for _, share, _ in more]
    others = [Giver(gives, reach * MB, begin_s) for (gives, _, begin_s), reach in zip(more, reaches, strict=True)]
    chosen, seconds = helpers(first, others)
    peers = [Peer(blocks, rate)]
    peers += [Peer(reaches[n], others[n].rate, joins_at=others[n].begin_s) for n in chosen]
    took_s = Pulled(MB, peers).run().ended_at
    # Blocks are not divided, and the first source begins at the front before it is known that others can have that.
    slowest = min(peer.rate for peer in peers)
    assert 0.97 * seconds <= took_s <= 1.05 * seconds + DEPTH * RUN_S + 4 * MB / slowest


@given(rates, st.floats(1 * MB, 4000 * MB), st.lists(st.tuples(rates, st.integers(1, 100)), min_size=1, max_size=3))
def test_a_crew_asks_those(rate: float, left: float, more: list[tuple[float, int]]) -> None:
    sources = [Source("first", 100, rate, 0.005), *(Source("other", chunks, gives, 0.005) for gives, chunks in more)]
    look = Look(answered=frozenset({0}), joined=1, missing_bytes=int(left), rate=rate)
    others = [Giver(gives, int(left) * chunks / 100, 0.005) for gives, chunks in more]
    chosen, _ = helpers(Giver(rate, int(left)), others)
    assert recruits(look, sources, [0], set(), 0.0) == [1 + place for place in chosen]
