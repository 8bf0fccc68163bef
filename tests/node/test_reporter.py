"""What a node says about its engine."""

from __future__ import annotations

from node.admission import Admission
from node.engine.events import EngineDown, EngineModel, EngineProgress, EngineReady, EngineState
from node.meter import LoadMeter
from node.reporter import Reporter
from node.room import WaitingRoom


def test_each_end_of_the_engine_is_said_once() -> None:
    said: list[str] = []
    meter, admission = LoadMeter(slots=1), Admission(1, WaitingRoom(1, lambda: 0.0))
    reporter = Reporter("a", meter=meter, admission=admission, say=said.append, clock=lambda: 0.0)
    reporter.on_engine(EngineDown(EngineState.STARTING, ""))
    reporter.on_engine(EngineProgress("starting vLLM"))
    for _ in range(2):
        reporter.on_engine(EngineDown(EngineState.RESTARTING, "no memory"))
        reporter.on_engine(EngineDown(EngineState.STARTING, "no memory"))
    reporter.on_engine(EngineReady((EngineModel("m", max_model_len=4096),), "0.32.0"))
    reporter.on_engine(EngineDown(EngineState.FAILED, "no model"))
    reporter.on_engine(EngineDown(EngineState.STOPPED, ""))
    assert said == [
        "the engine: starting vLLM",
        "the engine is restarting: no memory",
        "the engine is restarting: no memory",
        "the engine is ready and serves m (context 4096), version 0.32.0",
        "the engine has failed: no model",
    ]
