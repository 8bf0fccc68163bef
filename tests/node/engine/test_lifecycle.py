"""The rules of an engine's life, with an injected clock."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine import lifecycle as life
from node.engine.events import EngineState
from node.engine.failure import Cause, Failure
from node.errors import InvariantError

PERMANENT = Failure(Cause.NO_MODEL, "no such model", permanent=True)
PASSING = Failure(Cause.OUT_OF_MEMORY, "no memory")
CONFIG = life.LifecycleConfig(jitter=0.0)


class Engine:
    """A lifecycle with a clock of its own."""

    def __init__(self, config: life.LifecycleConfig = CONFIG) -> None:
        self.core = life.Lifecycle(config, random.Random(1))
        self.now = 100.0
        self.actions: list[life.Action] = []

    def feed(self, event: life.Event, after: float = 0.0) -> list[life.Action]:
        self.now += after
        self.actions = self.core.handle(event, self.now)
        self.core.validate()
        return self.actions

    def to_deadline(self) -> list[life.Action]:
        assert self.core.deadline is not None
        return self.feed(life.Tick(), self.core.deadline - self.now)

    def ready(self) -> None:
        self.feed(life.Begin())
        self.feed(life.Answered())

    @property
    def state(self) -> EngineState:
        return self.core.state


def test_a_first_start_that_fails_for_good_is_not_tried_again() -> None:
    engine = Engine()
    assert engine.feed(life.Begin())[-1] == life.Spawn()
    assert engine.feed(life.Exited(PERMANENT)) == [life.Enter(EngineState.FAILED, "no such model")]
    assert engine.core.deadline is None


def test_a_first_start_that_may_succeed_later_is_tried_three_times() -> None:
    engine = Engine()
    engine.feed(life.Begin())
    pauses = []
    for _ in range(2):
        engine.feed(life.Exited(PASSING))
        assert engine.state is EngineState.RESTARTING
        pauses.append(engine.core.deadline - engine.now)
        assert life.Spawn() in engine.to_deadline()
    engine.feed(life.Exited(PASSING))
    assert engine.state is EngineState.FAILED
    assert pauses == [1.0, 2.0]


def test_an_engine_that_computes_not_even_a_token_takes_no_requests_at_once_and_is_ended_in_time() -> None:
    engine = Engine()
    engine.ready()
    stuck = life.Silent(detail="no token within 5 s", hung=True)
    assert engine.feed(stuck, 5) == [life.Enter(EngineState.SILENT, "the engine does not answer: no token within 5 s")]
    assert engine.feed(stuck, CONFIG.hung_after_s - 1) == []
    assert engine.feed(life.Active(), 0) == [life.Enter(EngineState.READY, "")]
    engine.feed(stuck)
    assert engine.feed(stuck, CONFIG.hung_after_s) == [life.Kill()]


@pytest.mark.parametrize("failure", [PERMANENT, PASSING])
def test_an_engine_that_was_ready_once_is_never_given_up(failure: Failure) -> None:
    engine = Engine()
    engine.ready()
    pauses = []
    for _ in range(20):
        engine.feed(life.Exited(failure))
        assert engine.state is EngineState.RESTARTING
        pauses.append(engine.core.deadline - engine.now)
        engine.to_deadline()
        assert engine.state is EngineState.STARTING
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert max(pauses) == CONFIG.pause_most_s


def test_an_engine_that_ran_well_starts_again_after_the_shortest_pause() -> None:
    engine = Engine()
    engine.ready()
    for _ in range(5):
        engine.feed(life.Exited(PASSING))
        engine.to_deadline()
    engine.feed(life.Answered())
    engine.feed(life.Exited(PASSING), after=CONFIG.steady_after_s)
    assert engine.core.deadline - engine.now == CONFIG.pause_first_s


def test_pauses_are_spread() -> None:
    config = life.LifecycleConfig(jitter=0.25)
    pauses = set()
    for seed in range(50):
        core = life.Lifecycle(config, random.Random(seed))
        core.handle(life.Begin(), 0.0)
        core.handle(life.Exited(PASSING), 0.0)
        assert core.deadline is not None
        pauses.add(core.deadline)
    assert len(pauses) == 50
    assert min(pauses) >= 0.75 and max(pauses) <= 1.25


def test_one_late_answer_harms_nobody() -> None:
    engine = Engine()
    engine.ready()
    assert engine.feed(life.Silent(detail="timed out")) == []
    assert engine.feed(life.Silent(), after=CONFIG.silent_after_s - 1) == []
    assert engine.feed(life.Answered()) == []
    assert engine.feed(life.Silent(), after=CONFIG.silent_after_s) == []
    assert engine.state is EngineState.READY


def test_a_silent_engine_takes_no_requests_and_comes_back() -> None:
    engine = Engine()
    engine.ready()
    engine.feed(life.Silent())
    assert engine.feed(life.Silent(detail="late"), after=CONFIG.silent_after_s) == [
        life.Enter(EngineState.SILENT, "the engine does not answer: late")
    ]
    assert engine.feed(life.Answered()) == [life.Enter(EngineState.READY, "")]


def test_bytes_of_an_answer_count_as_life() -> None:
    engine = Engine()
    engine.ready()
    for _ in range(50):
        engine.feed(life.Silent(), after=CONFIG.silent_after_s / 2)
        engine.feed(life.Active())
    assert engine.state is EngineState.READY
    engine.feed(life.Silent())
    engine.feed(life.Silent(), after=CONFIG.silent_after_s)
    engine.feed(life.Active())
    assert engine.state is EngineState.READY


def test_a_hung_engine_is_ended_and_started_again() -> None:
    engine = Engine()
    engine.ready()
    engine.feed(life.Silent())
    engine.feed(life.Silent(), after=CONFIG.silent_after_s)
    assert engine.feed(life.Silent(), after=CONFIG.hung_after_s) == [life.Kill()]
    assert engine.feed(life.Answered()) == []  # too late: it is being ended
    assert engine.to_deadline() == [life.KillGuard()]
    engine.feed(life.Exited(PASSING))
    assert engine.state is EngineState.RESTARTING
    assert "hung" in engine.core.reason


def test_an_engine_that_never_becomes_ready_is_ended_with_that_reason() -> None:
    engine = Engine(life.LifecycleConfig(start_timeout_s=60, first_attempts=1))
    engine.feed(life.Begin())
    assert engine.to_deadline() == [life.Kill()]
    engine.feed(life.Exited(PASSING))
    assert engine.state is EngineState.FAILED
    assert "not ready after 60 s" in engine.core.reason


def test_stopping_asks_then_forces_then_kills_the_guard() -> None:
    engine = Engine()
    engine.ready()
    assert engine.feed(life.Stop()) == [life.Enter(EngineState.STOPPING, ""), life.Terminate()]
    assert engine.core.deadline is not None
    assert engine.core.deadline - engine.now == CONFIG.stop_grace_s
    assert engine.to_deadline() == [life.Kill()]
    assert engine.to_deadline() == [life.KillGuard()]
    assert engine.feed(life.Exited(PASSING)) == [life.Enter(EngineState.STOPPED, "")]


def test_stopping_an_engine_that_has_not_begun_to_serve_is_quick() -> None:
    engine = Engine()
    engine.feed(life.Begin())
    engine.feed(life.Stop())
    assert engine.core.deadline is not None
    assert engine.core.deadline - engine.now == life.STARTING_GRACE_S < CONFIG.stop_grace_s
    assert engine.to_deadline() == [life.Kill()]


@pytest.mark.parametrize("failure", [PERMANENT, PASSING])
def test_stopping_between_two_starts_is_done_at_once(failure: Failure) -> None:
    engine = Engine()
    engine.feed(life.Begin())
    engine.feed(life.Exited(failure))
    assert engine.feed(life.Stop()) == [life.Enter(EngineState.STOPPED, "")]


def test_an_attached_engine_is_neither_started_nor_ended() -> None:
    engine = Engine(life.LifecycleConfig(attached=True))
    assert engine.feed(life.Begin()) == [life.Enter(EngineState.STARTING, "")]
    assert engine.core.deadline is None
    engine.feed(life.Answered())
    engine.feed(life.Silent(refused=True, detail="connection refused"))
    assert engine.state is EngineState.SILENT
    assert engine.feed(life.Silent(refused=True), after=10_000) == []
    engine.feed(life.Answered())
    assert engine.state is EngineState.READY
    assert engine.feed(life.Stop()) == [life.Enter(EngineState.STOPPED, "")]


def test_an_end_without_a_process_is_a_bug() -> None:
    engine = Engine()
    with pytest.raises(InvariantError, match="ended while stopped"):
        engine.feed(life.Exited(PASSING))


EVENTS = st.sampled_from(
    [life.Answered(), life.Silent(), life.Silent(refused=True), life.Active(), life.Stop(), life.Tick(), "exit", "due"]
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 400)), max_size=60), st.booleans(), st.booleans())
def test_whatever_happens_there_is_at_most_one_engine_and_the_rules_hold(
    steps: list[tuple[object, float]], permanent: bool, attached: bool
) -> None:
    engine = Engine(life.LifecycleConfig(attached=attached))
    alive = 0
    stopped = False

    def done(actions: list[life.Action]) -> None:
        nonlocal alive
        for action in actions:
            if isinstance(action, life.Spawn):
                alive += 1
                assert not stopped, "nothing is started after a stop"
            if isinstance(action, life.Kill | life.Terminate | life.KillGuard):
                assert alive == 1, "only what lives is ended"
        assert alive <= 1

    done(engine.feed(life.Begin()))
    for step, after in steps:
        if step == "exit":
            if alive:
                alive -= 1
                done(engine.feed(life.Exited(PERMANENT if permanent else PASSING), after))
        elif step == "due":
            if engine.core.deadline is not None:
                done(engine.feed(life.Tick(), max(0.0, engine.core.deadline - engine.now)))
        else:
            stopped = stopped or isinstance(step, life.Stop)
            done(engine.feed(step, after))
        if attached:
            assert alive == 0
