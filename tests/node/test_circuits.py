"""When a peer is left alone, in virtual time and against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.circuits import (
    CONFIRMED,
    MAX_CIRCUITS,
    MEMORY_S,
    OPEN_FIRST_S,
    OPEN_MAX_S,
    TRIAL_S,
    TRIALS,
    WINDOW_S,
    Circuits,
)


class Peer:
    """One peer's circuit and the clock."""

    def __init__(self) -> None:
        self.circuits = Circuits()
        self.now = 1000.0

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.circuits.failed("b", 1, self.now, "refused")

    @property
    def avoided(self) -> bool:
        return self.circuits.avoided("b", 1, self.now)

    @property
    def state(self) -> object:
        told = self.circuits.describe("b", 1, self.now)
        return "closed" if told is None else told["state"]

    def try_one(self, *, works: bool) -> None:
        trial = self.circuits.sent("b", self.now)
        if works:
            self.circuits.worked("b", self.now)
        self.circuits.ended("b", trial)
        if not works:
            self.fail()


def test_one_failure_ejects_nobody_and_an_answer_ends_the_row() -> None:
    peer = Peer()
    for _ in range(10):
        peer.fail(CONFIRMED - 1)
        assert not peer.avoided
        peer.circuits.worked("b", peer.now)
        peer.now += 0.1
    for _ in range(10):
        peer.fail()
        assert not peer.avoided
        peer.now += WINDOW_S + 0.1


def test_failures_in_a_row_open_it_ever_longer() -> None:
    peer, spans = Peer(), list[float]()
    peer.fail(CONFIRMED)
    for _ in range(8):
        told = peer.circuits.describe("b", 1, peer.now)
        assert told is not None and told["reason"] == "refused" and told["state"] == "open"
        spans.append(float(str(told["left_s"])))
        peer.fail(5)  # of requests that were on their way: they change nothing
        assert float(str((peer.circuits.describe("b", 1, peer.now) or {})["left_s"])) == spans[-1]
        peer.now += spans[-1]
        assert not peer.avoided
        peer.try_one(works=False)
    assert spans[0] == OPEN_FIRST_S and spans == sorted(spans) and spans[-1] == OPEN_MAX_S


def test_a_half_open_one_takes_one_request_at_a_time_and_closes_after_some() -> None:
    peer = Peer()
    peer.fail(CONFIRMED)
    peer.now += OPEN_FIRST_S
    for _ in range(TRIALS):
        assert peer.state == "half-open" and not peer.avoided
        trial = peer.circuits.sent("b", peer.now)
        assert trial is not None and peer.avoided, "one at a time"
        assert peer.circuits.sent("b", peer.now) is None
        peer.circuits.ended("b", None)  # another request, sent before, is over
        assert peer.avoided
        peer.circuits.worked("b", peer.now)
        peer.circuits.ended("b", trial)
    assert peer.state == "closed" and not peer.avoided


def test_a_trial_that_says_nothing_frees_the_way_for_another() -> None:
    peer = Peer()
    peer.fail(CONFIRMED)
    peer.now += OPEN_FIRST_S
    peer.circuits.ended("b", peer.circuits.sent("b", peer.now))  # its client went away
    assert not peer.avoided
    peer.circuits.sent("b", peer.now)
    assert peer.avoided
    peer.now += TRIAL_S
    assert not peer.avoided


def test_a_peer_that_flaps_is_tried_less_and_less_often_and_peace_forgives() -> None:
    peer = Peer()
    for opening in range(4):
        peer.fail(CONFIRMED)
        told = peer.circuits.describe("b", 1, peer.now)
        assert told is not None and told["left_s"] == OPEN_FIRST_S * 2**opening
        peer.now += OPEN_FIRST_S * 2**opening
        for _ in range(TRIALS):
            peer.try_one(works=True)
    peer.now += MEMORY_S + 1
    peer.circuits.worked("b", peer.now)
    assert len(peer.circuits) == 0


def test_an_answer_while_it_is_open_lets_a_trial_in_at_once() -> None:
    peer = Peer()
    peer.fail(CONFIRMED)
    peer.circuits.worked("b", peer.now)
    assert peer.state == "half-open" and not peer.avoided


def test_a_restarted_peer_starts_clean() -> None:
    peer = Peer()
    peer.fail(CONFIRMED)
    assert peer.avoided and not peer.circuits.avoided("b", 2, peer.now)
    peer.circuits.failed("b", 2, peer.now)
    assert not peer.circuits.avoided("b", 2, peer.now)


def test_the_table_is_bounded() -> None:
    circuits = Circuits()
    for number in range(MAX_CIRCUITS + 10):
        circuits.failed(str(number), 1, 0.0)
    assert len(circuits) == MAX_CIRCUITS
    circuits.validate()


class Model:
    """The rules again, in the plainest words, for one peer."""

    def __init__(self) -> None:
        self.mode, self.row, self.last, self.openings = "closed", 0, -1e9, 0
        self.until, self.closed, self.answers, self.trial = 0.0, -1e9, 0, -1e9

    def pass_time(self, now: float) -> None:
        if self.mode == "open" and now >= self.until:
            self.mode, self.answers, self.trial = "half", 0, -1e9

    def failed(self, now: float) -> None:
        self.pass_time(now)
        if self.mode == "open":
            return
        self.row = self.row + 1 if now - self.last <= WINDOW_S else 1
        self.last = now
        if self.mode == "half" or self.row >= CONFIRMED:
            if self.mode == "closed" and now - self.closed > MEMORY_S:
                self.openings = 0
            self.openings += 1
            self.until = now + min(OPEN_FIRST_S * 2 ** (self.openings - 1), OPEN_MAX_S)
            self.mode, self.row, self.trial = "open", 0, -1e9

    def worked(self, now: float) -> None:
        self.pass_time(now)
        self.row, self.trial = 0, -1e9
        if self.mode == "half":
            self.answers += 1
            if self.answers >= TRIALS:
                self.mode, self.closed = "closed", now
        elif self.mode == "open":
            self.until = now

    def sent(self, now: float) -> None:
        self.pass_time(now)
        if self.mode == "half" and now - self.trial >= TRIAL_S:
            self.trial = now

    def avoided(self, now: float) -> bool:
        self.pass_time(now)
        return self.mode == "open" or (self.mode == "half" and now - self.trial < TRIAL_S)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["failed", "worked", "sent"]), st.sampled_from([0, 0.3, 1, 7, 20, 70]))))
def test_it_does_what_the_model_does(events: list[tuple[str, float]]) -> None:
    peer, model = Peer(), Model()
    for event, pause in events:
        peer.now += pause
        if event == "failed":
            peer.fail()
            model.failed(peer.now)
        elif event == "worked":
            peer.circuits.worked("b", peer.now)
            model.worked(peer.now)
        else:
            peer.circuits.sent("b", peer.now)
            model.sent(peer.now)
        assert peer.avoided == model.avoided(peer.now), event
        peer.circuits.validate()


@pytest.mark.parametrize("answers", range(TRIALS))
def test_a_failed_trial_opens_it_again_whatever_was_answered_before(answers: int) -> None:
    peer = Peer()
    peer.fail(CONFIRMED)
    peer.now += OPEN_FIRST_S
    for _ in range(answers):
        peer.try_one(works=True)
    peer.try_one(works=False)
    assert peer.state == "open"
