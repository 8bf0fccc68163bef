"""What one worker asks of the main process, and what it tells: one desk for each worker.

Rules
1. Every place, count and watch belongs to the main process. A worker names what it means by an ``id``; whatever it
   holds under one is given back with `End`, or when the worker is gone, however it ended.
2. A try is the worker's to make and ours to end: patience, deaths of peers and stalls of the engine are judged here, as
   for our own requests (`runners.py`).
3. Where a worker shows an answer in the very moment in which its try is given up here, the answer is taken from it
   again (`Fail`): never two engines for one request.
4. What makes no sense ends the worker, and nothing else: it is a process of ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from node.clients import Access, Client
from node.errors import RemoteError
from node.http.errors import ApiFailure
from node.http.openai import most_tokens
from node.http.peer import PeerRoutes
from node.http.signature import PeerCall
from node.load import LoadVector
from node.logs import set_request
from node.metrics import Metrics
from node.plan import Plan, Refusal, RouteOptions
from node.prompt import ParsedRequest
from node.registry import Registry
from node.relay.attempts import Past
from node.relay.call import Busy, Call, Failed
from node.relay.call import Opened as OpenedAttempt
from node.relay.carry.lost import CAUSES, Lost
from node.relay.carry.marks import MAX_LEG
from node.relay.handover import Handovers, Leg
from node.relay.ports import Notes, Peers, Runner
from node.relay.refused import Refused as NobodyRuns
from node.workers import down, up
from node.workers.asked import Answer, Asked, AskedAttempts, AskedCall, asked_call
from node.workers.runners import AskedDispatcher
from node.workers.told import options_of, plan_of, request_of, told_plan

#: Calls of peers that were found genuine and whose bodies are still coming, per worker; the oldest is forgotten.
MAX_SERVING = 16_384
#: Answers of a worker that may still be counted.
MAX_LATE = 16_384
#: What a worker may count by a note, with its words.
_GATHERED = ("whole", "failed", "unlike")
_REMOTE_ERRORS = ("body", "gist", "chunks")

_log = logging.getLogger("grapevine.workers")


@dataclass(frozen=True, slots=True)
class _First:
    """What is counted of an answer when its status is known."""

    call: Call
    plan: Plan
    first_byte_s: float
    told: dict[str, str]


@dataclass(frozen=True, slots=True)
class Parts:
    """What desks need of the node."""

    name: str
    dispatcher: AskedDispatcher
    guests: Runner
    peers: Peers
    routes: PeerRoutes
    access: Access
    registry: Registry
    metrics: Metrics
    notes: Notes
    handovers: Handovers
    vector: Callable[[], LoadVector]
    queued_ms: Callable[[], float]
    clock: Callable[[], float]


class Desk:
    """Speaks with one worker."""

    def __init__(self, parts: Parts, say: Callable[[Any], None]) -> None:
        self._parts = parts
        self._say = say
        self._asked: dict[int, Asked] = {}
        self._serving: OrderedDict[int, tuple[Plan, float]] = OrderedDict()
        self._inside: dict[int, Client] = {}
        #: Answers that are counted when the worker says so, by id; those that come to nothing, until they are old.
        self._late: OrderedDict[int, _First] = OrderedDict()
        self._small: set[asyncio.Task[None]] = set()
        self._moving: asyncio.Handle | None = None
        self._gone = False
        self._take: dict[type[Any], Callable[[Any], None]] = {
            up.Ask: self._ask,
            up.Serve: self._serve,
            up.Begin: self._begin,
            up.Tried: self._tried,
            up.Moved: self._moved,
            up.End: self._end,
            up.Enter: self._enter,
            up.Left: self._left,
            up.AskKnown: self._known,
            up.AskElsewhere: self._elsewhere,
            up.Settle: self._settle,
            up.Note: self._note,
            up.Refused: self._refused,
            up.Counted: self._counted,
            up.Broke: self._broke,
            up.Carried: self._carried,
        }

    def __len__(self) -> int:
        """Requests that are decided, tried or answered for this worker."""
        return len(self._asked)

    def send(self, message: Any) -> None:
        """Tell the worker something."""
        self._say(message)

    def take(self, message: Any) -> None:
        """Take what the worker says. :raises RemoteError: it makes no sense."""
        handler = self._take.get(type(message))
        if handler is None:
            raise RemoteError(f"worker: {type(message).__name__} is nothing that a worker says")
        handler(message)

    def lost(self) -> None:
        """The worker is gone: give back all that it held. Idempotent."""
        self._gone = True
        for asked in tuple(self._asked.values()):
            if asked.opened is not None:
                self._broken_off(asked)
            self._end(up.End(asked.id, False, 0, 0.0))
        for client in self._inside.values():
            client.leave(0.0)
        self._inside.clear()
        self._serving.clear()
        for task in tuple(self._small):
            task.cancel()
        if self._moving is not None:
            self._moving.cancel()

    def tell_ages(self) -> None:
        """Tell how old the rows are of those peers that run something for this worker."""
        name, registry = self._parts.name, self._parts.registry
        held = (asked.opened.plan.target for asked in self._asked.values() if asked.opened is not None)
        targets = {target for target in held if target != name}
        if targets:
            ages = tuple((target, registry.row_age_s(target)) for target in sorted(targets))
            self.send(down.Ages(self._parts.clock(), ages))

    # --- clients' requests

    def _ask(self, ask: up.Ask) -> None:
        parsed, options = request_of(ask.read), options_of(ask.options)
        asked = self._new(ask.id)
        call = AskedCall(
            ask.method,
            ask.target,
            [],
            parsed,
            ask.rid,
            options,
            ask.arrived,
            carries=ask.carries,
            client=ask.client,
            priority=ask.priority,
            asked=asked,
        )
        if ask.first and ask.key_of and not self._charged(ask, parsed):
            del self._asked[ask.id]
            return
        attempts = asked.attempts = AskedAttempts(call, ask)
        self._run(asked, self._open(asked, ask, attempts))

    def _charged(self, ask: up.Ask, parsed: ParsedRequest) -> bool:
        """Whether a client's limit leaves room for the tokens of its request; else it is told."""
        client = self._parts.access.named(ask.key_of)
        if client is None:  # its key was taken out while its body came
            return True
        denied = client.spend(most_tokens(parsed), self._parts.clock())
        if denied is not None:
            self.send(down.Deny(ask.id, denied.message, denied.after_s))
        return denied is None

    async def _open(self, asked: Asked, ask: up.Ask, attempts: AskedAttempts) -> None:
        set_request(ask.rid)
        try:
            opened, finish = await self._parts.dispatcher.open(attempts)
        except NobodyRuns as refused:
            self._asked.pop(asked.id, None)
            self._refuse(asked.id, refused.refusal, attempts)
            return
        asked.hold(opened, finish)
        call, plan, status = attempts.call, opened.plan, opened.upstream.status
        gathered = asked.tried is not None and asked.tried.gathered
        if ask.first or not call.parsed.stream:
            first = _First(call, plan, self._parts.clock() - call.arrived, dict(opened.headers))
            if ask.first and not gathered:
                self._answered(first, status)
            else:
                self._late[asked.id] = first
                while len(self._late) > MAX_LATE:
                    self._late.popitem(last=False)
        self._opened(asked, call)

    def _answered(self, first: _First, status: int) -> None:
        self._parts.notes.answered(first.call, first.plan, status, first_byte_s=first.first_byte_s, told=first.told)

    def _counted(self, told: up.Counted) -> None:
        """An answer that was gathered is whole, or another leg's answer is the one: only now that is known."""
        first = self._late.pop(told.id, None)
        if first is not None:
            self._answered(first, told.status)

    def _refuse(self, number: int, why: Refusal, attempts: AskedAttempts) -> None:
        past = attempts.past()
        self.send(down.Refuse(number, why.status, why.code, why.message, why.type, why.param, why.retry_after_s, past))

    # --- peers' requests

    def _serve(self, serve: up.Serve) -> None:
        call = PeerCall(serve.method, serve.target, serve.rid, dict(serve.ours))
        try:
            plan, signed = self._parts.routes.check(call, serve.remote)
        except ApiFailure as failure:
            error = failure.error
            self.send(down.GuestRefused(serve.id, error.status, error.code, error.message))
            return
        self._serving[serve.id] = (plan, serve.arrived)
        while len(self._serving) > MAX_SERVING:
            self._serving.popitem(last=False)
        key, tag = signed.secrets() if signed is not None else (b"", b"")
        self.send(down.Served(serve.id, told_plan(plan), key, tag))

    def _begin(self, begin: up.Begin) -> None:
        found = self._serving.pop(begin.id, None)
        if found is None:
            self.send(down.GuestRefused(begin.id, 503, "target_failed", "Its body came too late."))
            return
        plan, arrived = found
        if plan.patience_ms and self._parts.queued_ms() > plan.patience_ms:
            self.send(down.GuestBusy(begin.id, True, self._parts.vector().encode()))
            return
        asked = self._new(begin.id)
        options = RouteOptions(rid=plan.rid)
        parsed = request_of(begin.read)
        call = Call(begin.method, begin.target, [], parsed, begin.rid, options, arrived, carries=begin.carries)
        leg = (plan.entry, begin.leg[:MAX_LEG]) if begin.carries else None
        self._run(asked, self._guest(asked, asked_call(call, parsed, asked=asked), plan, leg))

    async def _guest(self, asked: Asked, call: AskedCall, plan: Plan, leg: Leg | None) -> None:
        set_request(plan.rid)
        outcome = await self._parts.guests.open(call, plan, predicted_ms=0.0)
        if isinstance(outcome, Busy):
            load = outcome.load or self._parts.vector()
            self._asked.pop(asked.id, None)
            self.send(down.GuestBusy(asked.id, outcome.longer, load.encode()))
        elif isinstance(outcome, Failed):
            self._asked.pop(asked.id, None)
            self.send(down.GuestRefused(asked.id, 503, "target_failed", outcome.why))
        else:
            asked.hold(outcome, _no_finish)
            self._opened(asked, call, leg)

    # --- both

    def _new(self, number: int) -> Asked:
        if number in self._asked:
            raise RemoteError("worker: an id was used twice")
        asked = self._asked[number] = Asked(self, number)
        return asked

    def _run(self, asked: Asked, work: Coroutine[Any, Any, None]) -> None:
        asked.task = asyncio.get_running_loop().create_task(work)
        asked.task.add_done_callback(partial(self._done, asked))

    def _done(self, asked: Asked, task: asyncio.Task[None]) -> None:
        asked.task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a worker's request failed", exc_info=error)
            self.send(down.Refuse(asked.id, 500, "internal_error", _FAILED, "server_error", None, None, _NOTHING))
        elif asked.opened is not None:
            return
        if self._asked.get(asked.id) is asked:
            del self._asked[asked.id]
        asked.over(up.End(asked.id, False, 0, 0.0))

    def _opened(self, asked: Asked, call: Call, leg: Leg | None = None) -> None:
        """An answer is open in the worker: tell what it waits for, and keep what it holds."""
        opened = asked.opened
        assert opened is not None
        if asked.waits:
            self.send(down.Opened(asked.id, tuple(opened.headers)))
        tried = asked.tried
        if tried is not None:
            asked.count(tried.events, self._parts.clock())
        if asked.ended is not None or self._gone:
            self._asked.pop(asked.id, None)
            asked.over(asked.ended or up.End(asked.id, False, 0, 0.0))
            return
        if opened.plan.target == self._parts.name and not opened.upstream.whole:
            carriage = call.parsed.carriage
            events = call.parsed.stream or (tried is not None and tried.gathered)
            movable = events and call.carries and carriage is not None and carriage.possible
            asked.stack.enter_context(self._parts.handovers.runs(_Stream(self, movable), leg))

    def move_soon(self) -> None:
        """Ask the worker to move what it can, once for all who want that now."""
        if self._moving is None:
            self._moving = asyncio.get_running_loop().call_soon(self._move_now)

    def _move_now(self) -> None:
        self._moving = None
        self.send(down.MoveAll())

    def _tried(self, tried: up.Tried) -> None:
        asked = self._asked.get(tried.id)
        if asked is not None and asked.came(tried):
            return
        if tried.fault:
            return
        # It was given up here while the worker began to show its answer.
        if asked is not None and asked.task is not None:
            asked.task.cancel()
        self.send(down.Fail(tried.id, "silent", "it answered too late"))

    def _moved(self, moved: up.Moved) -> None:
        for number, events, at, waiting_since in moved.answers:
            asked = self._asked.get(number)
            if asked is not None:
                asked.moved(events, at, waiting_since)

    def _end(self, end: up.End) -> None:
        self._serving.pop(end.id, None)
        asked = self._asked.get(end.id)
        if asked is None:
            return
        if asked.tried is None or not asked.tried.gathered:
            self._late.pop(end.id, None)
        if asked.opened is not None:
            del self._asked[end.id]
            asked.over(end)
        elif asked.begun and asked.task is not None:
            asked.ended = end  # its task is about to take the answer in, or it was a refusal
            asyncio.get_running_loop().call_soon(self._give_up, asked)
        elif asked.task is not None:
            asked.task.cancel()

    def _give_up(self, asked: Asked) -> None:
        """Its task has had the time to take an answer in; if it looks for another one, nobody wants that any more."""
        if asked.opened is None and asked.task is not None:
            asked.task.cancel()

    def _broken_off(self, asked: Asked) -> None:
        opened, attempts = asked.opened, asked.attempts
        if opened is not None and attempts is not None:
            self._parts.notes.broke(attempts.call, opened.plan, "its worker has ended")

    # --- small questions

    def _enter(self, enter: up.Enter) -> None:
        client = self._parts.access.named(enter.name)
        if client is None:
            self.send(down.Entered(enter.id, True, "", None))
            return
        denied = client.enter(enter.at)
        if denied is not None:
            self.send(down.Entered(enter.id, False, denied.message, denied.after_s))
            return
        self._inside[enter.id] = client
        self.send(down.Entered(enter.id, False, "", None))

    def _left(self, left: up.Left) -> None:
        client = self._inside.pop(left.id, None)
        if client is not None:
            client.leave(max(0.0, left.took_s))

    def _known(self, ask: up.AskKnown) -> None:
        known = self._parts.registry.known
        self.send(down.Known(ask.id, tuple(name for name in ask.names if known(name))))

    def _elsewhere(self, ask: up.AskElsewhere) -> None:
        yes = self._parts.dispatcher.elsewhere(request_of(ask.read), options_of(ask.options))
        self.send(down.Elsewhere(ask.id, yes))

    def _settle(self, settle: up.Settle) -> None:
        task = asyncio.get_running_loop().create_task(self._settled(settle))
        self._small.add(task)
        task.add_done_callback(self._small.discard)

    async def _settled(self, settle: up.Settle) -> None:
        answer = Answer(Asked(self, settle.id))
        opened = OpenedAttempt(plan_of(settle.plan), answer, b"", leg=settle.leg)
        await self._parts.peers.settled(opened)
        self.send(down.Settled(settle.id))

    # --- what is counted

    def _note(self, note: up.Note) -> None:
        metrics = self._parts.metrics
        match note.what:
            case "denied":
                self._parts.notes.denied(note.word)
            case "failed":
                self._parts.registry.failed(note.word, note.more)
            case "gathered" if note.word in _GATHERED:
                self._parts.notes.gathered(note.word)
            case "stranger":
                self._parts.access.strangers += 1
            case "served":
                metrics.served.add((note.word,))
            case "remote_error" if note.word in _REMOTE_ERRORS:
                metrics.remote_errors.labels(note.word).inc()
            case _:
                raise RemoteError(f"worker: {note.what[:20]} is nothing that is counted")

    def _refused(self, told: up.Refused) -> None:
        call = _call_named(told.rid, told.model, told.stream, told.arrived)
        self._parts.notes.answered(call, None, told.status, first_byte_s=None)

    def _broke(self, told: up.Broke) -> None:
        call = _call_named(told.rid, None, False, 0.0)
        self._parts.notes.broke(call, _NO_PLAN, told.why)

    def _carried(self, told: up.Carried) -> None:
        if told.cause not in CAUSES:
            raise RemoteError("worker: a stream was lost by something unknown")
        call = _call_named("", None, False, 0.0)
        self._parts.notes.carried(call, Lost("", told.cause, ""), told.seconds, told.failed)


class _Stream:
    """A stream of our engine that a worker relays, for whoever empties the node (`node.relay.handover.Stream`)."""

    def __init__(self, desk: Desk, movable: bool) -> None:
        self._desk = desk
        self.movable = movable

    def move(self) -> bool:
        """Ask its entry."""
        self._desk.move_soon()
        return True


_FAILED = "The node failed; its log says how."
_NO_PLAN = Plan("", "", "", "")
_NOTHING = Past((), float("inf"), False, False, False, False, 0, 0, (), 0, (), "", 0.0)


def _no_finish(whole: bool) -> None:
    return None


def _call_named(rid: str, model: str | None, stream: bool, arrived: float) -> Call:
    """As much of a call as those who count look at."""
    return Call("", "", [], ParsedRequest("", model, stream), rid, RouteOptions(rid), arrived)
