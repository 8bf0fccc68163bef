"""Who holds how much: the same as a plain mapping, and the few that hold most without a look at the others."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from node.held import FEW, Held, held_of, mapped, most
from node.peerprefix import PeerPrefixes

VALUES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 4))


@given(VALUES)
def test_it_is_the_mapping_that_it_was_made_of_without_those_who_hold_nothing(values: dict[str, int]) -> None:
    held, kept = held_of(values), {name: value for name, value in values.items() if value}
    assert dict(held) == kept and len(held) == len(kept) and bool(held) == bool(kept)
    assert all(held.get(name) == value for name, value in values.items())
    assert held.get("nobody") == 0 and "nobody" not in held
    assert [value for value, _ in held.levels] == sorted(set(kept.values()), reverse=True)


@given(VALUES, st.integers(0, 6), st.integers(0, 99))
def test_nobody_outside_holds_more_than_those_who_hold_most(values: dict[str, int], count: int, seed: int) -> None:
    held = held_of(values)
    most = held.most(count, random.Random(seed))
    assert len(most) == min(count, len(held)) and most <= set(held)
    inside = min((held[name] for name in most), default=0)
    assert all(held[name] <= inside for name in set(held) - most) or not most


def test_among_equals_each_is_as_likely_however_many_there_are() -> None:
    held = held_of({"deep": 9} | {f"n{number}": 2 for number in range(1000)})
    rng = random.Random(1)
    drawn = Counter(name for _ in range(3000) for name in held.most(4, rng))
    assert drawn.pop("deep") == 3000
    assert len(drawn) > 990 and max(drawn.values()) < 30
    low = sum(count for name, count in drawn.items() if int(name[1:]) < 500)
    assert abs(low / drawn.total() - 0.5) < 0.03


def test_few_holders_among_many_places_are_drawn_as_well() -> None:
    bits = {f"n{number}": 1 << number for number in range(900)}
    few = ("n3", "n20", "n450", "n700", "n899")
    held = Held([(1, sum(bits[name] for name in few))], bits, dict(enumerate(bits)))
    rng = random.Random(2)
    drawn = Counter(name for _ in range(500) for name in held.most(3, rng))
    assert drawn.keys() == set(few) and min(drawn.values()) > 200


def test_the_index_gives_a_dictionary_for_few_holders_and_the_same_in_another_form_for_many() -> None:
    index = PeerPrefixes()
    for number in range(FEW + 1):
        index.learn(f"n{number}", 1)
        assert dict(index.longest([1])) == {f"n{n}": 1 for n in range(number + 1)}
        assert isinstance(index.longest([1]), dict) == (number < FEW)


def test_values_are_changed_by_their_length_not_by_their_holders() -> None:
    values = {"a": 4, "b": 1, "c": 4}
    for form in (values, held_of(values)):
        changed = mapped(form, lambda chunks: chunks * 100 - 100)
        assert {name: value for name, value in changed.items() if value} == {"a": 300, "c": 300}
        assert set(most(form, 2, random.Random(1))) == {"a", "c"} and set(most(form, 3, random.Random(1))) == set("abc")
