"""Cache hits of an engine that tells no one's but only counts all: what the alarm for silent zero hits has then.

Our connector reports how much of each prompt was cached. Any other vLLM has a counter of cached tokens, which is read
now and then (`node.onlooker`). Pure. Rules
1. A request that ended whole and was not reported waits for the next reading, `MAX_WAITING` of them at most.
2. What was found between two readings is shared among those that waited, by what they were promised: the sums are
   right, the parts a guess. Nobody gets more than its prompt.
3. The first reading only begins, and so does one below the one before it: the engine has started again.

An engine that others use too counts their hits as well: the alarm may come late or not at all, never without a cause.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Requests kept between two readings; the oldest are forgotten beyond.
MAX_WAITING = 4096

#: vLLM's counter of prompt tokens that were found cached.
_COUNTER = b"vllm:prefix_cache_hits_total"


class Found(NamedTuple):
    """Tokens of one request: expected cached, found cached, of its prompt."""

    promised: int
    found: int
    prompt: int


class CountedHits:
    """Fed with ends of requests and readings of the counter."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._waiting: deque[tuple[int, int]] = deque(maxlen=MAX_WAITING)

    @property
    def wanted(self) -> bool:
        """A reading would tell something."""
        return self._last is None or bool(self._waiting)

    def ended(self, promised: int, prompt: int) -> None:
        """A request ended whole of which the engine reported nothing."""
        self._waiting.append((promised, prompt))

    def read(self, hits: float) -> list[Found]:
        """Take the counter, and return what those that waited found."""
        waiting, last = list(self._waiting), self._last
        self._waiting.clear()
        self._last = hits
        if last is None or hits < last:
            return []
        weights = [promised for promised, _ in waiting]
        if not any(weights):
            weights = [prompt for _, prompt in waiting]
        each = (hits - last) / max(1, sum(weights))
        return [
            Found(promised, min(prompt, int(each * weight)), prompt)
            for (promised, prompt), weight in zip(waiting, weights, strict=True)
        ]

    def afresh(self) -> None:
        """Forget all: the next reading is of another engine, or of one that came back."""
        self._waiting.clear()
        self._last = None


def counter_of(page: bytes) -> float | None:
    """The counter on a page of metrics, summed over its labels; None when it is not there. Never raises."""
    found: list[float] = []
    for line in page.split(b"\n"):
        if not line.startswith(_COUNTER):
            continue
        try:
            value = float(line.rpartition(b" ")[2])
        except ValueError:
            continue
        if 0.0 <= value < 1 << 53:
            found.append(value)
    return sum(found) if found else None
