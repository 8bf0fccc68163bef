"""What a client has been shown of a streamed answer: enough to go on elsewhere, bounded, microseconds an event.

Of an answer that is gathered the client has been shown nothing; the same is noted, and the answer made of it
(`whole.py`).

Rules
1. `take` reads one event, notes it, and returns what the client may see: the same bytes, but the token ids that only
   we asked for read `null`, as the engine writes where nobody asks.
2. What an event adds is noted as streams of text by name (`text`, `reasoning`, arguments of a tool): engines cut the
   same answer into other events when they run it again, but joined they are the same.
3. `take` raises `RemoteError` when an event is garbage: the leg that sent it is lost, and nothing of it was noted.
4. What does not fit (too long, unknown fields) makes the record `blind`: the answer is passed on and cannot be carried.
   So do objects that are no piece of an answer, from an engine that has not shown the `token_ids` members that all of
   vLLM's events have: other servers may say there what they like.
5. Runs of events of the usual form (`template.py`) are noted late: `take_usual` keeps their texts and ids as they came,
   at most `MAX_LATE` bytes, and whoever asks for the record, or the next event of another form, has them read first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from typing import Any

from node.errors import RemoteError
from node.relay.carry.events import is_done, read, write
from node.relay.carry.template import Template, learnt, said, without_ids

#: Tokens and characters noted of one answer, all its choices together; and choices.
MAX_TOKENS = 1 << 19
MAX_CHARS = 1 << 22
MAX_CHOICES = 256
#: Bytes of texts and ids that are kept unread, and events whose form is looked at in the hope that it is the usual one.
MAX_LATE = 1 << 16
LESSONS = 4

#: The stream of plain text in a choice.
TEXT = "text"

_IDS = b'"token_ids":['
_NO_DELTA = b'"delta":{}'
_PROMPT_IDS = b'"prompt_token_ids":['
_HEAD = frozenset(("id", "object", "created", "model"))
_HIDDEN = ("token_ids", "prompt_token_ids")

Fields = Mapping[str, Any]


class EngineError(RemoteError):
    """The engine, or the node that ran it, ended the stream with an error event."""

    def __init__(self, message: str, code: str, event: bytes) -> None:
        super().__init__(message)
        self.code = code
        self.event = event


@dataclass(slots=True)
class Choice:
    """What was shown of one choice."""

    ids: array[int] = field(default_factory=lambda: array("I"))
    text: StringIO = field(default_factory=StringIO)
    #: Characters in `text`.
    length: int = 0
    #: Tokens after the last event that showed text, and how many tokens came in that event.
    safe: int = 0
    width: int = 0
    #: Streams beside the text, by name.
    others: dict[str, StringIO] = field(default_factory=dict)
    logprobs: int = 0
    opened: bool = False
    #: A parser in the engine has swallowed tokens: they stand for more than text.
    parsed: bool = False
    finish_reason: str | None = None
    stop_reason: object = None
    role: str | None = None

    def stream(self, name: str) -> StringIO:
        """One of its streams, begun when there is none."""
        if name == TEXT:
            return self.text
        known = self.others.get(name)
        if known is None:
            known = self.others[name] = StringIO()
        return known


class Record:
    """The answer so far. `own_ids`: the client asked for token ids itself. `choices`: as many as it asked for."""

    def __init__(self, *, own_ids: bool = False, choices: int = 1) -> None:
        self._own_ids = own_ids
        self._wanted = choices
        self._choices: dict[int, Choice] = {}
        #: What every event begins with: `id`, `object`, `created`, `model`, in the engine's order.
        self.head: dict[str, object] = {}
        self.prompt_ids: array[int] | None = None
        #: Events with choices carry a `token_ids` member, whoever asked.
        self.shows_ids = False
        self._blind = ""
        #: `[DONE]` and the event with the usage have been passed on.
        self.done = False
        self.usage = False
        #: That event's members beside the head and the choices.
        self.tail: dict[str, object] = {}
        #: Its events add text and nothing else.
        self.plain = True
        self._tokens = 0
        self._chars = 0
        self._template: Template | None = None
        self._lessons = LESSONS if choices == 1 else 0
        self._late: list[bytes] = []
        self._late_size = 0

    @property
    def choices(self) -> dict[int, Choice]:
        """What was shown of each choice, by index."""
        self._read_late()
        return self._choices

    @property
    def blind(self) -> str:
        """Why it cannot be carried, empty while it can."""
        self._read_late()
        return self._blind

    # --- the hot path

    def take_usual(self, run: bytes, told: list[bytes]) -> bytes:
        """`take` the whole events at the beginning of a run as far as they are of the usual form, all at once.

        What the client sees of them goes to `told`. Returns the rest of the run. Raises what `take` raises.
        """
        run = self._learn(run, told)
        if self._template is None or self.done or not run:
            return run
        rest = self._template.rest(run)
        if rest is not None:
            told.append(self._keep(rest, run))
            return b""
        begun = run[: self._template.beginning(run)]
        if not begun or (rest := self._template.rest(begun)) is None:
            return run
        told.append(self._keep(rest, begun))
        return run[len(begun) :]

    def _learn(self, run: bytes, told: list[bytes]) -> bytes:
        """Take events one by one until the usual form is known, or is not to be hoped for."""
        at = 0
        while self._template is None and self._lessons and not self.done and run.startswith(b"data:", at):
            end = run.index(b"\n\n", at) + 2
            event = run[at:end]
            at = end
            told.append(self.take(event))
        return run[at:] if at else run

    def _keep(self, rest: bytes, run: bytes) -> bytes:
        """Keep what is left of usual events; returns what the client sees of them."""
        if not self._blind:
            self._late.append(rest)
            self._late_size += len(rest)
            if self._late_size > MAX_LATE:
                self._read_late()
        assert self._template is not None
        return without_ids(run) if self._template.middle and not self._own_ids else run

    def _read_late(self) -> None:
        """Note what was kept unread."""
        if not self._late:
            return
        pairs = said(b"".join(self._late))
        self._late, self._late_size = [], 0
        state = self._choices[0]
        ids, text = list(chain.from_iterable([ids for _, ids in pairs])), "".join([text for text, _ in pairs])
        before = len(state.ids)
        state.ids.extend(ids)
        if text:
            state.length += len(text)
            state.text.write(text)
            behind = 0  # tokens behind the last text
            for shown, last in reversed(pairs):
                if shown:
                    state.width = len(last)
                    break
                behind += len(last)
            state.safe = before + len(ids) - behind
        self._tokens += len(ids)
        self._chars += len(text)
        self._check_size()

    def take(self, event: bytes) -> bytes:
        """Note one event; returns what the client sees of it.

        :raises EngineError: it is an error event.
        :raises RemoteError: it is garbage.
        """
        fields = read(event)
        if fields is None:
            if is_done(event):
                self.done = True
            return event
        try:
            self.note(fields, event)
        except EngineError:
            raise
        except RemoteError:
            if self.shows_ids:
                raise
            self._give_up("its events are not those of a completion")
            return event
        if self._lessons and self._template is None and len(fields["choices"]) == 1:
            self._lessons -= 1
            self._template = learnt(event, fields)
        return event if self._own_ids else self._hide(fields, event)

    def note(self, fields: Fields, event: bytes = b"") -> None:
        """Note the fields of one event. Raises as `take` does."""
        if "error" in fields and not fields.get("choices"):
            raise engine_error(fields, event)
        try:
            self._note(fields)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise RemoteError(f"an event that is no piece of an answer ({type(error).__name__})") from error

    def _note(self, fields: Fields) -> None:
        self._read_late()
        choices = fields["choices"]
        assert_list(choices)
        if not self.head:
            self.head = {key: value for key, value in fields.items() if key in _HEAD}
        if "prompt_token_ids" in fields:
            self.shows_ids = True
            if self.prompt_ids is None and (ids := fields["prompt_token_ids"]):
                self.prompt_ids = array("I", ids)
        for choice in choices:
            self._choice(choice)
        if not choices and fields.get("usage"):
            self.usage = True
            self.tail = tail_of(fields)

    def _choice(self, fields: Fields) -> None:
        index = fields["index"]
        state = self._choices.get(index)
        if state is None:
            state = self._begin(index)
        count = 0
        if "token_ids" in fields:
            self.shows_ids = True
            if (ids := fields["token_ids"]) is not None:
                assert_list(ids)
                count = len(ids)
                state.ids.extend(ids)
                self._tokens += count
        if self.prompt_ids is None and (prompt := fields.get("prompt_token_ids")):
            self.prompt_ids = array("I", prompt)
        delta = fields.get("delta")
        text = fields.get("text") if delta is None else delta.get("content")
        if text:
            state.length += len(text)
            state.text.write(text)
            state.safe, state.width = len(state.ids), count
            self._chars += len(text)
        state.opened = True
        if delta is not None and (len(delta) > 1 or "content" not in delta):
            self._others(state, delta)
        if fields.get("logprobs") is not None:
            state.logprobs += logprobs_length(fields["logprobs"])
            self.plain = False
        if (reason := fields.get("finish_reason")) is not None:
            state.finish_reason, state.stop_reason = str(reason), fields.get("stop_reason")
        self._check_size()

    def _check_size(self) -> None:
        if self._blind or self._tokens > MAX_TOKENS or self._chars > MAX_CHARS:
            self._give_up("the answer is too long to be kept")

    # --- the rest

    def _begin(self, index: object) -> Choice:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < MAX_CHOICES:
            raise ValueError("index")
        state = self._choices[index] = Choice()
        return state

    def _others(self, state: Choice, delta: Fields) -> None:
        state.parsed = state.parsed or not delta
        state.role = state.role or delta.get("role")
        for name, value in other_streams(delta):
            state.stream(name).write(value)
            self._chars += len(value)
            self.plain = False
        self.plain = self.plain and not state.parsed
        if unknown(delta):
            self._give_up("its events hold fields that are not known here")

    def _give_up(self, why: str) -> None:
        self.plain = False
        self._blind = self._blind or why
        self._tokens = self._chars = 0
        for choice in self._choices.values():
            choice.ids, choice.text, choice.others = array("I"), StringIO(), {}

    def _hide(self, fields: Fields, event: bytes) -> bytes:
        """The event without the ids that only we asked for."""
        start = event.find(_IDS)
        if start >= 0:
            if _NO_DELTA in event and _only_for_ids(fields):
                return b""
            event = _without(event, _IDS, start)
        elif b"token_ids" in event and _spelt_otherwise(fields):
            return _rewritten(fields)
        start = event.find(_PROMPT_IDS)
        if start >= 0:
            return _without(event, _PROMPT_IDS, start)
        return _rewritten(fields) if fields.get("prompt_token_ids") else event

    @property
    def begun(self) -> bool:
        """Whether the client has anything that was computed; roles do not count, nor ids that are not shown to it."""
        return any(
            choice.length or choice.others or choice.logprobs or choice.finish_reason or (self._own_ids and choice.ids)
            for choice in self.choices.values()
        )

    def forget(self) -> None:
        """Begin anew with an answer of which the client has nothing but its opening."""
        for choice in self.choices.values():
            choice.ids, choice.safe, choice.width, choice.parsed = array("I"), 0, 0, False

    @property
    def complete(self) -> bool:
        """Every choice has ended: nothing is left to be computed."""
        return len(self.choices) >= self._wanted and all(
            choice.finish_reason is not None for choice in self.choices.values()
        )

    @property
    def tokens(self) -> int:
        """Answer tokens of all choices."""
        return sum(len(choice.ids) for choice in self.choices.values())


def tail_of(fields: Fields) -> dict[str, object]:
    """What the event with the usage says beside the head and the choices."""
    return {key: value for key, value in fields.items() if key not in _HEAD and key != "choices"}


def assert_list(value: object) -> None:
    """Raise TypeError unless it is a list."""
    if not isinstance(value, list):
        raise TypeError("no list")


def logprobs_length(logprobs: object) -> int:
    """Tokens that a `logprobs` member speaks of, in a chat's form or a completion's."""
    if not isinstance(logprobs, dict):
        raise TypeError("logprobs")
    entries = logprobs.get("content", logprobs.get("tokens")) or []
    assert_list(entries)
    return len(entries)


#: Members of a delta that are text, beside `content`.
TEXTS = ("reasoning", "reasoning_content", "refusal")
_KNOWN = frozenset(("role", "content", "tool_calls", *TEXTS))


def other_streams(delta: Fields) -> Iterator[tuple[str, str]]:
    """Names and pieces of what a delta adds beside its text."""
    for name in TEXTS:
        value = delta.get(name)
        if value:
            if not isinstance(value, str):
                raise TypeError(name)
            yield name, value
    for call in delta.get("tool_calls") or ():
        index = int(call["index"])
        function = call.get("function") or {}
        for member in ("name", "arguments"):
            value = function.get(member)
            if value is not None:
                yield f"{member} {index}", value


def unknown(delta: Fields) -> bool:
    """Whether a delta holds something that `other_streams` does not know."""
    return any(name not in _KNOWN and value is not None for name, value in delta.items())


def engine_error(fields: Fields, event: bytes) -> EngineError:
    """The error that an event tells."""
    error = fields["error"]
    if not isinstance(error, dict):
        return EngineError(str(error)[:500], "", event)
    return EngineError(str(error.get("message", ""))[:500], str(error.get("code", ""))[:64], event)


def _without(event: bytes, member: bytes, start: int) -> bytes:
    """Every list of this member from `start` on replaced by null. Its quotes cannot occur within a JSON string."""
    while start >= 0:
        end = event.index(b"]", start)
        event = b"".join((event[: start + len(member) - 1], b"null", event[end + 1 :]))
        start = event.find(member, start)
    return event


def _only_for_ids(fields: Fields) -> bool:
    """An event that vLLM's parsers send only because ids were asked for."""
    for choice in fields["choices"]:
        if choice.get("delta") != {} or choice.get("finish_reason") is not None or choice.get("logprobs") is not None:
            return False
    return True


def _spelt_otherwise(fields: Fields) -> bool:
    """Whether there are ids that the bytes spell with blanks in between."""
    return any(choice.get("token_ids") for choice in fields["choices"])


def _rewritten(fields: Fields) -> bytes:
    """The event written anew, without ids."""
    shown = {key: None if key in _HIDDEN else value for key, value in fields.items()}
    shown["choices"] = [
        {key: None if key in _HIDDEN else value for key, value in choice.items()} for choice in fields["choices"]
    ]
    return write(shown)
