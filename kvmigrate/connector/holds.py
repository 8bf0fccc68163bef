"""Requests in vLLM's queue whose blocks are still on their way into the pool.

Promises: nobody is held longer than its node said, nor than MAX_HOLD_S, nor after its pull was reported over, nor
without a link that could report it. A report may come before its request: tokenizing a long prompt takes a while.
"""

from collections import OrderedDict
from collections.abc import Callable

MAX_HOLD_S = 30.0
MAX_REMEMBERED = 4096
"""Reports of pulls kept for requests that have not arrived; without its report a request waits for its limit."""


class Holds:
    """By vLLM's request id; several of them may share one pull (`n > 1`). `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[str, float]] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, request_id: str, rid: str, hold_s: float) -> None:
        """Hold a request until the pull `rid` is over, unless it is."""
        if rid not in self._over:
            self._held[request_id] = (rid, self._clock() + min(hold_s, MAX_HOLD_S))

    def waits(self, request_id: str) -> bool:
        """Whether to pass over a request now."""
        held = self._held.get(request_id)
        if held is None:
            return False
        if self._clock() < held[1]:
            return True
        del self._held[request_id]
        return False

    def over(self, rid: str) -> None:
        """A pull has ended."""
        self._over[rid] = None
        if len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
        for request_id in [request_id for request_id, held in self._held.items() if held[0] == rid]:
            del self._held[request_id]

    def end(self, request_id: str) -> None:
        """A request is gone."""
        self._held.pop(request_id, None)

    def clear(self) -> None:
        """Nobody will report anything."""
        self._held.clear()
