"""How long a prompt takes to compute on one engine, as a function of its length: learnt, and carried in load vectors.

    ms = fixed + token * n + pair * n * (c + n / 2)

n: tokens to compute, c: tokens before them that a cache has. A step costs something whatever is in it, each token goes
through the weights once, and looks at every token before it. One rate for all lengths is wrong by a factor of two
between a short prompt and one of 85k tokens (docs/routing-benchmarks.md).

Learning. The engine is a server that works prompts off one after the other, mixed or not: what passes between two
completions is the work of those that completed in it. So prompts computed in one step together are one observation,
and one that waited behind another is not charged with it. Least squares over these, each weighed by the inverse of its
tokens: with one length alone that is tokens over seconds. What is not yet told apart goes to the term per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Until something is measured, milliseconds a token.
PRIOR_TOKEN_MS = 1.0

#: Largest constant that is believed, milliseconds.
MAX_TERM_MS = 1e9

#: Prompt for which one rate is told where only one is asked for, tokens.
TYPICAL_TOKENS = 2048

#: Observations below so many tokens measure the engine's step, and only its fixed time is learnt well from them.
MIN_TOKENS = 32

#: Share of what was learnt that one more observation leaves: about the last fifty count.
KEEP = 0.98

#: How strongly the fixed term and the pairs are held towards 0, as a share of the evidence for them.
RIDGE = 0.005

#: Completions within so many milliseconds of each other belong to one step.
SAME_STEP_MS = 1.0

#: Units of the sums, so that they are of one size: tokens, pairs.
_KILO, _MEGA = 1e3, 1e6


class Work(NamedTuple):
    """Prompts to compute, summed: how many, their tokens, and their pairs of a token with one before it."""

    prompts: int = 0
    tokens: int = 0
    pairs: float = 0.0

    @classmethod
    def of(cls, cached: int, missing: int) -> Work:
        """One prompt with `missing` tokens to compute behind `cached` ones."""
        return cls(1, missing, missing * (cached + missing / 2)) if missing > 0 else cls()

    def plus(self, other: Work) -> Work:
        """Both together."""
        return Work(self.prompts + other.prompts, self.tokens + other.tokens, self.pairs + other.pairs)


NO_WORK = Work()


class Owed:
    """Work that is still to be done, of prompts that come and go: the same sums, kept up to date in place."""

    __slots__ = ("pairs", "prompts", "tokens")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is owed any more."""
        self.prompts = self.tokens = 0
        self.pairs = 0.0

    def add(self, work: Work) -> None:
        """More is to be done."""
        prompts, tokens, pairs = work
        self.prompts += prompts
        self.tokens += tokens
        self.pairs += pairs

    def exchange(self, old: Work, new: Work) -> None:
        """Put ``new`` in the place of ``old``, which was added; nothing negative is left by rounding."""
        prompts, tokens, pairs = old
        left = self.tokens - tokens
        more, added, added_pairs = new
        self.prompts += more - prompts
        self.tokens = left + added
        self.pairs = (max(0.0, self.pairs - pairs) if left else 0.0) + added_pairs


class PrefillTime(NamedTuple):
    """The three constants, in milliseconds: a prompt, a token, and a pair of tokens. All 0 = not measured."""

    fixed_ms: float = 0.0
    token_ms: float = 0.0
    pair_ms: float = 0.0

    @classmethod
    def of_rate(cls, tokens_per_s: float) -> PrefillTime:
        """One rate for all lengths; 0 = not measured."""
        return cls(0.0, min(MAX_TERM_MS, 1000.0 / tokens_per_s) if tokens_per_s > 0 else 0.0, 0.0)

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return self != UNMEASURED

    def ms(self, cached: float, missing: float) -> float:
        """Milliseconds to compute `missing` tokens behind `cached` ones."""
        if missing <= 0:
            return 0.0
        fixed, token, pair = self
        return fixed + missing * (token + pair * (cached + missing / 2))

    def ms_of(self, owed: Owed) -> float:
        """Milliseconds to compute several prompts one after the other."""
        if not owed.prompts:
            return 0.0
        fixed, token, pair = self
        return fixed * owed.prompts + token * owed.tokens + pair * owed.pairs

    def towards(self, other: PrefillTime, share: float) -> PrefillTime:
        """This one, `share` of the way towards another. Every decision does this several times: written out."""
        fixed, token, pair = self
        other_fixed, other_token, other_pair = other
        return PrefillTime(
            fixed + share * (other_fixed - fixed),
            token + share * (other_token - token),
            pair + share * (other_pair - pair),
        )

    def tokens_per_s(self, tokens: int = TYPICAL_TOKENS) -> float:
        """The rate at which a prompt of so many tokens is computed; 0 = not measured."""
        ms = self.ms(0, tokens)
        return tokens / ms * 1000.0 if ms > 0 else 0.0


UNMEASURED = PrefillTime()
PRIOR = PrefillTime(0.0, PRIOR_TOKEN_MS, 0.0)


class PrefillLearner:
    """Fed with completions, gives a `PrefillTime`."""

    def __init__(self) -> None:
        self.time = PrefillTime()
        #: The observation that is still open, since more prompts may complete in the same step.
        self._open = Work()
        self._open_ms = 0.0
        #: Weighted sums over all closed ones: products of the features (a step, thousands of tokens, millions of
        #: pairs) with each other, and with the milliseconds.
        self._products: _Products = _NO_PRODUCTS
        self._answers: _Three = _ZERO

    def completed(self, work: Work, ms: float) -> None:
        """Prompts of `work` were completed `ms` after the completion before them (or the start, when idle before)."""
        if work.tokens <= 0:
            return
        if ms > SAME_STEP_MS:
            self._products, self._answers = self._summed(KEEP)
            self._open, self._open_ms = Work(), 0.0
        self._open = self._open.plus(work)
        self._open_ms += max(0.0, ms)
        if self._open_ms > 0:
            self._solve()

    def forget(self) -> None:
        """What was learnt stands until the next completion, which begins anew."""
        self._open, self._open_ms = Work(), 0.0
        self._products, self._answers = _NO_PRODUCTS, _ZERO

    def _summed(self, keep: float) -> tuple[_Products, _Three]:
        """The sums with the open observation."""
        thousands = self._open.tokens / _KILO
        if thousands <= 0 or self._open_ms <= 0:
            return self._products, self._answers
        features = (1.0, thousands, self._open.pairs / _MEGA)
        weighed = tuple(feature / thousands for feature in features)
        products = tuple(
            tuple(keep * old + weight * feature for old, feature in zip(row, features, strict=True))
            for row, weight in zip(self._products, weighed, strict=True)
        )
        answers = tuple(keep * old + weight * self._open_ms for old, weight in zip(self._answers, weighed, strict=True))
        return products, answers  # type: ignore[return-value]

    def _solve(self) -> None:
        """The constants of least squared error that are not negative."""
        products, answers = self._summed(KEEP)
        held = tuple(
            tuple(value * (1 + RIDGE) if column == row != 1 else value for column, value in enumerate(values))
            for row, values in enumerate(products)
        )
        best, least = _ZERO, math.inf
        for terms in _TERMS:
            found = _solved(held, answers, terms)
            if found is None or min(found) < 0:
                continue
            # At the minimum the squared error is what the squares of the answers leave of this product.
            error = -sum(value * answer for value, answer in zip(found, answers, strict=True))
            if error < least:
                best, least = found, error
            if len(terms) == len(answers):
                break
        fixed, token, pair = (min(MAX_TERM_MS, value) for value in (best[0], best[1] / _KILO, best[2] / _MEGA))
        self.time = PrefillTime(fixed, token, pair)


_Three = tuple[float, float, float]
_Products = tuple[_Three, _Three, _Three]
_ZERO: _Three = (0.0, 0.0, 0.0)
_NO_PRODUCTS: _Products = (_ZERO, _ZERO, _ZERO)

#: Which constants are not 0: all if they can be, else what fits best.
_TERMS = ((1, 0, 2), (1, 2), (1, 0), (0, 2), (1,), (0,), (2,))


def _solved(products: Sequence[Sequence[float]], answers: _Three, terms: tuple[int, ...]) -> _Three | None:
    """Solve for these terms by elimination, the others 0; None where they cannot be told apart."""
    rows = [[*(products[row][column] for column in terms), answers[row]] for row in terms]
    for place, row in enumerate(rows):
        if row[place] <= _TINY * products[terms[place]][terms[place]]:
            return None
        for other in rows:
            if other is not row:
                factor = other[place] / row[place]
                other[:] = [left - factor * right for left, right in zip(other, row, strict=True)]
    found = [0.0, 0.0, 0.0]
    for place, term in enumerate(terms):
        found[term] = rows[place][-1] / rows[place][place]
    return found[0], found[1], found[2]


#: Share of a term's evidence that must be its own.
_TINY = 1e-6
