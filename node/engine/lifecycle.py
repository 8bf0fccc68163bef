"""When is the engine started, trusted, ended and started again? The rules, without a process or a clock.

Rules:
1. A first start that fails for a permanent cause ends in FAILED at once; for another cause after
   `first_attempts` tries. An engine that was ready once is never given up.
2. Pauses between starts double from `pause_first_s` to `pause_most_s`, spread by `jitter` so that nodes that
   went down together do not come back together. Being ready for `steady_after_s` starts the count afresh.
3. Slow is not dead. A silent engine is reported after `silent_after_s` and ended only after `hung_after_s`;
   any byte it sends (`Active`) counts as an answer. One that lets a stream fall silent and then computes not even a
   token for us is reported at once. A process that has ended is dead at once.
4. Stopping has three steps: ask, force, kill the guard. STOPPED comes when nothing is left.
5. An attached engine has no process: nothing is started or ended, and it may come back at any time.

Events go into `handle`, actions come out; `deadline` tells when the next `Tick` is due. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from node.engine.events import EngineState
from node.engine.failure import Cause, Failure, timed_out
from node.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleConfig:
    """Times of an engine's life, seconds."""

    #: A model may have to be downloaded and compiled for; too short restarts an engine that would have come.
    start_timeout_s: float = 3600.0
    #: Two or three health probes; below that a long prefill on a CPU looks like silence.
    silent_after_s: float = 20.0
    #: Well above the longest step of a busy engine; too long keeps a hung one.
    hung_after_s: float = 180.0
    pause_first_s: float = 1.0
    pause_most_s: float = 60.0
    #: Part of a pause by which it varies, 0 to 1.
    jitter: float = 0.25
    steady_after_s: float = 120.0
    #: Starts before an engine that was never ready is given up.
    first_attempts: int = 3
    stop_grace_s: float = 15.0
    #: After force was used, for the guard to report the end.
    force_timeout_s: float = 10.0
    attached: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """The node wants its engine."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine is healthy and told its models."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A probe failed. `refused`: nobody listens there. `hung`: it listens, and computed not even one token for us."""

    refused: bool = False
    detail: str = ""
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Active:
    """Bytes came from the engine."""


@dataclass(frozen=True, slots=True)
class Exited:
    """Nothing is left of the engine's processes, or it could not be started."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Stop:
    """The node wants its engine to end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has come."""


Event = Begin | Answered | Silent | Active | Exited | Stop | Tick


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the engine."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the engine to end."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the engine by force."""


@dataclass(frozen=True, slots=True)
class KillGuard:
    """The guard does not end: kill it, and sweep."""


@dataclass(frozen=True, slots=True)
class Enter:
    """The state is now this one, for this reason."""

    state: EngineState
    reason: str


Action = Spawn | Terminate | Kill | KillGuard | Enter

#: Longest grace of an engine that has not begun to serve, seconds.
STARTING_GRACE_S = 1.0
#: States in which there is an engine (or an attempt at one) that can end.
_RUNNING = (EngineState.STARTING, EngineState.READY, EngineState.SILENT)


class Lifecycle:
    """The life of one node's engine over all its restarts."""

    def __init__(self, config: LifecycleConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self.state = EngineState.STOPPED
        self.reason = ""
        self.was_ready = False
        self.attempts = 0  # starts since the engine was last steady
        self._deadline: float | None = None
        self._since = 0.0  # of the state
        self._silent_since: float | None = None
        self._verdict: Failure | None = None  # why we ended it ourselves
        self._forced = 0  # steps of force taken

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due."""
        return self._deadline

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`."""
        match event:
            case Begin():
                return self._begin(now)
            case Answered():
                return self._answered(now)
            case Silent():
                return self._silent(event, now)
            case Active():
                return self._answered(now) if self.state is EngineState.SILENT else self._alive()
            case Exited(failure):
                return self._exited(failure, now)
            case Stop():
                return self._stop(now)
            case Tick():
                return self._tick(now)

    def _begin(self, now: float) -> list[Action]:
        if self.state is not EngineState.STOPPED:
            return []
        return self._start(now, "")

    def _start(self, now: float, reason: str) -> list[Action]:
        self.attempts += 1
        self._verdict = None
        self._forced = 0
        entered = self._enter(EngineState.STARTING, reason, now)
        if self._config.attached:
            return entered
        self._deadline = now + self._config.start_timeout_s
        return [*entered, Spawn()]

    def _answered(self, now: float) -> list[Action]:
        if self._verdict is not None:
            return []  # too late: it is being ended
        self._alive()
        if self.state not in (EngineState.STARTING, EngineState.SILENT):
            return []
        self.was_ready = True
        return self._enter(EngineState.READY, "", now)

    def _alive(self) -> list[Action]:
        self._silent_since = None
        return []

    def _silent(self, event: Silent, now: float) -> list[Action]:
        if self.state not in (EngineState.READY, EngineState.SILENT):
            return []
        if self._silent_since is None:
            self._silent_since = now
        silence = now - self._silent_since
        gone = self._config.attached and event.refused
        if self.state is EngineState.READY and (gone or event.hung or silence >= self._config.silent_after_s):
            what = event.detail or f"no answer for {silence:.0f} s"
            return self._enter(EngineState.SILENT, f"the engine does not answer: {what}", now)
        if silence >= self._config.hung_after_s and not self._config.attached and self._verdict is None:
            text = f"the engine hung: it did not answer for {silence:.0f} s"
            return self._condemn(Failure(Cause.TIMEOUT, text), now)
        return []

    def _condemn(self, failure: Failure, now: float) -> list[Action]:
        self._verdict = failure
        self._forced = 1
        self._deadline = now + self._config.force_timeout_s
        return [Kill()]

    def _exited(self, failure: Failure, now: float) -> list[Action]:
        if self.state is EngineState.STOPPING:
            return self._enter(EngineState.STOPPED, "", now)
        if self.state not in _RUNNING:
            raise InvariantError(f"an engine ended while {self.state.value}", (failure.text,))
        failure = self._verdict or failure
        if self.state is EngineState.READY and now - self._since >= self._config.steady_after_s:
            self.attempts = 0
        if not self.was_ready and (failure.permanent or self.attempts >= self._config.first_attempts):
            return self._enter(EngineState.FAILED, failure.text, now)
        pause = self._pause()
        entered = self._enter(EngineState.RESTARTING, failure.text, now)
        self._deadline = now + pause
        return entered

    def _pause(self) -> float:
        config = self._config
        plain = min(config.pause_most_s, config.pause_first_s * 2.0 ** min(max(self.attempts - 1, 0), 16))
        return plain * (1 + config.jitter * self._rng.uniform(-1, 1))

    def _stop(self, now: float) -> list[Action]:
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            return []
        if self._config.attached or self.state not in _RUNNING:
            return self._enter(EngineState.STOPPED, "", now)
        was = self.state
        entered = self._enter(EngineState.STOPPING, "", now)
        self._forced = 0
        grace_s = self._config.stop_grace_s
        if was is EngineState.STARTING:  # it has no requests to finish, and while it imports it does not hear us
            grace_s = min(grace_s, STARTING_GRACE_S)
        self._deadline = now + grace_s
        return [*entered, Terminate()]

    def _tick(self, now: float) -> list[Action]:
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        if self.state is EngineState.RESTARTING:
            return self._start(now, self.reason)
        if self._forced > 0:
            self._forced += 1
            self._deadline = now + self._config.force_timeout_s
            return [KillGuard()]
        if self.state is EngineState.STARTING:
            return self._condemn(timed_out(self._config.start_timeout_s), now)
        if self.state is EngineState.STOPPING:
            self._forced = 1
            self._deadline = now + self._config.force_timeout_s
            return [Kill()]
        return []

    def _enter(self, state: EngineState, reason: str, now: float) -> list[Action]:
        self.state = state
        self.reason = reason
        self._since = now
        self._deadline = None
        if state is not EngineState.SILENT:
            self._silent_since = None
        return [Enter(state, reason)]

    def validate(self) -> None:
        """Raise `InvariantError` when a rule does not hold."""
        rules = {
            "a pause before a restart has an end": self.state is not EngineState.RESTARTING
            or self._deadline is not None,
            "stopping has an end": self.state is not EngineState.STOPPING or self._deadline is not None,
            "what is stopped waits for nothing": self.state is not EngineState.STOPPED or self._deadline is None,
            "an engine that was ready is not given up": not (self.was_ready and self.state is EngineState.FAILED),
            "silence has a beginning": self.state is not EngineState.SILENT or self._silent_since is not None,
            "force has an end": self.state not in _RUNNING or not self._forced or self._deadline is not None,
        }
        for rule, holds in rules.items():
            if not holds:
                raise InvariantError(rule, (f"state {self.state.value}", f"deadline {self._deadline}"))
