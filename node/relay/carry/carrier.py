"""Finding the way on for one answer whose leg was lost.

A leg is one attempt to run the request, or the rest of it. The order of the ways (docs/http.md has the table):

1. All choices have ended: nothing is left to compute, the last events are written here.
2. By tokens, where the request allows it and the engine told the ids.
3. Again from its beginning: whatever it is, when the client has nothing of the answer; else verified, where a second
   run says the same. Of an answer that is gathered no client has anything: what was gathered is thrown away.

What the request has tried (`Attempts`) stays the same object over all legs: a target that was lost is left out, and a
request that broke too many of them is given up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from node.plan import Plan, RouteOptions
from node.prompt import ParsedRequest
from node.prompt.carriage import COMPLETIONS, STREAM_FIELDS
from node.prompt.parse import load_object
from node.relay.attempts import Attempts
from node.relay.call import Call, Opened
from node.relay.carry.ahead import ALIGN_S, FINE_TOKENS, MAX_STAGES, PLACE_S, Stage, compute, until
from node.relay.carry.continuation import (
    Asked,
    CannotCarryError,
    Strand,
    asked,
    body,
    left,
    needed,
    prompt,
    strands,
)
from node.relay.carry.convert import Converter, ending
from node.relay.carry.lost import Lost
from node.relay.carry.record import Record
from node.relay.carry.replay import Replay
from node.relay.carry.tokenizer import Tokenizer
from node.relay.refused import Refused
from node.view import ClusterView

#: Seconds that a broken stream waits for a place elsewhere: longer and its client gives up first.
CARRY_WAIT_S = 30.0

_log = logging.getLogger("grapevine.carry")

Finish = Callable[[bool], None]
Open = Callable[[Attempts], Awaitable[tuple[Opened, Finish]]]


class Translator(Protocol):
    """One leg's events in, the client's events out."""

    @property
    def done(self) -> bool:
        """The client has the whole answer."""
        ...

    def take(self, event: bytes) -> bytes:
        """What the client sees of an event. Raises `RemoteError`, which loses the leg."""
        ...


@dataclass(slots=True)
class Leg:
    """An opened attempt and how its events are read."""

    opened: Opened
    finish: Finish
    translator: Translator

    def end(self, whole: bool) -> None:
        """Give back all that it holds; aborts the work unless it was whole."""
        self.opened.end(whole)
        self.finish(whole)


class Carrier:
    """Carries one request. `open_attempt` is the dispatcher's way to run an attempt; it raises what that raises."""

    def __init__(self, call: Call, attempt: Attempts, open_attempt: Open, clock: Callable[[], float]) -> None:
        carriage = call.parsed.carriage
        assert carriage is not None
        self.call = call
        self._attempt = attempt
        self._open = open_attempt
        self._clock = clock
        self.carriage = carriage
        self.record = self._fresh()
        #: Seconds that a tokenizer was waited for, all legs together.
        self.asking_s = 0.0
        #: Who has computed what is there already, because it is to go on.
        self._ahead = ""
        self._fields: Mapping[str, object] | None = None

    @property
    def chat(self) -> bool:
        """Whether it is a chat's answer, and not a completion's."""
        return self._asked().chat

    def why_not(self) -> str:
        """Why it could not be carried now, empty when it could."""
        record, carriage = self.record, self.carriage
        if record.blind:
            return record.blind
        again = "only what can go on moves" if carriage.gathers else carriage.again
        if self._whole or not record.begun or not again:
            return ""
        if carriage.tokens:
            return f"{carriage.tokens}; {again}"
        try:
            strands(record, self._asked())
        except CannotCarryError as error:
            return f"{error}; {again}"
        return ""

    def elsewhere(self, *lost: str) -> RouteOptions:
        """The routing options of this stream's next leg, as if these nodes were ``lost`` too."""
        options = self._attempt.options(self._clock())
        return replace(options, visited=(*options.visited, *lost), force_target=None, force_source=None)

    def ending(self) -> bytes:
        """The last events of an answer that has all its tokens."""
        return ending(self.record, self._asked())

    async def prepare(self, target: str) -> bool:
        """Let another node compute what is there so far; False when none could, and it had better stay.

        Takes seconds. What cannot go on by tokens has nothing that could be computed for it.
        """
        self._ahead = ""
        try:
            for _ in range(MAX_STAGES):
                if self.carriage.tokens or not self.record.tokens or self.record.complete:
                    break
                stage = await self._compute_ahead(target)
                if not stage.target:
                    return False
                self._ahead = stage.target
                if not self._waits_for(stage):
                    break
                if not await until(lambda end=stage.next_end: self._length >= end, ALIGN_S):  # type: ignore[misc]
                    break
        except (CannotCarryError, Refused) as error:
            return isinstance(error, CannotCarryError) and not self.carriage.gathers
        return True

    async def next_leg(self, lost: Lost) -> Leg | None:
        """The leg that goes on; None when nothing is left to compute.

        :raises CannotCarryError: there is no way.
        :raises Refused: there is one, and nobody takes it.
        """
        if self._whole:
            return None
        if (why := self.why_not()) and not self.carriage.gathers:
            raise CannotCarryError(why)
        attempt = self._attempt
        if lost.moved:
            attempt.leave_target(lost.target)
        else:
            # A request that breaks or hangs engines must not walk through the cluster; no node falls silent by it.
            attempt.fail(lost.target, lost.why, reached=lost.cause != "silent")
        if attempt.exhausted:
            raise CannotCarryError("as many nodes as may be tried failed with this request")
        if not self.carriage.tokens and self.record.tokens:
            try:
                return await self._by_tokens()
            except CannotCarryError as error:
                if self.carriage.again and self.record.begun and not self.carriage.gathers:
                    raise
                _log.info("an answer runs again from its beginning instead of going on by tokens: %s", error)
        return await self._again()

    @property
    def _whole(self) -> bool:
        """Whether the last events can be written here: all tokens are there, and can be counted if they must be."""
        record, ask = self.record, self._asked()
        counted = record.usage or not ask.include_usage or record.prompt_ids is not None
        return record.complete and not record.blind and counted

    # --- again

    async def _again(self) -> Leg:
        record = self.record
        if not record.begun:
            record.forget()
        opened, finish = await self._open_leg(self.call, None)
        if self.carriage.gathers:
            record = self.record = self._fresh()
        return Leg(opened, finish, Replay(record) if record.choices else record)

    def _fresh(self) -> Record:
        """The record of an answer that has not begun. What is gathered is shown to nobody: ids need not be hidden."""
        carriage, parsed = self.carriage, self.call.parsed
        return Record(own_ids=carriage.own_ids or carriage.gathers, choices=parsed.prompts * parsed.answers)

    # --- ahead of a move

    async def _compute_ahead(self, target: str) -> Stage:
        record, ask = self.record, self._asked()
        found, length = strands(record, ask), self._length

        def sent(plan: Plan, view: ClusterView) -> bytes:
            return body(record, ask, self._body(), found, context=_context(plan, view), most=1)

        outline = self._outline(ask, found)
        outline = replace(outline, parsed=replace(outline.parsed, max_tokens=1))
        stage = await compute(self._open, outline, self.elsewhere(target), sent, self._clock)
        stage.tokens = length
        return stage

    @property
    def _length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.record.prompt_ids or ()) + self.record.tokens

    def _waits_for(self, stage: Stage) -> bool:
        """Whether the end of a block is worth waiting for: much would have to be computed, and not if it were whole."""
        behind = stage.tokens % stage.block if stage.block else 0
        return min(behind, stage.tail(self._length)) > FINE_TOKENS and self._asked().choices == 1

    # --- by tokens

    async def _by_tokens(self) -> Leg:
        record, ask = self.record, self._asked()
        found = strands(record, ask)
        began = self._clock()
        tokenizer = Tokenizer(self._open, self.call, self.elsewhere(), self._clock)
        await tokenizer.settle(record, ask, found, needed(record, ask, found))
        self.asking_s += self._clock() - began
        fitted = 0

        def fit(plan: Plan, view: ClusterView) -> Call:
            nonlocal fitted
            fitted = _context(plan, view)
            sent = body(record, ask, self._body(), found, context=fitted)
            return replace(outline, parsed=replace(outline.parsed, body=sent))

        outline = self._outline(ask, found)
        opened, finish = await self._open_leg(outline, fit)
        own, shows = self.carriage.own_ids and not self.carriage.gathers, record.shows_ids
        return Leg(opened, finish, Converter(record, ask, found, own_ids=own, context=fitted, shows_ids=shows))

    def _outline(self, ask: Asked, found: list[Strand]) -> Call:
        """The call that computes the rest, as routing sees it. Its body depends on the target."""
        record, parsed = self.record, self.call.parsed
        lengths = [len(prompt(record, strand)) for strand in found]
        continued = ParsedRequest(
            path=COMPLETIONS,
            model=parsed.model,
            stream=True,
            # The client's own: its KV is known by them. The prompt is as many bytes longer as it is tokens longer, so
            # that what a chunk stands for stays the same.
            chunks=parsed.chunks,
            prompt_bytes=round(parsed.prompt_bytes * max(lengths) / max(1, len(record.prompt_ids or ()))),
            est_prompt_tokens=sum(lengths),
            exact_tokens=True,
            max_tokens=None if ask.limit is None else max(left(record, ask, strand, context=0) for strand in found),
            is_json=True,
            prompts=len(found),
            carriage=replace(self.carriage, own_ids=False, ask_ids=True, strip=False, gathers=False),
            continues=True,
        )
        return replace(self.call, target=COMPLETIONS, parsed=continued)

    # --- both

    async def _open_leg(self, call: Call, fit: Callable[[Plan, ClusterView], Call] | None) -> tuple[Opened, Finish]:
        attempt = self._attempt
        free = replace(call.options, force_target=None, force_source=None)
        attempt.fit = fit
        attempt.stood = True  # it had its turn: it goes to the head of the line
        attempt.again()
        if self._ahead:
            ahead, self._ahead = self._ahead, ""
            attempt.call = replace(call, options=replace(free, force_target=ahead, no_pull=True))
            attempt.until = self._clock() + PLACE_S
            with contextlib.suppress(Refused):
                opened, finish = await self._open(attempt)
                if opened.upstream.status == 200:
                    return opened, finish
                opened.end(False)
                finish(False)
            attempt.again()
        attempt.call = replace(call, options=free)
        attempt.until = self._clock() + CARRY_WAIT_S
        while True:
            opened, finish = await self._open(attempt)
            status = opened.upstream.status
            if status == 200:
                return opened, finish
            opened.end(False)
            finish(False)
            attempt.fail(opened.plan.target, f"it refused the rest of the answer with status {status}", reached=True)
            if attempt.exhausted:
                raise CannotCarryError("as many nodes as may be tried refused the rest of it")

    def _body(self) -> Mapping[str, object]:
        """The client's body; that of the stream, where its answer is gathered."""
        if self._fields is None:
            more = STREAM_FIELDS if self.carriage.gathers else {}
            self._fields = {**load_object(self.call.parsed.body), **more}
        return self._fields

    def _asked(self) -> Asked:
        return asked(self.call.parsed.path, self._body())


def _context(plan: Plan, view: ClusterView) -> int:
    """The longest sequence of the plan's target, 0 when it is not known."""
    candidate = view.get(plan.target)
    info = candidate.models.get(plan.model) if candidate is not None else None
    return info.max_model_len if info is not None else 0
