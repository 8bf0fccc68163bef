"""The supervisor with a small real server in place of vLLM, on both event loops."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from node.engine import lifecycle as life
from node.engine import probe
from node.engine import supervisor as module
from node.engine.client import open_probes
from node.engine.command import EngineCommand
from node.engine.events import EngineDown, EngineEvent, EngineModel, EngineProgress, EngineReady, EngineState
from node.engine.failure import CannotStart, Cause, Failure
from node.engine.prepare import remove_stale_socket
from node.engine.processes import sweep
from node.engine.supervisor import EngineSupervisor
from node.settings import Settings, make_settings
from tests.node.engine.gone import gone, watch
from tests.waiting import PATIENCE_S

FAKE = str(Path(__file__).with_name("fake_engine.py"))
QUICK = life.LifecycleConfig(pause_first_s=0.01, pause_most_s=0.05, first_attempts=2, stop_grace_s=0.3)


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_STARTING_S", 0.02)
    monkeypatch.setattr(module, "PROBE_READY_S", 0.02)
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", 0.3)


@dataclass
class Watched:
    """A supervisor and what it told."""

    supervisor: EngineSupervisor = field(init=False)
    events: list[EngineEvent] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.news.set()

    async def until(self, test: Callable[[EngineEvent], bool]) -> EngineEvent:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events:
                    if test(event):
                        return event
                self.news.clear()
                await self.news.wait()

    async def state(self, *states: EngineState) -> None:
        await asyncio.wait_for(self.supervisor.wait_for(*states), PATIENCE_S)

    async def do(self, what: str) -> None:
        address = self.supervisor.address
        try:
            async with open_probes(address) as session, session.post(address.url(f"/do/{what}")):
                pass
        except aiohttp.ClientError:
            pass  # it ended before it could answer


def settings(tmp_path: Path, **more: object) -> Settings:
    run_dir = tmp_path / "r"
    run_dir.mkdir(exist_ok=True)
    return make_settings(name="n", state_dir=tmp_path, run_dir=run_dir, kv_pool_gib=0, **more)


@asynccontextmanager
async def supervised(
    tmp_path: Path, *options: str, config: life.LifecycleConfig = QUICK, **more: object
) -> AsyncIterator[Watched]:
    told = settings(tmp_path, **more)

    async def prepare(say: Callable[[str], None]) -> EngineCommand:
        say("preparing")
        remove_stale_socket(told.engine_socket)
        argv = (sys.executable, FAKE, str(told.engine_socket), *options)
        return EngineCommand(argv, dict(os.environ), supervisor.address, "/models/small")

    watched = Watched()
    supervisor = EngineSupervisor(told, listener=watched.hear, prepare=prepare, config=config)
    watched.supervisor = supervisor
    await supervisor.start()
    try:
        yield watched
    finally:
        await asyncio.wait_for(supervisor.stop(), PATIENCE_S)
        assert supervisor.state is EngineState.STOPPED
        assert not told.engine_socket.exists(), "the supervisor left the engine's socket behind"
        assert sweep(f"{told.run_dir}:{told.name}") == 0, "the supervisor left processes behind"


async def test_an_engine_becomes_ready_and_tells_its_models(tmp_path: Path) -> None:
    async with supervised(tmp_path) as watched:
        ready = await watched.until(lambda event: isinstance(event, EngineReady))
        assert isinstance(ready, EngineReady)
        assert [(model.id, model.max_model_len) for model in ready.models] == [("small", 4096)]
        assert (ready.version, ready.kv_tokens) == ("0.32.0", 128 * 364)
        assert watched.supervisor.ready
        snapshot = watched.supervisor.snapshot()
        assert (snapshot["state"], snapshot["reason"], snapshot["starts"]) == ("ready", "", 1)
        assert EngineProgress("preparing") in watched.events
        assert snapshot["log"] == str(tmp_path / "nodes" / "n" / "engine.log")
        assert "Starting vLLM server on unix" in watched.supervisor.tail()


async def test_a_killed_engine_is_started_again_and_its_socket_and_leftovers_are_removed(tmp_path: Path) -> None:
    async with supervised(tmp_path, "orphan=1") as watched:
        await watched.state(EngineState.READY)
        assert watched.supervisor.pid is not None
        (engine,) = psutil.Process(watched.supervisor.pid).children()
        (orphan,) = engine.children()  # forked before the server began to listen, so it is there
        fds = watch([orphan.pid])
        await watched.do("kill")
        down = await watched.until(lambda event: isinstance(event, EngineDown) and bool(event.reason))
        assert isinstance(down, EngineDown)
        assert down.state is EngineState.RESTARTING
        assert "killed from outside" in down.reason
        await gone(fds)
        await watched.state(EngineState.READY)
        assert watched.supervisor.snapshot()["starts"] == 2


async def test_a_killed_guard_is_noticed_and_the_engine_is_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, "orphan=1") as watched:
        await watched.state(EngineState.READY)
        assert watched.supervisor.pid is not None
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.state(EngineState.RESTARTING, EngineState.STARTING)
        await watched.state(EngineState.READY)


async def test_a_first_start_that_cannot_work_fails_with_one_sentence_and_stays_quiet(tmp_path: Path) -> None:
    line = "say=api_server.py: error: unrecognized arguments: --frobnicate"
    async with supervised(tmp_path, line, "fail=2") as watched:
        await watched.state(EngineState.FAILED)
        assert watched.supervisor.reason == "vLLM does not accept its arguments: unrecognized arguments: --frobnicate"
        assert watched.supervisor.snapshot()["starts"] == 1
        assert watched.events[-1] == EngineDown(EngineState.FAILED, watched.supervisor.reason)


async def test_a_first_start_that_fails_for_an_unknown_reason_is_tried_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, "fail=1") as watched:
        await watched.state(EngineState.FAILED)
        assert watched.supervisor.snapshot()["starts"] == QUICK.first_attempts


async def test_a_start_that_does_not_come_to_a_process_has_its_reason(tmp_path: Path) -> None:
    async def prepare(say: Callable[[str], None]) -> EngineCommand:
        raise CannotStart(Failure(Cause.NO_MODEL, "no such model", permanent=True))

    supervisor = EngineSupervisor(settings(tmp_path), listener=lambda event: None, prepare=prepare, config=QUICK)
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_for(EngineState.FAILED), PATIENCE_S)
    assert supervisor.reason == "no such model"
    await supervisor.stop()


async def test_a_bug_in_the_listener_does_not_stop_the_supervision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(tmp_path) as watched:
        await watched.state(EngineState.READY)
        watched.supervisor._listener = lambda event: 1 / 0
        await watched.do("kill")
        await watched.state(EngineState.RESTARTING, EngineState.STARTING)
        await watched.state(EngineState.READY)
        assert "the listener of the engine failed" in caplog.text


async def test_a_slow_engine_is_not_killed_and_is_used_again(tmp_path: Path) -> None:
    config = life.LifecycleConfig(silent_after_s=0.3, hung_after_s=600, stop_grace_s=0.3)
    async with supervised(tmp_path, config=config) as watched:
        await watched.state(EngineState.READY)
        pid = watched.supervisor.pid
        await watched.do("hang")
        await watched.state(EngineState.SILENT)
        assert "does not answer" in watched.supervisor.reason
        await watched.do("resume")
        await watched.state(EngineState.READY)
        assert watched.supervisor.pid == pid


async def test_bytes_from_a_busy_engine_keep_it_ready(tmp_path: Path) -> None:
    config = life.LifecycleConfig(silent_after_s=0.3, hung_after_s=600, stop_grace_s=0.3)
    async with supervised(tmp_path, config=config) as watched:
        await watched.state(EngineState.READY)
        await watched.do("hang")
        await watched.state(EngineState.SILENT)
        watched.supervisor.note_activity()
        assert watched.supervisor.ready


async def test_an_engine_that_is_healthy_and_computes_nothing_is_found_out_when_a_stream_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.engine.supervisor.PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("node.engine.supervisor.PROBE_READY_S", 600.0)
    config = life.LifecycleConfig(silent_after_s=600, hung_after_s=600, stop_grace_s=0.3)
    async with supervised(tmp_path, config=config) as watched:
        await watched.state(EngineState.READY)
        await watched.do("stuck")
        watched.supervisor.note_stall("a stream fell silent")
        await watched.state(EngineState.SILENT)
        assert "no token" in watched.supervisor.reason
        await watched.do("resume")
        await watched.state(EngineState.READY)


async def test_a_stall_that_was_no_hang_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = probe.probe_token, asyncio.Event()

    async def noted(*args: Any) -> probe.Health:
        health = await asked(*args)
        answered.set()
        return health

    monkeypatch.setattr(probe, "probe_token", noted)
    async with supervised(tmp_path) as watched:
        await watched.state(EngineState.READY)
        watched.supervisor.note_stall("a stream fell silent")
        await asyncio.wait_for(answered.wait(), PATIENCE_S)
        assert watched.supervisor.ready and not watched.supervisor._suspect
        assert not [e for e in watched.events if isinstance(e, EngineDown) and e.state is EngineState.SILENT]


async def test_a_hung_engine_is_started_again(tmp_path: Path) -> None:
    config = life.LifecycleConfig(silent_after_s=0.1, hung_after_s=0.6, pause_first_s=0.01, stop_grace_s=0.3)
    async with supervised(tmp_path, config=config) as watched:
        await watched.state(EngineState.READY)
        await watched.do("hang")
        down = await watched.until(lambda event: isinstance(event, EngineDown) and "the engine hung" in event.reason)
        assert isinstance(down, EngineDown)
        assert down.state is EngineState.RESTARTING
        await watched.state(EngineState.READY)


async def test_a_stopped_process_is_ended_and_started_again(tmp_path: Path) -> None:
    config = life.LifecycleConfig(silent_after_s=0.1, hung_after_s=0.6, pause_first_s=0.01, stop_grace_s=0.3)
    async with supervised(tmp_path, config=config) as watched:
        await watched.state(EngineState.READY)
        assert watched.supervisor.pid is not None
        (engine,) = psutil.Process(watched.supervisor.pid).children()
        engine.suspend()
        await watched.until(lambda event: isinstance(event, EngineDown) and event.state is EngineState.SILENT)
        await watched.until(lambda event: isinstance(event, EngineDown) and "the engine hung" in event.reason)
        await watched.state(EngineState.READY)
        assert not engine.is_running()


async def test_an_engine_that_says_it_is_sick_takes_no_requests(tmp_path: Path) -> None:
    config = life.LifecycleConfig(silent_after_s=0.1, hung_after_s=600, stop_grace_s=0.3)
    async with supervised(tmp_path, config=config) as watched:
        await watched.state(EngineState.READY)
        await watched.do("sick")
        await watched.state(EngineState.SILENT)
        assert "status 503" in watched.supervisor.reason


async def test_an_engine_that_does_not_want_to_stop_is_forced(tmp_path: Path) -> None:
    async with supervised(tmp_path, "stubborn=1", "orphan=1") as watched:
        await watched.state(EngineState.READY)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await asyncio.wait_for(watched.supervisor.stop(), PATIENCE_S)
        assert loop.time() - begin < 5


async def test_stopping_while_the_start_is_prepared_ends_it(tmp_path: Path) -> None:
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def prepare(say: Callable[[str], None]) -> EngineCommand:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    supervisor = EngineSupervisor(settings(tmp_path), listener=lambda event: None, prepare=prepare, config=QUICK)
    await supervisor.start()
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.wait_for(supervisor.stop(), PATIENCE_S)
    assert ended.is_set()
    await supervisor.stop()


async def test_stopping_before_anything_is_prepared_prepares_nothing(tmp_path: Path) -> None:
    async def prepare(say: Callable[[str], None]) -> EngineCommand:
        raise AssertionError("this would load a model while the node wants to end")

    events: list[EngineEvent] = []
    supervisor = EngineSupervisor(settings(tmp_path), listener=events.append, prepare=prepare, config=QUICK)
    await supervisor.start()
    await asyncio.wait_for(supervisor.stop(), PATIENCE_S)
    assert [event.state for event in events if isinstance(event, EngineDown)] == [
        EngineState.STARTING,
        EngineState.STOPPING,
        EngineState.STOPPED,
    ]


async def test_a_preparation_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def prepare(say: Callable[[str], None]) -> EngineCommand:
        await asyncio.Event().wait()
        raise AssertionError

    config = life.LifecycleConfig(start_timeout_s=0.05, first_attempts=1)
    supervisor = EngineSupervisor(settings(tmp_path), listener=lambda event: None, prepare=prepare, config=config)
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_for(EngineState.FAILED), PATIENCE_S)
    assert "not ready after 0.05 s" in supervisor.reason
    await supervisor.stop()


async def test_an_answer_of_an_earlier_process_does_not_make_the_next_one_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release, asked_again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def health(*_: object) -> probe.Health:
        if asked.is_set():
            asked_again.set()
            return probe.Health(ok=False)
        asked.set()
        await release.wait()
        return probe.Health(ok=True)

    async def models(*_: object) -> tuple[EngineModel, ...]:
        return (EngineModel("small"),)

    monkeypatch.setattr(probe, "probe_health", health)
    monkeypatch.setattr(probe, "probe_models", models)
    async with supervised(tmp_path) as watched, asyncio.timeout(PATIENCE_S):
        await asked.wait()
        assert watched.supervisor.pid is not None
        os.kill(watched.supervisor.pid, signal.SIGKILL)
        await watched.until(lambda event: watched.events.count(EngineProgress("preparing")) == 2)
        release.set()
        await asked_again.wait()
        assert not any(isinstance(event, EngineReady) for event in watched.events)


async def test_a_new_adapter_is_told(tmp_path: Path) -> None:
    async with supervised(tmp_path) as watched:
        await watched.state(EngineState.READY)
        await watched.do("adapter")
        ready = await watched.until(lambda event: isinstance(event, EngineReady) and len(event.models) == 2)
        assert isinstance(ready, EngineReady)
        assert ready.models[1].parent == "small"


async def test_the_wait_for_a_server_that_is_not_there_is_not_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    watched = Watched()
    supervisor = EngineSupervisor(settings(tmp_path, engine_url=url), listener=watched.hear)
    await supervisor.start()
    told = await watched.until(lambda event: isinstance(event, EngineProgress))
    assert isinstance(told, EngineProgress)
    assert told.text.startswith(f"waiting for {url}: ")
    await supervisor.stop()


async def test_an_attached_server_may_go_and_come_back(tmp_path: Path) -> None:
    from aiohttp import web

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "other"}]})

    async def serve(port: int) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_get("/base/v1/models", models)  # and neither /health nor /version: not every server is vLLM
        runner = web.AppRunner(app)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", port))
        await web.SockSite(runner, listener).start()
        return runner, listener.getsockname()[1]

    runner, port = await serve(0)
    told = settings(tmp_path, engine_url=f"http://127.0.0.1:{port}/base/v1")
    supervisor = EngineSupervisor(told, listener=lambda event: None)
    await supervisor.start()
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.wait_for(EngineState.READY)
        assert supervisor.progress == ""
        assert [model.id for model in supervisor.models] == ["other"]
        assert supervisor.pid is None
        await runner.cleanup()
        await supervisor.wait_for(EngineState.SILENT)
        runner, _ = await serve(port)
        await supervisor.wait_for(EngineState.READY)
        await supervisor.stop()
        await runner.cleanup()
