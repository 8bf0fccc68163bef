"""The last quarter of an hour of this node, in steps of two seconds: what its page draws.

Nothing runs by a timer: an event opens the step that it falls into, a step without events is not kept. Bounded by
`POINTS` steps, each of them a row of numbers, and by `MAX_TIMES` first bytes of the one that is running; in a step with
more of them, the quantiles are of the first ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Length of a step in seconds, and steps kept.
STEP_S = 2.0
POINTS = 450
MAX_TIMES = 256

#: What `Step.point` gives, in this order. Times in milliseconds, the rest are counts of one step.
COLUMNS = (
    "step",
    "local",
    "forwarded",
    "refused",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "prompt_tokens",
    "cached_tokens",
    "pulled_blocks",
)


@dataclass(slots=True)
class Step:
    """What happened in the step that began at ``index * STEP_S``."""

    index: int
    local: int = 0
    forwarded: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pulled_blocks: int = 0
    times: list[float] = field(default_factory=list)

    def point(self) -> list[float]:
        """The step as a row of numbers, `COLUMNS`."""
        times = sorted(self.times)
        p50, p95 = (_quantile(times, share) for share in (0.5, 0.95))
        answers: list[float] = [self.index, self.local, self.forwarded, self.refused]
        return [*answers, p50, p95, self.prompt_tokens, self.cached_tokens, self.pulled_blocks]


class History:
    """Fed by `node.metrics`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._past: deque[list[float]] = deque(maxlen=POINTS)
        self._running: Step | None = None

    def answered(self, place: str, first_byte_s: float | None) -> None:
        """Note an answer; ``place`` is ``local``, ``forwarded`` or ``refused``."""
        step = self._step()
        setattr(step, place, getattr(step, place) + 1)
        if first_byte_s is not None and len(step.times) < MAX_TIMES:
            step.times.append(first_byte_s * 1000.0)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Note a prompt that the own engine began, and how much of it was cached."""
        step = self._step()
        step.prompt_tokens += prompt_tokens
        step.cached_tokens += min(cached_tokens, prompt_tokens)

    def pulled(self, blocks: int) -> None:
        """Note KV blocks that came from a peer."""
        self._step().pulled_blocks += blocks

    def now(self) -> float:
        """The step that is running, with its fraction."""
        return self._clock() / STEP_S

    def points(self, since: int = 0) -> list[list[float]]:
        """Return the steps from the index ``since`` on that are not too old, oldest first."""
        oldest = max(since, int(self.now()) - POINTS + 1)
        rows = [*self._past] if self._running is None else [*self._past, self._running.point()]
        return [row for row in rows if row[0] >= oldest]

    def _step(self) -> Step:
        index = int(self._clock() / STEP_S)
        step = self._running
        if step is None or step.index < index:
            if step is not None:
                self._past.append(step.point())  # its times are not kept: they would be most of our memory
            step = self._running = Step(index)
        return step


def _quantile(ordered: list[float], share: float) -> float:
    return round(ordered[int(share * (len(ordered) - 1))], 1) if ordered else 0.0
