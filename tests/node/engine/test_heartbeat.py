"""When a busy engine counts as stuck."""

from node.engine.heartbeat import Heartbeat


class Engine:
    busy = False

    def at_work(self) -> bool:
        return self.busy


def test_an_idle_engine_is_never_stuck() -> None:
    heart = Heartbeat(Engine().at_work, 10)
    assert [heart.stuck_s(now) for now in (0.0, 1000.0)] == [None, None]


def test_a_busy_engine_without_a_sign_is_stuck_after_the_limit() -> None:
    engine = Engine()
    heart = Heartbeat(engine.at_work, 10)
    engine.busy = True
    assert heart.stuck_s(100.0) is None
    assert heart.stuck_s(109.9) is None
    assert heart.stuck_s(110.0) == 10.0
    heart.beat(111.0)
    assert heart.stuck_s(112.0) is None


def test_the_time_begins_with_the_work_and_not_with_the_last_sign() -> None:
    engine = Engine()
    heart = Heartbeat(engine.at_work, 10)
    heart.beat(0.0)
    assert heart.stuck_s(50.0) is None  # idle
    engine.busy = True
    assert heart.stuck_s(100.0) is None
    assert heart.stuck_s(105.0) is None
