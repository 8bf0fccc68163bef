"""Running the same request again: what the client has is swallowed, word for word, and the rest is told.

Engines cut one answer into different events from run to run, so nothing is compared event by event: each stream of text
of a choice (`record.py`, rule 2) and its token ids are compared as far as the client has them; what goes beyond is cut
out of the event and told. Names that are drawn anew in each run (ids of tool calls) are not compared; the client keeps
the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from node.errors import RemoteError
from node.relay.carry.convert import DivergedError
from node.relay.carry.events import is_done, read, write
from node.relay.carry.record import TEXTS, Choice, Record, assert_list, engine_error, logprobs_length, unknown

Fields = Mapping[str, Any]


@dataclass(slots=True)
class _Known:
    """What the client has of one choice, and how far the second run has said it again."""

    texts: dict[str, str]
    ids: tuple[int, ...]
    logprobs: int
    opened: bool
    finish_reason: str | None
    said: dict[str, int] = field(default_factory=dict)
    said_ids: int = 0
    said_logprobs: int = 0

    @property
    def behind(self) -> bool:
        """Whether the second run has not yet said all of it."""
        texts = any(self.said.get(name, 0) < len(text) for name, text in self.texts.items())
        return texts or self.said_ids < len(self.ids)

    def piece(self, name: str, value: str) -> str:
        """The part of a piece that the client does not have. Raises `DivergedError`."""
        at = self.said.get(name, 0)
        self.said[name] = at + len(value)
        known = self.texts.get(name, "")[at : at + len(value)]
        if not value.startswith(known):
            raise DivergedError("the second run says something else than the client has")
        return value[len(known) :]

    def tokens(self, ids: list[int]) -> list[int]:
        """The ids that the client does not have. Raises `DivergedError`."""
        at = self.said_ids
        self.said_ids = at + len(ids)
        known = self.ids[at : at + len(ids)]
        if tuple(ids[: len(known)]) != known:
            raise DivergedError("the second run chose another token than the client has")
        return ids[len(known) :]


def _known(choice: Choice) -> _Known:
    texts = {name: stream.getvalue() for name, stream in choice.others.items()}
    texts["text"] = choice.text.getvalue()
    return _Known(texts, tuple(choice.ids), choice.logprobs, choice.opened, choice.finish_reason)


class Replay:
    """One second run. What it adds is noted in the record as the first run's was."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._known = {index: _known(choice) for index, choice in record.choices.items()}

    @property
    def done(self) -> bool:
        """The stream is whole."""
        return self._record.done

    def take(self, event: bytes) -> bytes:
        """What the client sees of an event.

        :raises EngineError: it is an error event.
        :raises DivergedError: it contradicts what the client has.
        :raises RemoteError: it is garbage.
        """
        fields = read(event)
        if fields is None:
            return self._whole(event) if is_done(event) else b""
        if "error" in fields and not fields.get("choices"):
            raise engine_error(fields, event)
        try:
            rest = self._rest(fields)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise RemoteError(f"an event that is no piece of an answer ({type(error).__name__})") from error
        if rest is None:
            return b""
        return self._record.take(write(rest))

    def _whole(self, event: bytes) -> bytes:
        if any(known.behind for known in self._known.values()):
            raise DivergedError("the second run ended before what the client has")
        return self._record.take(event)

    def _rest(self, fields: Fields) -> dict[str, object] | None:
        """The event without what the client has, None when nothing is left of it."""
        choices = fields["choices"]
        assert_list(choices)
        told = {**fields, **self._record.head}
        if not choices:
            return None if self._record.usage else told
        kept = [rest for choice in choices if (rest := self._choice(choice)) is not None]
        if not kept:
            return None
        return {**told, "choices": kept}

    def _choice(self, fields: Fields) -> dict[str, object] | None:
        known = self._known.get(fields["index"])
        if known is None:
            return dict(fields)
        rest = dict(fields)
        ids = fields.get("token_ids") or []
        assert_list(ids)
        news: list[object] = [known.tokens(ids)]
        if ids:
            rest["token_ids"] = news[0]
        if isinstance(delta := fields.get("delta"), dict):
            if unknown(delta):
                raise DivergedError("its events hold fields that are not known here")
            rest["delta"] = self._delta(known, delta, news)
        else:
            text = fields.get("text") or ""
            rest["text"] = known.piece("text", text)
            news.append(rest["text"])
        if (logprobs := fields.get("logprobs")) is not None:
            rest["logprobs"] = self._logprobs(known, logprobs, news)
        reason = fields.get("finish_reason")
        if reason is not None:
            if known.behind or (known.finish_reason is not None and known.finish_reason != reason):
                raise DivergedError("the second run ended otherwise than what the client has")
            news.append(known.finish_reason is None)
        return rest if any(news) or not known.opened else None

    def _delta(self, known: _Known, delta: Fields, news: list[object]) -> dict[str, object]:
        rest = {name: value for name, value in delta.items() if name != "role" or not known.opened}
        for name in ("content", *TEXTS):
            value = delta.get(name)
            if value:
                rest[name] = known.piece("text" if name == "content" else name, value)
                news.append(rest[name])
        calls = delta.get("tool_calls")
        if calls:
            rest["tool_calls"] = kept = [call for given in calls if (call := self._call(known, given)) is not None]
            news.append(kept)
            if not kept:
                del rest["tool_calls"]
        return rest

    def _call(self, known: _Known, call: Fields) -> dict[str, object] | None:
        index = int(call["index"])
        begun = f"name {index}" in known.texts
        rest = {name: value for name, value in call.items() if not begun or name not in ("id", "type")}
        function = call.get("function") or {}
        left: dict[str, object] = {}
        for member, value in function.items():
            news = value
            if member in ("name", "arguments") and value is not None:
                news = known.piece(f"{member} {index}", value)
            if news or not begun:
                left[member] = news
        if begun and not left:
            return None
        rest["function"] = left
        return rest

    def _logprobs(self, known: _Known, logprobs: Fields, news: list[object]) -> object:
        """Of each list in it, the entries that the client does not have."""
        count = logprobs_length(logprobs)
        skip = min(count, max(0, known.logprobs - known.said_logprobs))
        known.said_logprobs += count
        news.append(count > skip)
        return {name: value[skip:] if isinstance(value, list) else value for name, value in logprobs.items()}
