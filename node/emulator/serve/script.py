"""The whole of an answer, known before it begins: its tokens, the text that each of them shows, and why it ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from node.emulator.serve.asks import Ask
from node.emulator.tokens import END, Tokenizer, answer

#: Longest answer worked out; an engine with a longer context ends here (finish_reason length).
MAX_ANSWER_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Script:
    """One answer."""

    tokens: tuple[int, ...]
    #: What each token shows; text of a stop string is not shown.
    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """All that is shown."""
        return "".join(self.pieces)


def write(ask: Ask, prompt: bytes, choice: int, *, max_model_len: int, tokenizer: Tokenizer) -> Script:
    """The answer number `choice` to a packed prompt."""
    limit = min(ask.max_tokens or MAX_ANSWER_TOKENS, max_model_len - len(prompt) // 4, MAX_ANSWER_TOKENS)
    salt = ask.salt + (f"#{choice}" if choice else "")
    tokens = list(islice(answer(prompt, salt=salt, ends=not ask.ignore_eos, least=ask.min_tokens), limit))
    reason = "stop" if tokens[-1] == END else "length"
    pieces = [tokenizer.piece(token) for token in tokens]
    stop = _first_stop("".join(pieces), ask, pieces)
    held = 0 if ask.include_stop else max(map(len, ask.stop), default=1) - 1
    if stop is None:
        return Script(tuple(tokens), _shown(pieces, sum(map(len, pieces)), held), reason)
    text, shown_to, last = stop
    return Script(tuple(tokens[: last + 1]), _shown(pieces[: last + 1], shown_to, held), "stop", text)


def _first_stop(whole: str, ask: Ask, pieces: list[str]) -> tuple[str, int, int] | None:
    """The stop string that is complete first: itself, where the text ends, and the token that completes it."""
    found = [(at + len(text), at, text) for text in ask.stop if (at := whole.find(text)) >= 0]
    if not found:
        return None
    end, at, text = min(found)
    reach = 0
    for index, piece in enumerate(pieces):
        reach += len(piece)
        if reach >= end:
            return text, end if ask.include_stop else at, index
    raise AssertionError("a stop string lies within the text")


def _shown(pieces: list[str], end: int, held: int) -> tuple[str, ...]:
    """What each token shows of the first `end` characters: `held` of them lag until the last token, as in vLLM."""
    whole, shown, reach, told = "".join(pieces), [], 0, 0
    for index, piece in enumerate(pieces):
        reach += len(piece)
        to = end if index == len(pieces) - 1 else max(told, min(reach - held, end))
        shown.append(whole[told:to])
        told = to
    return tuple(shown)
