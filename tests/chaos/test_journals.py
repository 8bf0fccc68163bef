"""Who computed what, and was it twice? From journals that engines have written."""

from __future__ import annotations

import itertools
from pathlib import Path

from chaos_run.client import Sent
from chaos_run.journals import GRACE_S, Verdict, Work, judge, read
from chaos_run.node import Trouble

from node.emulator.serve.journal import Journal


def work(node: str, first: float, last: float, *, pid: int = 1, ended: float | None = None) -> Work:
    times = [first + step * (last - first) / 10 for step in range(11)]
    return Work(node, pid, first - 0.1, times, last if ended is None else ended, count=len(times))


def verdict(works: list[Work], *troubles: Trouble, living: frozenset[int] = frozenset()) -> Verdict:
    return judge({"r": works}, troubles, {"r": "entry"}, living)


def test_one_after_the_other_is_carried_and_no_duplicate() -> None:
    found = verdict([work("a", 0, 5), work("b", 6, 9)], Trouble("killed", "a", 5.0, 8.0))
    assert (found.carried, found.duplicates, found.unreachable) == ({"r": "killed"}, (), ())
    assert found.resumed == {"r": 6.0} and found.computed == {"r": 22}


def test_the_pause_of_a_carried_stream_is_the_one_after_which_the_other_engine_spoke() -> None:
    sent = Sent(asked=None, begun=0.0)  # type: ignore[arg-type]
    for at, gap in ((2.0, 0.001), (3.0, 0.9), (6.5, 0.4), (8.0, 1.5)):
        sent.note_gap(at, gap)
    assert sent.pause_s(6.0) == 0.4 and sent.pause_s(9.0) == 0.0 and len(sent.gaps) == 3


def test_an_entry_that_was_stopped_is_told_apart() -> None:
    stopped = Trouble("stopped", "entry", 4.0, 6.0)
    assert verdict([work("a", 0, 5), work("b", 6, 9)], stopped).carried == {"r": "entry stopped"}
    long_ago = Trouble("stopped", "entry", -9.0, -8.0)
    assert verdict([work("a", 0, 5), work("b", 6, 9)], long_ago).carried == {"r": ""}


def test_two_at_once_are_a_duplicate() -> None:
    found = verdict([work("a", 0, 9), work("b", 5, 9)])
    assert len(found.duplicates) == 1 and "a went on 4.0 s after b" in found.duplicates[0]


def test_an_abort_takes_a_moment() -> None:
    assert not verdict([work("a", 0, 5 + GRACE_S), work("b", 5, 9)]).duplicates


def test_who_could_not_be_told_is_counted_apart() -> None:
    for node in ("a", "entry"):
        found = verdict([work("a", 0, 9), work("b", 5, 12)], Trouble("cut", node, 4.0, 9.0))
        assert (len(found.duplicates), len(found.unreachable)) == (0, 1)


def test_who_could_be_told_again_has_a_moment_and_no_more() -> None:
    found = verdict([work("a", 0, 9), work("b", 5, 12)], Trouble("stopped", "a", 4.0, 6.0))
    assert (len(found.duplicates), len(found.unreachable)) == (1, 0)


def test_after_a_cut_tcp_tries_again_at_doubled_intervals() -> None:
    for last, duplicates in ((8.5, 0), (9.5, 1)):
        found = verdict([work("a", 0, last), work("b", 5, 12)], Trouble("cut", "a", 4.0, 6.0))
        assert len(found.duplicates) == duplicates


def test_a_drain_or_a_trouble_of_others_excuses_nobody() -> None:
    drained = Trouble("drained", "a", 4.0, 20.0, excuses=False)
    assert verdict([work("a", 0, 9), work("b", 5, 12)], drained).duplicates
    assert verdict([work("a", 0, 9), work("b", 5, 12)], Trouble("cut", "c", 4.0, 20.0)).duplicates


def test_work_that_never_ends_is_found_where_its_engine_lives() -> None:
    endless = Work("a", 7, 0.0, [1.0], None)
    assert verdict([endless]).unfinished == ()
    assert verdict([endless], living=frozenset({7})).unfinished == ("r on a",)


def test_what_an_engine_writes_is_what_is_read(tmp_path: Path) -> None:
    times = itertools.count(10)
    path = tmp_path / "a.journal"
    journal = Journal(path, clock=lambda: float(next(times)))
    journal.begin("r")
    journal.token("r", 1)
    journal.token("r", 2)
    journal.end("r")
    journal.begin("cut")
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"id": "r", "at":')  # the line at which it was killed
    works = read([("a", path), ("b", tmp_path / "none")])
    assert set(works) == {"r", "cut"}
    (whole,), (cut,) = works["r"], works["cut"]
    assert (whole.begun, whole.tokens, whole.ended, whole.count) == (10.0, [11.0, 12.0], 13.0, 3)
    assert (cut.begun, cut.tokens, cut.ended) == (14.0, [], None)
