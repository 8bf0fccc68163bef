"""Running a request on this node's own engine: a place, the blocks that the plan promises, then the engine.

Rules:
1. Admission is decided on live state at this moment, for our own clients and for peers alike: a place or `Busy`.
2. KV blocks are pulled before the engine computes the request, within a deadline; whatever the pull does, the request
   is computed next. The engine looks up its own exact block hashes, so a pull can only save time.
3. The engine learns a request id of ours (unique per attempt, never the client's) only when our connector runs in
   it and the endpoint takes transfer parameters; a client's own parameters never reach it.
4. Place, meter and KV bookkeeping end exactly once, with the attempt.
5. Token ids are asked for here, on behalf of an entry that can carry the answer, and what such an entry gathers is made
   a stream here: this node alone knows whether its engine understands that. It is a stream for all that follows.
6. A stream that falls silent is ended when its engine is taken to hang (`node.relay.carry.silence`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple, Protocol

from node.admission import Admission, Place
from node.engine.client import EngineAddress
from node.engine.vitals import Look
from node.kv_pulling import Pulling
from node.load import LoadVector
from node.meter import LoadMeter
from node.plan import Plan
from node.prompt import splice
from node.prompt.carriage import CHAT
from node.relay.answer import first_part
from node.relay.call import Busy, Call, Failed, Opened, Outcome
from node.relay.carry.engine_watch import EngineWatch
from node.relay.carry.sentry import Sentry
from node.relay.deadlines import Deadlines
from node.relay.forward import CACHED_HEADER, PULLED_FROM_HEADER, PULLED_HEADER, SOURCE_HEADER
from node.relay.headers import REQUEST_ID, HeaderList, replaced
from node.relay.patience import patience
from node.relay.ports import unnoticed
from node.relay.session import Session
from node.relay.upstream import (
    Base,
    UpstreamAnswer,
    UpstreamBrokenError,
    UpstreamError,
    UpstreamRefusedError,
    UpstreamRequest,
    open_upstream,
)

#: Endpoints whose body takes ``kv_transfer_params``.
_KV_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: What begins an event: so many of them are taken for so many tokens.
EVENT = b"data:"
#: How vLLM words `EngineDeadError`, and how far into an answer that is looked for, bytes.
_CORE_DIED = b"EngineCore encountered an issue"
_LOOKED_AT = 4096
#: The supervisor hears of answers' bytes at most this often, in seconds.
NOTE_EVERY_S = 0.5


class Engine(Protocol):
    """What a runner needs of `node.engine.supervisor.EngineSupervisor`."""

    @property
    def ready(self) -> bool:
        """The engine takes requests."""
        ...

    @property
    def reason(self) -> str:
        """Why it does not."""
        ...

    @property
    def address(self) -> EngineAddress:
        """Where it listens."""
        ...

    @property
    def session(self) -> Session:
        """Connections to it."""
        ...

    @property
    def takes_token_ids(self) -> bool:
        """It is one that knows `return_token_ids`."""
        ...

    def known_form(self, *, chat: bool) -> bool:
        """It answers in the form that `node.relay.carry.whole` writes."""
        ...

    def look(self) -> Look | None:
        """Look at its processes; None when it has none of ours."""
        ...

    def note_stall(self, why: str) -> None:
        """Learn that one of its streams was given up for its silence."""
        ...

    def note_activity(self) -> None:
        """Tell that bytes came from it."""
        ...


class Kv(Protocol):
    """What a runner needs of `node.kv.KvSide`."""

    @property
    def connected(self) -> bool:
        """Our connector runs in the engine."""
        ...

    def begin(self, rid: str, call: Call, plan: Plan) -> None:
        """The engine is about to get this request."""
        ...

    async def begin_pull(self, rid: str, plan: Plan, call: Call) -> Pulling:
        """Begin to pull what the plan's source has; returns when the engine may be asked. Bounded time."""
        ...

    def cached(self, rid: str) -> int | None:
        """Prompt tokens that the engine found cached; None while it did not report them."""
        ...

    def end(self, rid: str, *, whole: bool) -> None:
        """The request is over."""
        ...


class LocalRunner:
    """Runs requests on the own engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        admission: Admission,
        meter: LoadMeter,
        kv: Kv,
        deadlines: Deadlines,
        vector: Callable[[], LoadVector],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._meter = meter
        self._kv = kv
        self._deadlines = deadlines
        self._vector = vector
        self._clock = clock
        self._attempts = itertools.count(1)
        self._watch = EngineWatch(engine, meter, clock)
        self._next_note = 0.0

    def sign(self) -> None:
        """Note a sign of life of the engine beside its answers."""
        self._watch.heard(self._clock())

    def heard(self, now: float) -> None:
        """Note that bytes of an answer came."""
        self._watch.heard(now)
        if now >= self._next_note:
            self._next_note = now + NOTE_EVERY_S
            self._engine.note_activity()

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Try to begin the request here."""
        if not self._engine.ready:
            return Failed(plan.target, f"its engine is not ready: {self._engine.reason}", reached=False)
        place = self._admission.enter()
        if place is None:
            return Busy(plan.target, self._vector())
        admitted()
        if self._gathers(call):
            call = replace(call, parsed=replace(call.parsed, stream=True))
        work = Work(self, place, f"{call.rid[:64]}.{next(self._attempts)}", call, plan)
        try:
            return await self._open(work, predicted_ms)
        except UpstreamError as error:
            work.end(False)
            return Failed(plan.target, str(error), reached=not isinstance(error, UpstreamRefusedError))
        except BaseException:
            work.end(False)
            raise

    async def _open(self, work: Work, predicted_ms: float) -> Opened:
        call, plan = work.call, work.plan
        meter, now = self._meter, self._clock()
        here_ms = max(0.0, meter.queued_ms(now)) + meter.prefill.ms(0, plan.prompt_tokens)  # behind all that is queued
        limit = self._deadlines.first_byte(
            call.parsed, meter.speeds(now), predicted_ms=max(predicted_ms, here_ms), prompt_tokens=plan.prompt_tokens
        )
        headers: HeaderList = []
        if plan.source is not None and plan.source != plan.target:
            work.place.rest()
            work.pulling = await self._kv.begin_pull(work.rid, plan, call)
            work.pulling.when_over(lambda _: work.place.wake())
            limit += work.pulling.hold_s
        work.begin()
        most = self._deadlines.first_byte_max_s
        async with patience(limit, most, lambda: self._meter.moves):
            upstream, first = await self._exchange(work)
        if work.pulling is not None and plan.source is not None:
            came = work.pulling.came
            headers = [(SOURCE_HEADER, plan.source), (PULLED_HEADER, str(sum(came.values())))]
            if came:
                headers.append((PULLED_FROM_HEADER, ", ".join(f"{name}={blocks}" for name, blocks in came.items())))
        cached = self._kv.cached(work.rid)
        if cached is not None:
            headers.append((CACHED_HEADER, str(cached)))
        work.answered = upstream.status < 400
        work.streaming = call.parsed.stream
        return Opened(plan, upstream, first, headers, on_piece=work.piece, on_end=work.end)

    def _gathers(self, call: Call) -> bool:
        """Whether an answer in one piece is asked of our engine as a stream: its entry puts it together."""
        carriage = call.parsed.carriage
        if not call.carries or carriage is None or not carriage.gathers:
            return False
        return self._engine.takes_token_ids and self._engine.known_form(chat=call.parsed.path.rstrip("/") == CHAT)

    async def _exchange(self, work: Work) -> tuple[UpstreamAnswer, bytes]:
        """Ask the engine; its answer and the first part of that. The caller sets the deadline."""
        call = work.call
        base = Base(self._engine.session, self._engine.address.base.rstrip("/"))
        request = engine_request(call, self._additions(work), own_key=bool(self._engine.address.api_key))
        upstream = await open_upstream(base, request, first_byte_s=inf)
        if not upstream.complete:
            work.sentry = self._watch.guard(upstream, lambda: work.streaming)
        return upstream, await engine_part(upstream, call.method, self._deadlines)

    def _additions(self, work: Work) -> Additions:
        """What we put into the body of a request."""
        parsed = work.call.parsed
        ours = parsed.is_json and self._kv.connected and parsed.path.rstrip("/").endswith(_KV_ENDPOINTS)
        hold_s = work.pulling.hold_s if work.pulling is not None else 0.0
        carriage = parsed.carriage if parsed.is_json and work.call.carries and parsed.stream else None
        ask_ids = carriage is not None and carriage.ask_ids and self._engine.takes_token_ids
        return Additions(work.rid if ours else None, hold_s, ask_ids, carriage is not None and carriage.gathers)


class Additions(NamedTuple):
    """What we put into a body: the id by which the connector knows it, how long it holds it, our wish for token ids,
    and that for a stream in place of an answer in one piece."""

    rid: str | None
    hold_s: float
    ask_ids: bool
    gather: bool


def engine_request(call: Call, additions: Additions, *, own_key: bool) -> UpstreamRequest:
    """What the engine is sent for a call. ``own_key``: the session sends the engine's own key."""
    headers = replaced(call.headers, REQUEST_ID, call.rid)
    if own_key:
        headers = replaced(headers, "Authorization", None)
    parsed = call.parsed
    body = parsed.body
    wished = additions.ask_ids or additions.gather
    if parsed.is_json and (additions.rid is not None or parsed.has_kv_params or wished):
        carriage = parsed.carriage if call.carries and (parsed.stream or additions.gather) else None
        body = splice(
            body,
            additions.rid,
            hold_s=additions.hold_s,
            has_kv_params=parsed.has_kv_params,
            ask_ids=additions.ask_ids,
            gather=additions.gather,
            strip=carriage is not None and carriage.strip,
        )
    return UpstreamRequest(call.method, call.target, headers, body)


async def engine_part(upstream: UpstreamAnswer, method: str, deadlines: Deadlines) -> bytes:
    """Wait for the first part of an engine's answer. :raises UpstreamBrokenError: it only says that the engine died."""
    first = await first_part(upstream, method=method, deadline_s=deadlines.first_byte_max_s, idle_s=deadlines.idle_s)
    if engine_died(upstream.status, first):
        upstream.close()
        raise UpstreamBrokenError("its engine died")
    return first


def engine_died(status: int, first: bytes) -> bool:
    """Whether this answer only says that vLLM's engine core is dead, as its API server does until it ends itself."""
    error = first.startswith(b'data: {"error"') or (status >= 500 and first.startswith(b'{"error"'))
    return error and _CORE_DIED in first[:_LOOKED_AT]


class Work:
    """What one attempt on the own engine holds."""

    def __init__(self, runner: LocalRunner, place: Place, rid: str, call: Call, plan: Plan) -> None:
        self.rid = rid
        self.call = call
        self.plan = plan
        self.place = place
        self._meter = runner._meter
        self._kv = runner._kv
        self._runner = runner
        self._clock = runner._clock
        self.sentry: Sentry | None = None
        self.pulling: Pulling | None = None
        self.streaming = False
        self._metered = False
        self._open = True
        #: The engine's status was no error: its times are worth learning from.
        self.answered = False

    def begin(self) -> None:
        """The engine gets the request now."""
        self._kv.begin(self.rid, self.call, self.plan)
        if self.call.parsed.est_prompt_tokens > 0:
            self._metered = True
            tokens, cached = self.plan.prompt_tokens, self.plan.matched_tokens
            self._meter.dispatched(self.rid, self._clock(), tokens, cached)

    def piece(self, data: bytes) -> None:
        """A piece of the answer came."""
        now = self._clock()
        self._runner.heard(now)
        if self._metered and self.call.parsed.stream:
            self._meter.chunk(self.rid, now, data.count(EVENT))

    def events(self, count: int, at: float) -> None:
        """So many events of the answer came, the last at that time."""
        self._runner.heard(at)
        if self._metered and self.call.parsed.stream:
            self._meter.chunk(self.rid, at, count)

    def end(self, whole: bool) -> None:
        """Give back everything, once."""
        if not self._open:
            return
        self._open = False
        if self.sentry is not None:
            # It knows us: a cycle would hold the body until the collector comes.
            sentry, self.sentry = self.sentry, None
            sentry.close()
        if self.pulling is not None:
            self.pulling.drop()
        self.place.leave()
        self._kv.end(self.rid, whole=whole and self.answered)
        if self._metered:
            ended = self._meter.finished if whole and self.answered else self._meter.failed
            ended(self.rid, self._clock())
