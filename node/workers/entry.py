"""A worker as the entry of clients' requests: the main process decides and admits, exchanges and answers are ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from aiohttp import web

from node.clients import Client
from node.engine.client import EngineAddress
from node.http.errors import ApiError, ApiFailure
from node.http.intake import Held, first_headers
from node.http.openai import OpenAi
from node.load import LoadVector
from node.meta import NodeMeta
from node.models import ModelInfo
from node.peers import PeerClient
from node.plan import FORCE_SOURCE, FORCE_TARGET, Plan, Refusal, RouteOptions
from node.prompt import ParsedRequest
from node.relay.attempts import Attempts
from node.relay.call import Call, Failed
from node.relay.call import Opened as OpenedAttempt
from node.relay.carry.entry import carriable
from node.relay.carry.lost import Lost
from node.relay.deadlines import Deadlines
from node.relay.dispatch import Dispatcher
from node.relay.forward import exchange, passed_on, refusal_of
from node.relay.headers import internal
from node.relay.local import EVENT, Additions, engine_part, engine_request
from node.relay.refused import Refused as NobodyRuns
from node.relay.session import Session
from node.relay.upstream import Base, UpstreamAnswer, UpstreamError, open_upstream
from node.view import Candidate, ClusterView
from node.workers import down, up
from node.workers.asked import fault_of
from node.workers.down import TryLocal, TryPeer
from node.workers.forms import Pairs
from node.workers.link import Answering, Link, NoAnswer, Question
from node.workers.told import plan_of, read_of, told_options, told_plan

#: How far into an answer the ids are that it gives, bytes; and on which path that is of interest (`node.stored`).
_FIRST = 4096
_STORED = "/v1/responses"
#: Seconds for which it is believed that another node would go on with a stream, and between two questions whether one
#: would; streams of which it is known.
BELIEVED_S = 3.0
ASK_EVERY_S = 0.5
MAX_BELIEVED = 4096

_Try = TryLocal | TryPeer
#: A request by its id, and where it must not go.
_Question = tuple[str, tuple[str, ...]]
_SOMEBODY = Plan("", "", "", "")
_BLANK = ClusterView(())
_NOBODY = Refusal(503, "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPlan(Plan):
    """A plan, and under what the main process knows its answer; whether it is counted when this worker says so.

    Any other is counted when it is opened. One that is gathered has no status before its end, and another leg's answer
    only counts where it is the answer.
    """

    id: int
    late: bool


class Exchanges:
    """Makes the exchanges that the main process wants."""

    def __init__(
        self,
        link: Link,
        engine: EngineAddress,
        session: Session,
        client: PeerClient,
        deadlines: Deadlines,
    ) -> None:
        self._link = link
        self._base = Base(session, engine.base.rstrip("/"))
        self._own_key = bool(engine.api_key)
        self._client = client
        self._deadlines = deadlines

    async def run(
        self,
        question: Question,
        call_for: Callable[[_Try], Call],
        failed: Callable[[Failed], None] = lambda failed: None,
    ) -> Any:
        """Try what the main process says until there is an answer, or it says something else, which is returned.

        What is opened tells the main process of its end; whoever is cancelled here has to do that.
        """
        while True:
            message = await question.get()
            if isinstance(message, _Try):
                opened = await self._try(question, message, call_for(message), failed)
                if opened is not None:
                    return opened
            elif not isinstance(message, down.Opened):  # of a try that was given up
                return message

    async def _try(
        self, question: Question, message: _Try, call: Call, failed: Callable[[Failed], None]
    ) -> OpenedAttempt | None:
        plan = plan_of(message.plan)
        try:
            try:
                async with asyncio.timeout(None) as timer:
                    question.trying(message.number, timer)
                    upstream, first = await self._exchange(question, message, call, plan)
            finally:
                question.trying(message.number, None)
        except TimeoutError:
            self._link.forget_answer(question)
            return None  # the main process knows: it has said so
        except UpstreamError as error:
            self._link.forget_answer(question)
            reached = fault_of(error) != "refused"
            failed(Failed(plan.target, str(error), reached=reached))
            self._failed(question, message, error)
            return None
        ours = internal(upstream.headers) if isinstance(message, TryPeer) else {}
        refusal = refusal_of(plan.target, upstream.status, ours) if ours else None
        answer = question.answer
        assert answer is not None
        self._began(question, message, call, upstream, first=first, ours=tuple(ours.items()))
        if refusal is not None:
            self._link.forget_answer(question)
            upstream.close()
            if isinstance(refusal, Failed):
                failed(refusal)
            return None
        gathered = not call.parsed.stream and carriable(call, upstream)
        plan = EntryPlan(*message.plan, id=question.id, late=gathered or not question.first)
        headers = passed_on(ours)
        if message.wait:
            try:
                reply = await question.get()
            except BaseException:
                upstream.close()
                raise
            if not isinstance(reply, down.Opened):
                question.back(reply)
                self._link.forget_answer(question)
                upstream.close()
                return None
            headers = list(reply.headers)
        leg = message.leg if isinstance(message, TryPeer) else ""
        return OpenedAttempt(plan, upstream, first, headers, leg=leg, on_piece=answer.piece, on_end=answer.end)

    async def _exchange(
        self, question: Question, message: _Try, call: Call, plan: Plan
    ) -> tuple[UpstreamAnswer, bytes]:
        stream = call.parsed.stream
        if isinstance(message, TryPeer):
            peer = NodeMeta(message.http, tls=message.tls, boot=message.boot)
            upstream, first = await exchange(self._client, self._deadlines, call, plan, peer=peer, leg=message.leg)
            self._link.relays(question, Answering(self._link, question, upstream, stream=stream))
            return upstream, first
        additions = Additions(message.insert, message.hold_s, message.ask_ids, message.gather)
        request = engine_request(call, additions, own_key=self._own_key)
        upstream = await open_upstream(self._base, request, first_byte_s=inf)
        stream = stream or message.gather
        self._link.relays(question, Answering(self._link, question, upstream, stream=stream))
        try:
            return upstream, await engine_part(upstream, call.method, self._deadlines)
        except BaseException:
            upstream.close()
            raise

    def _failed(self, question: Question, message: _Try, error: UpstreamError) -> None:
        told = up.Tried(question.id, message.number, fault_of(error), str(error)[:2000], 0, False, False, 0, b"", ())
        self._link.send(told)

    def _began(
        self,
        question: Question,
        message: _Try,
        call: Call,
        upstream: UpstreamAnswer,
        *,
        first: bytes,
        ours: Pairs,
    ) -> None:
        parsed = call.parsed
        gathered = not parsed.stream and carriable(call, upstream)
        events = first.count(EVENT) if parsed.stream or gathered else 0
        shown = first[:_FIRST] if parsed.path.startswith(_STORED) else b""
        status, whole = upstream.status, upstream.whole
        told = up.Tried(question.id, message.number, "", "", status, whole, gathered, events, shown, ours)
        self._link.send(told)


class EntryDispatcher(Dispatcher):
    """Relays and carries as the node's own does; every decision is asked for."""

    def __init__(self, name: str, *, link: Link, exchanges: Exchanges, keyed: Callable[[], bool], **parts: Any) -> None:
        super().__init__(name, **parts)
        self._link = link
        self._exchanges = exchanges
        self._keyed = keyed
        self._believed: dict[_Question, tuple[bool, float]] = {}
        self._asking: dict[_Question, asyncio.Task[None]] = {}

    async def _open(self, attempt: Attempts) -> tuple[OpenedAttempt, Callable[[bool], None]]:
        return await self._ask(attempt, first=True)

    async def _open_leg(self, attempt: Attempts) -> tuple[OpenedAttempt, Callable[[bool], None]]:
        return await self._ask(attempt, first=False)

    async def _ask(self, attempt: Attempts, *, first: bool) -> tuple[OpenedAttempt, Callable[[bool], None]]:
        call, question = attempt.call, self._link.question()
        question.first = first
        self._link.send(
            up.Ask(
                question.id,
                first,
                # What is asked for anew was charged before.
                call.client if first and self._keyed() and not attempt.stood else "",
                call.client,
                call.method,
                call.target,
                call.rid,
                call.priority,
                call.arrived,
                call.carries,
                attempt.mark(),
                attempt.fit is not None,
                read_of(call.parsed),
                told_options(call.options),
                attempt.past(),
            )
        )

        def call_for(message: _Try) -> Call:
            return call if attempt.fit is None else attempt.fit(*_target_of(message))

        def failed(what: Failed) -> None:
            attempt.fail(what.target, what.why, reached=what.reached)

        try:
            outcome = await self._exchanges.run(question, call_for, failed)
        except BaseException:
            self._link.over(question)
            raise
        if isinstance(outcome, OpenedAttempt):
            return outcome, _done
        self._link.forget(question)
        if isinstance(outcome, down.Refuse):
            attempt.adopt(outcome.past)
            raise NobodyRuns(
                Refusal(
                    outcome.status, outcome.code, outcome.message, outcome.type, outcome.param, outcome.retry_after_s
                )
            )
        assert isinstance(outcome, down.Deny)
        raise denied(outcome.message, outcome.after_s)

    def move_all(self) -> None:
        """Ask every stream of our engine to go on elsewhere; those of which it is not known whether they may, soon."""
        self._handovers.move_all()

    def _would_go(self, view: ClusterView, parsed: ParsedRequest, options: RouteOptions) -> Plan | Refusal:
        """Whether another node would be asked to go on with a stream: as the main process said a moment ago.

        While that is not known it stays; whoever wants it moved asks again.
        """
        key, now = (options.rid, options.visited), time.monotonic()
        yes, at = self._believed.get(key, (False, -inf))
        if now - at >= ASK_EVERY_S and key not in self._asking and len(self._asking) < MAX_BELIEVED:
            task = asyncio.get_running_loop().create_task(self._learn_elsewhere(parsed, options))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return _SOMEBODY if yes and now - at < BELIEVED_S else _NOBODY

    async def _learn_elsewhere(self, parsed: ParsedRequest, options: RouteOptions) -> None:
        key, read, told_as = (options.rid, options.visited), read_of(parsed), told_options(options)
        try:
            told = await self._link.ask(lambda number: up.AskElsewhere(number, read, told_as))
        except NoAnswer:
            return
        known = self._believed.pop(key, (False, -inf))
        self._believed[key] = (told.yes, time.monotonic())
        while len(self._believed) > MAX_BELIEVED:
            del self._believed[next(iter(self._believed))]
        if told.yes and not known[0]:
            self._carried.move(*key)  # it was asked to, and did not know that it may


class EntryApi(OpenAi):
    """The OpenAI routes of a worker. Limits of clients are kept by the main process."""

    def __init__(self, *args: Any, link: Link, names: Names, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._link = link
        self._names = names

    def authorize(self, request: web.BaseRequest) -> Client | None:
        """Return the client whose API key it is; who has none is counted."""
        try:
            return super().authorize(request)
        except ApiFailure:
            self._link.send(up.Note("stranger", ""))
            raise

    async def take(
        self, request: web.BaseRequest, path: str, arrived: float, held: Held, client: Client | None
    ) -> Call:
        """Read a client's request whole; names of nodes in it are asked for."""
        given = first_headers(request)
        if named := [given[name].strip() for name in (FORCE_TARGET, FORCE_SOURCE) if name in given]:
            await self._names.learn(named)
        return await super().take(request, path, arrived, held, client)

    async def _as_client(
        self, request: web.BaseRequest, path: str, arrived: float, client: Client
    ) -> web.StreamResponse:
        name = client.name
        entered = await self._link.ask(lambda number: up.Enter(number, name, arrived))
        if entered.gone:
            raise ApiFailure(ApiError(401, "invalid_api_key", "Incorrect API key provided."))
        if entered.message:
            raise denied(entered.message, entered.after_s)
        try:
            return await self._serve(request, path, arrived, client)
        finally:
            self._link.send(up.Left(entered.id, self._clock() - arrived))

    def _spend(self, client: Client, parsed: ParsedRequest) -> None:
        """Charged where it is decided (`node.workers.desk`)."""


class Names:
    """Which names are nodes: what was asked for just now (`node.registry.Registry.known` of the main process)."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: set[str] = set()

    async def learn(self, names: list[str]) -> None:
        """Ask for these."""
        told = await self._link.ask(lambda number: up.AskKnown(number, tuple(name[:128] for name in names[:2])))
        if len(self._known) > MAX_BELIEVED:
            self._known.clear()
        self._known.difference_update(names)
        self._known.update(told.names)

    def known(self, name: str) -> bool:
        """Whether it is one."""
        return name in self._known


class Sights:
    """`node.relay.ports.Sights`: who decides, and so asks for more, is the main process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ages: dict[str, float] = {}

    def heard(self, at: float, ages: tuple[tuple[str, float], ...]) -> None:
        """The main process tells how old rows are."""
        self._ages = {name: at - age for name, age in ages}

    def row_age_s(self, target: str) -> float:
        """Seconds since a target's newest load row was true, as far as it was told; infinite for a stranger."""
        return time.monotonic() - self._ages.get(target, -inf)

    def failed(self, target: str, why: str) -> None:
        """Tell that a target could not go on."""
        self._link.send(up.Note("failed", target, why[:2000]))

    def view(self, parsed: ParsedRequest) -> ClusterView:
        """Nothing is seen of it here: who decides sees it."""
        return _BLANK


class Settling:
    """`node.relay.ports.Settling`: attempts are opened by the main process."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def settled(self, opened: OpenedAttempt) -> None:
        """Wait, bounded, until the peer has ended an attempt that was closed here."""
        plan, leg = told_plan(opened.plan), opened.leg
        try:
            await self._link.ask(lambda number: up.Settle(number, plan, leg))
        except NoAnswer:
            return


class Notes:
    """Tells the main process what happened; what it sees itself it counts itself."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def answered(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A request was refused; that it was answered is known where it was opened."""
        if plan is None:
            parsed = call.parsed
            self._link.send(up.Refused(call.rid, parsed.model, parsed.stream, call.arrived, status))
        elif isinstance(plan, EntryPlan) and plan.late:
            self._link.send(up.Counted(plan.id, status))

    def denied(self, why: str) -> None:
        """A request was refused for want of time."""
        self._link.send(up.Note("denied", why))

    def carried(self, call: Call, lost: Lost, seconds: float, failed: str) -> None:
        """A stream goes on, or failed to."""
        self._link.send(up.Carried(lost.cause, seconds, failed[:2000]))

    def gathered(self, result: str) -> None:
        """An answer that was to be gathered is over."""
        self._link.send(up.Note("gathered", result))

    def broke(self, call: Call, plan: Plan, why: str) -> None:
        """A stream broke."""
        self._link.send(up.Broke(call.rid, why[:2000]))

    def decided(self, call: Call, plan: Plan | Refusal, seconds: float) -> None:
        """Known already."""

    def retried(self, why: str) -> None:
        """Known already."""

    def waited(self, call: Call, seconds: float) -> None:
        """Known already."""


def denied(message: str, after_s: int | None) -> ApiFailure:
    """The answer to a client that has reached a limit, or asks for more than it could ever have."""
    if after_s is None:
        return ApiFailure(ApiError(400, "client_limit_exceeded", message))
    return ApiFailure(ApiError(429, "client_limit_reached", message, retry_after_s=after_s))


def _target_of(message: _Try) -> tuple[Plan, ClusterView]:
    """A plan, and a view of nothing but what its target's model can."""
    plan = plan_of(message.plan)
    model = ModelInfo(plan.model, max_model_len=message.context, block_size=message.block)
    return plan, ClusterView((Candidate(plan.target, LoadVector(), models={plan.model: model}),))


def _done(whole: bool) -> None:
    """What was sent is counted where it was decided."""
