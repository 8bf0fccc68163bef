"""Slow is not dead: the rules of silence, and the signs they rest on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.vitals import Look, look, works
from node.errors import RemoteError
from node.meter import LoadMeter
from node.relay.carry import hint
from node.relay.carry.engine_watch import EngineWatch
from node.relay.carry.sentry import LOOK_EVERY_S, Hearing
from node.relay.carry.silence import (
    BUSY_FACTOR,
    LINK_S,
    NODE_S,
    PATIENCE_MAX_S,
    PATIENCE_MIN_S,
    STOPPED_S,
    TURN_MAX_S,
    WORK_MAX_S,
    EngineSigns,
    judge_engine,
    judge_peer,
    patience,
)

QUIET = EngineSigns(silent_s=PATIENCE_MIN_S, others_s=99.0, gap_s=0.0, owed_s=0.0, working=None)


def test_a_silent_engine_of_which_nothing_is_known_is_left_after_the_patience() -> None:
    assert not judge_engine(replace(QUIET, silent_s=PATIENCE_MIN_S - 0.1)) and judge_engine(QUIET)


def test_patience_is_learnt_within_bounds() -> None:
    assert patience(0.0) == PATIENCE_MIN_S and patience(0.4) == 4.0 and patience(60.0) == PATIENCE_MAX_S
    slow = replace(QUIET, gap_s=0.4)
    assert not judge_engine(replace(slow, silent_s=3.9)) and judge_engine(replace(slow, silent_s=4.0))


def test_an_engine_that_is_stopped_is_left_at_once_however_slow_it_was() -> None:
    dead = replace(QUIET, working=False, gap_s=1.0, owed_s=100.0, silent_s=STOPPED_S)
    assert "is stopped" in judge_engine(dead) and not judge_engine(replace(dead, silent_s=STOPPED_S - 0.1))


def test_a_working_engine_is_waited_for_longer_and_not_for_ever() -> None:
    busy = replace(QUIET, working=True)
    assert not judge_engine(replace(busy, silent_s=BUSY_FACTOR * PATIENCE_MIN_S - 0.1))
    assert judge_engine(replace(busy, silent_s=BUSY_FACTOR * PATIENCE_MIN_S))
    assert judge_engine(replace(busy, owed_s=1e9, silent_s=WORK_MAX_S))


def test_owed_prompts_are_waited_for() -> None:
    owed = replace(QUIET, owed_s=10.0)
    assert not judge_engine(replace(owed, silent_s=31.0)) and judge_engine(replace(owed, silent_s=32.0))


def test_an_engine_that_talks_to_others_is_alive_and_our_turn_comes_or_not() -> None:
    talks = replace(QUIET, others_s=0.5, silent_s=60.0)
    assert not judge_engine(talks) and judge_engine(replace(talks, silent_s=TURN_MAX_S))


def test_before_the_first_token_only_an_engine_that_is_stopped_is_left() -> None:
    waiting = replace(QUIET, streaming=False, silent_s=500.0)
    assert not judge_engine(waiting) and not judge_engine(replace(waiting, working=True))
    assert judge_engine(replace(waiting, working=False))


def test_a_node_without_a_word_is_lost_and_one_whose_rows_come_is_given_more_time() -> None:
    assert not judge_peer(NODE_S - 0.1, 99.0) and judge_peer(NODE_S, 99.0)
    assert not judge_peer(LINK_S - 0.1, 0.3) and judge_peer(LINK_S, 0.3)


def listened(looks: list[tuple[float, float | None]]) -> list[float | None]:
    """What each look (its time, since when somebody waits) takes for silence; the first is due at 0.25."""
    hearing = Hearing(0.0)
    return [hearing.silent_s(at, since) for at, since in looks]


def test_silence_is_counted_from_look_to_look() -> None:
    heard = listened([(0.25, None), (0.5, 0.3), (0.75, 0.3), (1.0, 0.9), (1.25, None)])
    assert heard == [None, pytest.approx(0.2), pytest.approx(0.45), pytest.approx(0.1), None]


def test_what_nobody_could_hear_is_no_silence() -> None:
    """We were stopped from 0.5 to 7.5; what came meanwhile is unread, and what came not is told by the next looks."""
    heard = listened([(0.25, 0.1), (0.5, 0.1), (7.5, 0.1), (7.75, 0.1), (9.75, 0.1)])
    assert heard[2:] == [pytest.approx(0.65), pytest.approx(0.9), pytest.approx(0.9 + LOOK_EVERY_S)]
    assert listened([(0.25, None), (7.5, 7.3)])[1] == 0.0, "the waiting began when we were awake already, or were not"
    assert listened([(7.5, 0.1), (7.75, 7.6)])[1] == pytest.approx(0.15), "a new wait begins anew"


@pytest.fixture
def busy() -> object:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def test_processes_are_seen_to_work_to_rest_and_to_be_stopped(busy: subprocess.Popen[bytes]) -> None:
    assert look([busy.pid], 0.0).ready  # it waits for a processor, or has one
    busy.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = look([busy.pid], 1.0)
    assert stopped.stopped and not works(Look(0.0, 0.0, ready=False), stopped)
    assert look([1 << 30], 2.0) == Look(2.0, 0.0, ready=False)


def test_processor_time_is_work() -> None:
    before = Look(0.0, 1.0, ready=False)
    assert works(before, Look(1.0, 1.1, ready=False)) and not works(before, Look(1.0, 1.01, ready=False))
    assert works(before, Look(1.0, 1.0, ready=True))


class Engine:
    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0
        self.stopped = False
        self.looks = 0

    def look(self) -> Look | None:
        self.looks += 1
        return Look(self.now, self.used, ready=False, stopped=self.stopped)

    def note_stall(self, why: str) -> None:
        raise AssertionError(why)


def test_the_watch_looks_at_the_processes_and_is_not_misled_by_idle_ones() -> None:
    """One that waits for a long step of its device uses no processor time: scripts/chaos found streams leaving it."""
    engine, meter = Engine(), LoadMeter()
    watch = EngineWatch(engine, meter, lambda: engine.now)
    watch.heard(engine.now)
    meter.dispatched("r", engine.now, 2000)  # two seconds of prompt, as far as is known

    def until_left() -> tuple[float, str]:
        while not (why := watch.judge(engine.now - 100.0)):
            engine.now += 0.25
        return engine.now - 100.0, why

    assert until_left()[0] == 2.0 + 3 * 2.0
    engine.used += 5.0  # it works after all
    engine.now += 0.25
    assert not watch.judge(engine.now - 100.0)
    engine.stopped, engine.used = True, engine.used + 5.0  # one of its processes is stopped, others spin
    engine.now += 0.25
    assert not watch.judge(engine.now - 100.0), "stopped for a moment, perhaps"
    engine.now += 0.5
    assert "is stopped" in watch.judge(engine.now - 100.0)
    assert engine.looks <= 1 + (engine.now - 100.0) / 0.2


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=40), st.integers(0, 1 << 33))
def test_the_chunks_of_a_continuation_travel(chunks: list[int], size: int) -> None:
    assert hint.decode(hint.encode(chunks, size)) == (tuple(chunks), size)


@given(st.text(max_size=60) | st.from_regex(r"[0-9]{1,12};[A-Za-z0-9+/=]{0,40}", fullmatch=True))
def test_chunks_that_make_no_sense_are_a_remote_error(header: str) -> None:
    try:
        chunks, size = hint.decode(header)
    except RemoteError:
        return
    assert len(chunks) <= hint.MAX_CHUNKS and 0 <= size <= hint.MAX_BYTES


def test_only_the_first_chunks_are_told() -> None:
    chunks, _ = hint.decode(hint.encode(range(5000), 7))
    assert chunks == tuple(range(hint.MAX_CHUNKS))
