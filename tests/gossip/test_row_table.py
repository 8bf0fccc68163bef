"""The columns of the load rows: whatever comes, goes and is passed on, they say what a plain table would say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.encode import make_row
from gossip.messages import Row, Rows
from gossip.row_table import MOST_GAP_S, PASSED_ON_LOSS_S, RANK_MARGIN_S, RowTable

names = st.sampled_from([f"n{i}" for i in range(8)])
steps = st.one_of(
    st.tuples(st.just("row"), names, st.integers(1, 3), st.integers(1, 9), st.integers(0, 400)),
    st.tuples(st.just("gone"), names),
)


def merge(table: RowTable, row: Row, age: int, now: float, admitted: bool = True) -> dict[str, None]:
    news: dict[str, None] = {}
    table.merge(Rows((age,), (row,)), "giver", now, lambda _: admitted, news)
    return news


@settings(deadline=None)
@given(st.lists(steps, max_size=40))
def test_the_columns_hold_what_a_plain_table_would(story: list[tuple[str, str, int, int, int]]) -> None:
    table, plain, now = RowTable(), dict[str, tuple[Row, float]](), 100.0
    for what, name, *numbers in story:
        now += 0.1
        if what == "gone":
            table.remove(name)
            plain.pop(name, None)
            continue
        boot, seq, age = numbers
        row = make_row(name, boot, seq, b"load")
        newer = name not in plain or (boot, seq) > (plain[name][0].boot, plain[name][0].seq)
        assert set(merge(table, row, age, now)) == ({name} if newer else set())
        if newer:
            plain[name] = (row, now - age / 100)
    assert table.names() == set(plain)
    assert len(table) == len(plain)
    for name, (row, set_at) in plain.items():
        held = table.get(name)
        assert held is not None and held[0] == row and abs(held[1] - set_at) < 1e-6
    assert all(table.get(row.name) == (row, table.set_at[slot]) for slot, row in enumerate(table.rows))


def test_a_row_of_another_boot_is_kept_only_if_it_is_admitted() -> None:
    table = RowTable()
    merge(table, make_row("a", 1, 7, b"old"), 0, 1.0)
    assert not merge(table, make_row("a", 2, 1, b"stranger"), 0, 2.0, admitted=False)
    assert table.rows[0].boot == 1
    assert merge(table, make_row("a", 2, 1, b"restarted"), 0, 3.0)
    assert [row.payload for row in table.rows] == [b"restarted"]
    assert table.renewals(0) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 60), st.floats(0, 2))
def test_the_freshest_are_those_of_a_full_sort_however_they_were_found(
    ages: list[int], count: int, later: float
) -> None:
    table = RowTable()
    for number, age in enumerate(ages):
        merge(table, make_row(f"n{number}", 1, 1, b""), age, 10.0)
    for now in (10.0, 10.0 + later):
        best = table.freshest(count, now)
        wanted = sorted(table.ranks, reverse=True)[:count]
        assert [table.ranks[slot] for slot in best] == wanted
        table.passed_on(best)


def test_what_ended_a_long_silence_ranks_above_what_was_young_before() -> None:
    table = RowTable()
    for name in ("late", "prompt"):
        merge(table, make_row(name, 1, 1, b""), 0, 10.0)
    merge(table, make_row("prompt", 1, 2, b""), 0, 12.0)
    merge(table, make_row("late", 1, 2, b""), 10, 12.1)
    merge(table, make_row("prompt", 1, 3, b""), 0, 12.1)
    assert [table.rows[slot].name for slot in table.freshest(2, 12.1)] == ["late", "prompt"]
    table.passed_on([0])
    table.passed_on([0])
    assert [table.rows[slot].name for slot in table.freshest(2, 12.1)] == ["prompt", "late"]
    assert 0 < RANK_MARGIN_S < PASSED_ON_LOSS_S < MOST_GAP_S
