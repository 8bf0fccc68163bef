"""Cutting bytes into events, and reading them: any split, any garbage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import RemoteError
from node.relay.carry import events
from node.relay.carry.events import DONE, EventSplitter, is_done, read, write
from tests.node.carry.building import chat, opening

LINES = st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b""))


@given(st.lists(LINES.filter(bool), max_size=8), st.booleans(), st.lists(st.integers(0, 400), max_size=12))
def test_events_come_out_whole_wherever_the_bytes_were_cut(lines: list[bytes], crlf: bool, cuts: list[int]) -> None:
    end = b"\r\n\r\n" if crlf else b"\n\n"
    whole = [b"data: " + line + end for line in lines]
    stream = b"".join(whole) + b"data: half"
    splitter, found, start = EventSplitter(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]:
        found += splitter.feed(stream[start:cut])
        start = cut
    assert found == whole
    assert splitter.partial


def test_several_lines_are_one_event() -> None:
    assert EventSplitter().feed(b"event: x\ndata: 1\n\ndata: 2\n\n") == [b"event: x\ndata: 1\n\n", b"data: 2\n\n"]


def test_an_event_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT", 100)
    splitter = EventSplitter()
    splitter.feed(b"x" * 100)
    with pytest.raises(RemoteError):
        splitter.feed(b"x")


@given(st.binary(max_size=60))
def test_the_only_error_is_a_remote_one(data: bytes) -> None:
    for event in (data, b"data: " + data, b"data:" + data + b"\n\n"):
        try:
            value = read(event)
        except RemoteError:
            continue
        assert value is None or isinstance(value, dict)


def test_what_is_no_data_is_nothing() -> None:
    assert read(b": comment\n\n") is None and read(DONE) is None and read(b"data:\n\n") is None
    assert is_done(DONE) and is_done(b"data:[DONE]\r\n\r\n") and not is_done(chat("[DONE]", [1]))
    with pytest.raises(RemoteError):
        read(b'data: "text"\n\n')


def test_lone_surrogates_are_read_and_written() -> None:
    event = b'data: {"a":"\\ud83d"}\n\n'
    value = read(event)
    assert value is not None and write(value) == event
    assert read(opening(prompt=[1, 2])) is not None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_work_grows_with_the_bytes_and_not_with_their_square(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One search over a piece, however many events it holds: counted in calls, since times depend on the machine."""
    calls = 0
    pattern = events._END

    class Counted:
        def finditer(self, data: bytes) -> object:
            nonlocal calls
            calls += 1
            return pattern.finditer(data)

        def search(self, data: bytes, start: int) -> object:
            nonlocal calls
            calls += 1
            return pattern.search(data, start)

    monkeypatch.setattr(events, "_END", Counted())
    splitter, one = EventSplitter(), b"data: 1" + end
    assert splitter.feed(one * 5000 + b"da") == [one] * 5000
    assert splitter.feed(b"ta: 2") == []
    assert splitter.feed(end + one) == [b"data: 2" + end, one]
    assert calls <= 4 + 1


@pytest.mark.parametrize("odd", [b"a\n\n\nb\n\n", b"a\n\n\n\nb\n\n", b"a\n\r\n\nb\n\n", b"a\n\n\n\n\nb\n\nc"])
def test_line_ends_too_many_belong_to_the_next_event_wherever_the_bytes_are_cut(odd: bytes) -> None:
    whole = EventSplitter()
    meant = whole.feed(odd)
    for cut in range(1, len(odd)):
        splitter = EventSplitter()
        assert splitter.feed(odd[:cut]) + splitter.feed(odd[cut:]) == meant
        assert splitter.partial == whole.partial
