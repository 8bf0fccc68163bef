"""Keeps one engine running: the processes, probes and timers around the rules of `node.engine.lifecycle`.

Everything happens in the event loop that called `start`. One task asks the engine how it is as long as the
supervisor lives (`_probe`), one goes with each process (`_run`). Every event goes through `_feed`, that hands it
to the rules and does what they say; nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp

from node.engine import guard, probe, vitals
from node.engine import lifecycle as life
from node.engine.client import EngineAddress, engine_address, open_probes, open_session
from node.engine.command import EngineCommand
from node.engine.events import EngineDown, EngineEvent, EngineModel, EngineProgress, EngineReady, EngineState
from node.engine.failure import CannotStart, Cause, Failure, explain, failure_of
from node.engine.form import known_form
from node.engine.log import EngineLog
from node.engine.prepare import prepare_engine, remove_stale_socket
from node.engine.processes import EngineProcess, oom_kills, spawn, sweep
from node.engine.progress import describe
from node.errors import EngineError
from node.relay.session import Session
from node.settings import Settings

#: Seconds between two probes while the engine starts and while it runs.
PROBE_STARTING_S = 0.5
PROBE_READY_S = 2.0
#: Deadline of one probe, seconds: a busy engine answers late.
PROBE_TIMEOUT_S = 5.0
#: Most seconds that an engine gets to end by itself: its requests have been finished or moved before.
ENGINE_GRACE_S = 10.0
#: The models are asked for again at each of this many probes: adapters come and go.
MODELS_EVERY = 5

#: Makes the command of the next start; is given a function that shows progress. May raise `LocalError`.
Prepare = Callable[[Callable[[str], None]], Awaitable[EngineCommand]]

_log = logging.getLogger(__name__)


def lifecycle_config(settings: Settings) -> life.LifecycleConfig:
    """The times of an engine's life that these settings ask for."""
    return life.LifecycleConfig(
        start_timeout_s=settings.engine_start_timeout_s,
        stop_grace_s=min(settings.stop_grace_s, ENGINE_GRACE_S),
        attached=bool(settings.engine_url),
    )


class EngineSupervisor:
    """One node's engine. Give `prepare` to start something else than vLLM (tests do)."""

    def __init__(
        self,
        settings: Settings,
        *,
        listener: Callable[[EngineEvent], None],
        prepare: Prepare | None = None,
        config: life.LifecycleConfig | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.address: EngineAddress = engine_address(settings)
        self.models: tuple[EngineModel, ...] = ()
        self.version = ""
        self.kv_tokens = 0
        self.progress = ""
        self.log = EngineLog(settings.engine_log)
        self._settings = settings
        self._listener = listener
        self._prepare = prepare or (lambda say: prepare_engine(settings, say))
        self._core = life.Lifecycle(config or lifecycle_config(settings), rng or random.Random())
        self._marker = f"{settings.run_dir}:{settings.name}"
        self._session: Session | None = None
        self._probes: aiohttp.ClientSession | None = None
        self._process: EngineProcess | None = None
        self._preparing: asyncio.Future[EngineCommand] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        #: A stream of it fell silent: health alone no longer proves that it works, only a token does.
        self._suspect = False
        self._hurry = asyncio.Event()
        self._starts = 0
        self._abandoned = asyncio.Event()

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._core.state

    @property
    def reason(self) -> str:
        """Why it is down, in one sentence; empty when it is not."""
        return self._core.reason

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to it."""
        return self._core.state is EngineState.READY

    @property
    def pid(self) -> int | None:
        """Process id of the engine's guard, None without a process."""
        return self._process.pid if self._process else None

    @property
    def session(self) -> Session:
        """The session to the engine, from `start` to `stop`."""
        if self._session is None:
            raise EngineError("the engine has no session before start and after stop")
        return self._session

    async def start(self) -> None:
        """Begin; returns at once, the engine comes up in the background. Never raises for a fault of the engine."""
        if self._session is not None:
            return
        self._session, self._probes = open_session(self.address), open_probes(self.address)
        self.log.open()
        self._feed(life.Begin())
        self._keep(self._probe())

    async def stop(self) -> None:
        """End the engine within the grace of the settings, and everything of this object. Idempotent."""
        if self._session is None:
            return
        self._feed(life.Stop())
        await self.wait_for(EngineState.STOPPED)
        session, self._session = self._session, None
        probes, self._probes = self._probes, None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.log.close()
        await session.close()
        if probes is not None:
            await probes.close()

    async def wait_for(self, *states: EngineState) -> EngineState:
        """Until the engine is in one of `states`; the caller sets the deadline."""
        while self.state not in states:
            self._changed.clear()
            await self._changed.wait()
        return self.state

    def note_activity(self) -> None:
        """Tell that bytes came from the engine: a busy engine is not a dead one."""
        self._suspect = False
        self._feed(life.Active())

    @property
    def takes_token_ids(self) -> bool:
        """It is vLLM, or told its version as vLLM does: it gives the ids of its tokens when asked."""
        ours = not (self._settings.engine_url or self._settings.engine_command)
        return ours or bool(self.version)

    def known_form(self, *, chat: bool) -> bool:
        """Its answers in one piece have the form that this node can write itself (`node.engine.form`)."""
        attached = bool(self._settings.engine_url or self._settings.engine_command)
        return known_form(self.version, None if attached else self._settings.engine_args, chat=chat)

    def look(self) -> vitals.Look | None:
        """Look at its processes; None without a process of ours."""
        if self._process is None:
            return None
        return vitals.look(guard.descendants(self._process.pid), time.monotonic())

    def note_stall(self, why: str) -> None:
        """Tell that a stream was given up because the engine said nothing: it has to show at once that it can."""
        if self.ready and not self._suspect:
            _log.warning("the engine is suspected to hang: %s", why)
        self._suspect = True
        self._hurry.set()

    def tail(self) -> list[str]:
        """The last lines of the engine's log, oldest first."""
        return self.log.tail()

    def snapshot(self) -> dict[str, object]:
        """The state as plain JSON values."""
        return {
            "state": self.state.value,
            "reason": self.reason,
            "progress": self.progress,
            "starts": self._starts,
            "pid": self.pid,
            "address": str(self.address),
            "version": self.version,
            "models": [model.id for model in self.models],
            "log": None if self._settings.engine_url else str(self.log.path),
        }

    def _feed(self, event: life.Event) -> None:
        loop = asyncio.get_running_loop()
        for action in self._core.handle(event, loop.time()):
            self._do(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._core.deadline is not None:
            self._timer = loop.call_at(self._core.deadline, self._feed, life.Tick())

    def _do(self, action: life.Action) -> None:
        match action:
            case life.Spawn():
                self._keep(self._run())
            case life.Enter(state, reason):
                self._entered(state, reason)
            case life.Terminate():
                self._terminate()
            case life.Kill():
                if self._process:
                    self._process.kill()
                self._abandon()
            case life.KillGuard():
                if self._process:
                    self._process.kill_guard()

    def _terminate(self) -> None:
        if self._process:
            self._process.terminate()
        self._abandon()

    def _abandon(self) -> None:
        """Give up a start that has not come to a process yet."""
        self._abandoned.set()
        if self._preparing:
            self._preparing.cancel()

    def _entered(self, state: EngineState, reason: str) -> None:
        self._changed.set()
        if state is EngineState.READY:
            self._say("")
            if self._process:
                self._keep(asyncio.to_thread(self._process.record))  # it reads long files, and others are being served
            self._tell(EngineReady(self.models, self.version, self.kv_tokens))
        else:
            self._tell(EngineDown(state, reason))

    def _say(self, text: str) -> None:
        if text != self.progress:
            self.progress = text
            if text:
                self._tell(EngineProgress(text))

    def _tell(self, event: EngineEvent) -> None:
        try:
            self._listener(event)
        except Exception:
            _log.exception("the listener of the engine failed on %r", event)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        """One start of the engine, until nothing of it is left."""
        self._starts += 1
        self._suspect = False
        self._abandoned.clear()
        try:
            failure = await self._one_run()
        except Exception as error:
            failure = failure_of(error)
        self._process = None
        self._say("")
        self._remove_socket()
        self._feed(life.Exited(failure))

    async def _one_run(self) -> Failure:
        await asyncio.to_thread(sweep, self._marker)
        command = await self._prepared()
        if command is None:
            return Failure(Cause.KILLED, "the start was given up")
        killed_before = oom_kills()
        self.log.begin(" ".join(command.argv))
        process = await spawn(command.argv, command.env, self._marker, nice=command.nice)
        self._process = process
        pump = asyncio.ensure_future(process.pump(self._line))
        try:
            status = await process.wait()
        finally:
            await pump
        return explain(self.log.tail(), status, model=command.model, oom_kills=oom_kills() - killed_before)

    def _remove_socket(self) -> None:
        """vLLM leaves the file of its socket behind."""
        if self.address.socket is not None:
            with contextlib.suppress(OSError, CannotStart):
                remove_stale_socket(self.address.socket)

    async def _prepared(self) -> EngineCommand | None:
        """The command of this start; None when the start was given up meanwhile."""
        if self._abandoned.is_set():
            return None
        self._preparing = asyncio.ensure_future(self._prepare(self._say))
        try:
            command = await self._preparing
        except asyncio.CancelledError:
            if self._abandoned.is_set():
                return None
            raise
        finally:
            self._preparing = None
        return None if self._abandoned.is_set() else command

    def _line(self, line: str) -> None:
        self.log.add(line)
        if self.state is EngineState.STARTING:
            step = describe(line)
            if step:
                self._say(step)

    async def _probe(self) -> None:
        turn = 0
        while True:
            if self._process or self._settings.engine_url:
                try:
                    await self._probe_once(ask_models=not self.ready or turn % MODELS_EVERY == 0)
                except Exception:
                    _log.exception("a probe of the engine failed")
                turn += 1
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_READY_S if self.ready else PROBE_STARTING_S):
                    await self._hurry.wait()

    async def _probe_once(self, *, ask_models: bool) -> None:
        start, session = self._starts, self._probes
        if session is None:
            return  # stopped
        health = await probe.probe_health(session, self.address, PROBE_TIMEOUT_S)
        models, version, kv_tokens = self.models, self.version, self.kv_tokens
        if health.ok and ask_models:
            try:
                models = await probe.probe_models(session, self.address, PROBE_TIMEOUT_S)
                version = await probe.probe_version(session, self.address, PROBE_TIMEOUT_S)
                if not self.ready or not kv_tokens:
                    kv_tokens = await probe.probe_kv_tokens(session, self.address, PROBE_TIMEOUT_S)
            except EngineError as error:
                health = probe.Health(ok=False, detail=str(error))
        hung = False
        if health.ok and self._suspect and models:
            health = await probe.probe_token(session, self.address, models[0].id, PROBE_TIMEOUT_S)
            # Bytes that came meanwhile have cleared it: it works, and was only too busy for our token.
            hung = self._suspect = self._suspect and not health.ok
            health = health if hung else probe.Health(ok=True)
        if start != self._starts or self.state is EngineState.STOPPED:
            return  # the answer of an earlier process
        if not health.ok:
            if self._settings.engine_url and self.state is EngineState.STARTING:
                self._say(f"waiting for {self.address}: {health.detail}")
            self._feed(life.Silent(health.refused, health.detail, hung=hung))
            return
        told = models, version, kv_tokens
        changed = told != (self.models, self.version, self.kv_tokens)
        was_ready = self.ready
        self.models, self.version, self.kv_tokens = told
        self._feed(life.Answered())
        if was_ready and changed:
            self._tell(EngineReady(*told))
