"""Round robin: each candidate in turn, by name.

Formula: the first name after the one chosen last for this model, in sorted order, and the first name of all
after the last. Source: the seed's first policy.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from node.policy.base import CandidateCost, Choice, Question

#: Models whose turn is remembered; a forgotten one starts again at the first node.
MAX_MODELS = 256


class RoundRobin:
    """Turns are counted per model, and survive nodes that come and go."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: OrderedDict[str, str] = OrderedDict()

    def choose(self, question: Question, now: float, rng: random.Random) -> Choice:
        """The next name in turn."""
        names = sorted(candidate.name for candidate in question.candidates)
        last = self._last.get(question.model)
        chosen = names[0] if last is None else next((name for name in names if name > last), names[0])
        if question.commit:
            self._last[question.model] = chosen
            self._last.move_to_end(question.model)
            if len(self._last) > MAX_MODELS:
                self._last.popitem(last=False)
        turn = names.index(chosen)
        costs = tuple(CandidateCost(name, float((place - turn) % len(names))) for place, name in enumerate(names))
        return Choice(costs[turn], f"round robin, {turn + 1} of {len(names)}", costs)
