"""Asking some engine's tokenizer what the tokens of a broken stream stand for. All questions of a carry go to one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import orjson

from node.plan import RouteOptions
from node.prompt import ParsedRequest
from node.relay.attempts import Attempts
from node.relay.call import Call, Opened
from node.relay.carry.continuation import Asked, CannotCarryError, Needed, Strand, settle
from node.relay.carry.record import Record
from node.relay.refused import Refused
from node.relay.upstream import UpstreamError

#: Seconds that a place for a question is waited for, the longest answer in bytes, and questions for one choice: a
#: character is at most four bytes, so at most so many tokens.
DETOKENIZE_S = 5.0
MAX_TEXT = 16 * 1024 * 1024
MAX_QUESTIONS = 5

Open = Callable[[Attempts], Awaitable[tuple[Opened, Callable[[bool], None]]]]


class Tokenizer:
    """Of one carry. `options`: where it may be asked; who was lost with the stream may hang."""

    def __init__(self, open_attempt: Open, call: Call, options: RouteOptions, clock: Callable[[], float]) -> None:
        self._open = open_attempt
        self._call = call
        self._options = options
        self._clock = clock
        self._node: str | None = None

    async def settle(self, record: Record, ask: Asked, found: Sequence[Strand], questions: Sequence[Needed]) -> None:
        """Answer all questions.

        :raises CannotCarryError: nobody answered, or the tokens stand for something else than was shown.
        """
        for question in questions:
            strand = next(strand for strand in found if strand.index == question.index)
            await self._settle(strand, question, record, ask)

    async def _settle(self, strand: Strand, question: Needed, record: Record, ask: Asked) -> None:
        before = await self._text(question.context)
        for _ in range(MAX_QUESTIONS):
            whole = await self._text(question.context + question.tokens[: strand.keep])
            if settle(strand, record.choices[strand.index], ask, before, whole):
                return
        raise CannotCarryError("the tokens so far end in half a character")

    async def _text(self, tokens: tuple[int, ...]) -> str:
        model = self._call.parsed.model
        parsed = ParsedRequest(
            path="/detokenize", model=model, body=orjson.dumps({"model": model, "tokens": tokens}), is_json=True
        )
        options = replace(self._options, force_target=self._node)
        call = replace(self._call, target="/detokenize", parsed=parsed, options=options, carries=False)
        asking = Attempts(call, avoided=options.visited)
        asking.until = self._clock() + DETOKENIZE_S
        asking.stood = True
        try:
            opened, finish = await self._open(asking)
        except Refused as refused:
            raise CannotCarryError(f"no tokenizer answered: {refused}") from refused
        self._node = opened.plan.target
        whole = False
        try:
            answer = opened.first + await opened.upstream.read_all(MAX_TEXT)
            whole = opened.upstream.status == 200
        except UpstreamError as error:
            raise CannotCarryError(f"the tokenizer of {opened.plan.target} did not answer: {error}") from error
        finally:
            opened.end(whole)
            finish(whole)
        return _prompt_of(answer)


def _prompt_of(answer: bytes) -> str:
    try:
        text = orjson.loads(answer)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotCarryError("the tokenizer did not answer with text") from error
    if not isinstance(text, str):
        raise CannotCarryError("the tokenizer did not answer with text")
    return text
