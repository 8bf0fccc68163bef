"""Answers of the engine that goes on, told as the first one told: a completion's events in, the client's events out.

Rules
1. Every event is made from the first engine's: its id, time, model and form. Choices get their own numbers back.
2. Tokens are counted here, over all engines; usage and limits follow that count.
3. A choice ends once: by its own limit, by a stop string matched here, or by what the engine says. What the engine
   still sends of it is dropped.
4. Where a client has token ids that were dropped at the seam, the same ids have to come again; others are an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from node.errors import RemoteError
from node.relay.carry.continuation import Asked, Strand, left
from node.relay.carry.events import DONE, is_done, read, write
from node.relay.carry.record import Choice, Record, assert_list, engine_error, tail_of
from node.relay.carry.stops import StopStrings

Fields = Mapping[str, Any]


class DivergedError(RemoteError):
    """The second engine says something else than the client has already seen."""


@dataclass(slots=True)
class _Line:
    """One choice that goes on."""

    index: int
    choice: Choice
    stops: StopStrings | None
    #: Tokens it may have, those of the first engine included.
    limit: int
    #: Ids that have to come again before anything new is told.
    again: deque[int] = field(default_factory=deque)


class Converter:
    """One continuation. Truncates the record to what the strands keep, and goes on noting there."""

    def __init__(
        self,
        record: Record,
        ask: Asked,
        found: Sequence[Strand],
        *,
        own_ids: bool,
        context: int,
        shows_ids: bool = True,
    ) -> None:
        self._record = record
        self._ask = ask
        self._own_ids = own_ids
        self._shows_ids = shows_ids
        self._lines = [self._line(strand, context) for strand in found]
        self._extra: dict[str, object] = {}
        #: A choice was ended here, and the engine goes on with it.
        self._own_end = False
        self.done = False

    def _line(self, strand: Strand, context: int) -> _Line:
        choice = self._record.choices.get(strand.index)
        if choice is None:
            choice = self._record.choices[strand.index] = Choice()
        again = choice.ids[strand.keep :] if self._own_ids else ()
        limit = strand.keep + left(self._record, self._ask, strand, context=context)
        choice.ids = choice.ids[: strand.keep]
        choice.safe = min(choice.safe, strand.keep)
        stops = None
        if self._ask.stops:
            before = choice.text.getvalue()
            stops = StopStrings(self._ask.stops, include=self._ask.include_stop, held=strand.held, before=before)
        return _Line(strand.index, choice, stops, limit, deque(again))

    def take(self, event: bytes) -> bytes:
        """What the client sees of an event.

        :raises EngineError: it is an error event.
        :raises DivergedError: other token ids than the client has.
        :raises RemoteError: it is garbage.
        """
        fields = read(event)
        if fields is None:
            return self._end() if is_done(event) else b""
        if "error" in fields and not fields.get("choices"):
            raise engine_error(fields, event)
        try:
            return self._convert(fields)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
            raise RemoteError(f"an event that is no piece of an answer ({type(error).__name__})") from error

    def _convert(self, fields: Fields) -> bytes:
        choices = fields["choices"]
        assert_list(choices)
        told = b"".join(self._choice(choice) for choice in choices)
        if not choices and isinstance(usage := fields.get("usage"), dict):
            self._extra = {**usage}
            self._record.tail = {**tail_of(fields), "metrics": None}  # they tell of the last engine's part alone
            return b""
        if self._own_end and self._record.complete:
            return told + self._end()  # the engine does not know that it is over
        return told

    def _choice(self, fields: Fields) -> bytes:
        line = self._lines[int(fields["index"])]
        choice = line.choice
        if choice.finish_reason is not None:
            return b""
        ids, text = fields.get("token_ids") or [], fields.get("text") or ""
        assert_list(ids)
        if not isinstance(text, str):
            raise TypeError("text")
        news = self._repeated(line, ids)
        choice.ids.extend(ids)
        reason, stop_reason = fields.get("finish_reason"), fields.get("stop_reason")
        told = reason is not None
        if reason is None and len(choice.ids) >= line.limit:
            reason, stop_reason = "length", None
        if line.stops is not None:
            may_stop = len(choice.ids) > self._ask.min_tokens
            shown = line.stops.add(text, may_stop=may_stop, last=reason is not None)
            text = shown.text
            if shown.stop is not None:
                reason, stop_reason = "stop", shown.stop
        self._own_end = self._own_end or (reason is not None and not told)
        if not text and reason is None and not news:
            return b""
        choice.text.write(text)
        choice.length += len(text)
        if text:
            choice.safe, choice.width = len(choice.ids), len(ids)
        choice.finish_reason, choice.stop_reason = (None, None) if reason is None else (str(reason), stop_reason)
        return self._event(line, text, news, reason, stop_reason)

    def _repeated(self, line: _Line, ids: Sequence[int]) -> list[int]:
        """The ids that are new to the client."""
        news = list(ids)
        while line.again and news:
            if line.again.popleft() != news.pop(0):
                raise DivergedError("the other engine chose another token than the client has")
        return news

    def _event(self, line: _Line, text: str, ids: list[int], reason: object, stop_reason: object) -> bytes:
        choice: dict[str, object] = {"index": line.index}
        if self._ask.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": reason}
        if reason is not None or not self._ask.chat:
            choice["stop_reason"] = stop_reason
        shown = ids if self._own_ids else None
        if self._ask.chat and self._shows_ids:
            choice["token_ids"] = shown
        elif self._shows_ids:
            choice |= {"prompt_token_ids": None, "token_ids": shown}
        whole = {**self._record.head, "choices": [choice]}
        if self._ask.continuous_usage:
            whole["usage"] = usage(len(self._record.prompt_ids or ()), len(line.choice.ids))
        return write(whole)

    def _end(self) -> bytes:
        """The last events, once."""
        if self.done:
            return b""
        if not self._record.complete:
            raise RemoteError("the answer ended before it was complete")
        self.done = True
        return ending(self._record, self._ask, self._extra)


def ending(record: Record, ask: Asked, extra: Fields | None = None) -> bytes:
    """The usage, where it was asked for and has not been told, and the end of the stream."""
    record.done = True
    if not ask.include_usage or record.usage:
        return DONE
    record.usage = True
    prompt = len(record.prompt_ids or ())
    told: dict[str, object] = {**(extra or {}), **usage(prompt, record.tokens)}
    details = told.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
        # What the second engine found cached of prompt and answer; of the prompt it cannot be more than all.
        told["prompt_tokens_details"] = {**details, "cached_tokens": min(cached, prompt)}
    record.tail = {**record.tail, "usage": told}
    return write({**record.head, "choices": [], "usage": told}) + DONE


def usage(prompt: int, completion: int) -> dict[str, object]:
    """The `usage` of so many tokens."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
