"""Stop strings over a seam, against the plainest reading of vLLM's rules: one engine that saw the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.relay.carry.stops import StopStrings, stop_strings

LETTERS = st.text(alphabet="ab", max_size=3)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def plain(pieces: list[str], stops: list[str], include: bool, least: int) -> tuple[list[str], str | None, int]:
    """What each token shows, the stop string that ended it, and after how many tokens."""
    hold = 0 if include else max(map(len, stops)) - 1
    whole, shown, out = "", 0, []
    for number, piece in enumerate(pieces, 1):
        old, whole = len(whole), whole + piece
        found = [
            (end, index)
            for end in range(old + 1, len(whole) + 1)
            for index, stop in enumerate(stops)
            if whole[:end].endswith(stop)
        ]
        if found and number > least:
            end, index = min(found)
            stop = stops[index]
            out.append(whole[shown : end if include else max(shown, end - len(stop))])
            return out, stop, number
        to = len(whole) if number == len(pieces) else max(shown, len(whole) - hold)
        out.append(whole[shown:to])
        shown = to
    return out, None, len(pieces)


@given(st.lists(LETTERS, min_size=1, max_size=12), STOPS, st.booleans(), st.integers(0, 14), st.integers(0, 4))
def test_a_seam_changes_nothing(pieces: list[str], stops: list[str], include: bool, cut: int, least: int) -> None:
    shown, stop, count = plain(pieces, stops, include, least)
    if cut >= count:
        return
    text, before = "".join(pieces[:cut]), "".join(shown[:cut])
    matcher = StopStrings(stops, include=include, held=text[len(before) :], before=before)
    for number in range(cut, len(pieces)):
        told = matcher.add(pieces[number], may_stop=number + 1 > least, last=number + 1 == len(pieces))
        assert told.text == shown[number]
        if told.stop is not None:
            assert (told.stop, number + 1) == (stop, count)
            return
    assert stop is None


def test_the_field_is_read_as_the_engine_reads_it() -> None:
    assert stop_strings(None) == () and stop_strings("") == () and stop_strings("x") == ("x",)
    assert stop_strings(["a", "b"]) == ("a", "b") and stop_strings(7) == ()
