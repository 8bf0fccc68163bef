"""Going on by tokens: the body that asks another engine for the rest of an answer, and what has to be known for it.

Rules
1. A choice goes on behind the last token whose text was shown whole. Tokens behind it (half a character, a token that
   shows nothing) are dropped and computed again: the client has seen nothing of them.
2. Where stop strings hold text back, the text lags the tokens: all tokens are kept, and the text that they stand for is
   asked of the engine's tokenizer (`Needed`). It has to begin with what was shown.
3. Stop strings are matched here (`stops.py`) and not by the new engine: one may begin before the seam.
4. Choices of one request may be of different lengths: the new engine gets the largest limit, each ends at its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from node.prompt.carriage import CHAT, KEPT, answer_limit, whole_number
from node.relay.carry.record import Choice, Record
from node.relay.carry.stops import stop_strings

Fields = Mapping[str, object]

#: Prompt tokens in front of an answer that the tokenizer sees with it: the first token's text depends on them.
CONTEXT = 8
#: A character that is not whole yet decodes to this.
_HALF = "\N{REPLACEMENT CHARACTER}"


class CannotCarryError(Exception):
    """This answer cannot go on elsewhere; the message says why, for people."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Text to be asked for: of the context alone, and of it with a choice's tokens."""

    index: int
    context: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Strand:
    """One unfinished choice on its way."""

    index: int
    #: Tokens of it that go into the prompt.
    keep: int
    #: Text of the kept tokens that was not shown.
    held: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the request says about its answers, in the terms of a continuation."""

    chat: bool
    limit: int | None
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool
    #: Choices the client asked for.
    choices: int
    include_usage: bool
    continuous_usage: bool


def asked(path: str, fields: Fields) -> Asked:
    """Read it from a body that the engine has accepted."""
    options = fields.get("stream_options")
    options = options if isinstance(options, dict) else {}
    usage = options.get("include_usage") is True
    return Asked(
        chat=path.rstrip("/") == CHAT,
        limit=answer_limit(path, fields),
        min_tokens=whole_number(fields.get("min_tokens")) or 0,
        stops=stop_strings(fields.get("stop")),
        include_stop=fields.get("include_stop_str_in_output") is True,
        choices=whole_number(fields.get("n")) or 1,
        include_usage=usage,
        continuous_usage=usage and options.get("continuous_usage_stats") is True,
    )


def strands(record: Record, ask: Asked) -> list[Strand]:
    """The choices that have to go on.

    :raises CannotCarryError: the record does not say enough.
    """
    if record.prompt_ids is None:
        raise CannotCarryError("its engine gives no token ids")
    found = []
    for index in range(ask.choices):
        choice = record.choices.get(index) or Choice()
        if choice.finish_reason is not None:
            continue
        if choice.length and not choice.ids:
            raise CannotCarryError("its engine gives no token ids")
        if choice.others or choice.logprobs or choice.parsed:
            raise CannotCarryError("the engine keeps state for what it has shown beside the text")
        keep = len(choice.ids) if _lags(ask) else choice.safe
        found.append(Strand(index, keep))
    if len(found) > 1 and any(strand.keep < ask.min_tokens for strand in found):
        raise CannotCarryError("min_tokens with several choices")
    return found


def _lags(ask: Asked) -> bool:
    """Whether text is held back for stop strings."""
    return bool(ask.stops) and not ask.include_stop


def needed(record: Record, ask: Asked, found: Sequence[Strand]) -> list[Needed]:
    """What the tokenizer has to be asked before anything is sent."""
    assert record.prompt_ids is not None
    context = tuple(record.prompt_ids[-CONTEXT:])
    wanted = []
    for strand in found:
        choice = record.choices.get(strand.index)
        if choice is not None and strand.keep and (_lags(ask) or choice.width > 1):
            # An event of several tokens may show the first ones whole and half of the last one's character.
            wanted.append(Needed(strand.index, context, tuple(choice.ids[: strand.keep])))
    return wanted


def settle(strand: Strand, choice: Choice, ask: Asked, before: str, whole: str) -> bool:
    """Take the tokenizer's answer for one strand: text of the context, and of context and tokens.

    False: its last token ends within a character; ask again for one less (`strand.keep` is lowered).

    :raises CannotCarryError: the text is another one than was shown.
    """
    if whole.endswith(_HALF) and strand.keep > 0:
        strand.keep -= 1
        return False
    text = whole[len(before) :]
    shown = choice.text.getvalue()
    if not whole.startswith(before) or not text.startswith(shown):
        raise CannotCarryError("the tokens so far stand for another text than was shown")
    strand.held = text[len(shown) :]
    if len(strand.held) > held_back(ask):
        raise CannotCarryError("text is missing from what was shown")
    return True


def held_back(ask: Asked) -> int:
    """Characters that an engine holds back for stop strings."""
    return max(map(len, ask.stops)) - 1 if _lags(ask) else 0


def body(
    record: Record, ask: Asked, fields: Fields, found: Sequence[Strand], *, context: int, most: int | None = None
) -> bytes:
    """The body of the completion that computes the rest, or `most` tokens of it.

    `context`: the new engine's longest sequence, 0 = unknown.

    :raises CannotCarryError: the limit of the answer cannot be known.
    """
    assert record.prompt_ids is not None
    prompts = [prompt(record, strand) for strand in found]
    limit = max(left(record, ask, strand, context=context) for strand in found)
    limit = limit if most is None else min(limit, most)
    sent: dict[str, object] = {name: fields[name] for name in fields if name in KEPT}
    sent["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    sent["max_tokens"] = limit
    if (least := max(0, ask.min_tokens - found[0].keep)) > 0:
        sent["min_tokens"] = min(least, limit)
    sent["stream"] = True
    return orjson.dumps(sent)


def prompt(record: Record, strand: Strand) -> list[int]:
    """The ids that a strand goes on from."""
    assert record.prompt_ids is not None
    choice = record.choices.get(strand.index)
    ids = choice.ids[: strand.keep] if choice is not None else array("I")
    return [*record.prompt_ids, *ids]


def left(record: Record, ask: Asked, strand: Strand, *, context: int) -> int:
    """Tokens that a choice may still have."""
    if ask.limit is not None:
        return max(1, ask.limit - strand.keep)
    if not context:
        raise CannotCarryError("neither it nor the other engine says how long it may get")
    assert record.prompt_ids is not None
    return max(1, context - len(record.prompt_ids) - strand.keep)
