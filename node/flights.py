"""Requests on our engine whose reports are awaited. Their bodies are not kept."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from node.plan import Plan
from node.prompt import ParsedRequest

#: Requests remembered; the oldest are forgotten beyond.
MAX_FLIGHTS = 4096
#: Requests that are over and whose last blocks may still come, and for how many seconds: a worker's report took half a
#: second on a host whose cores were taken. What does not come then was refused by a full pool.
MAX_LATE = 64
LATE_S = 5.0


@dataclass(slots=True)
class Flight:
    """What the prefix digest and the metrics need of a request until its last report."""

    chunks: tuple[int, ...]
    prompt_bytes: int
    text_tokens: int
    #: One prompt of text: its length in tokens teaches the ratio of bytes to tokens.
    teaches: bool
    model: str
    #: Prompt tokens that were predicted to come from a cache.
    predicted: int
    #: The engine's own count of prompt tokens; 0 until it reported.
    prompt_tokens: int = 0
    #: Blocks that the engine filled and the digest does not claim yet: the pool had not heard of all of them.
    unconfirmed: tuple[bytes, ...] = ()
    #: The engine has computed the whole prompt.
    computed: bool = False
    #: Chunks that the digest promises for this request, and perhaps for others too.
    promised: tuple[int, ...] = ()


class Flights:
    """The bounded table, by the id that the engine knows."""

    def __init__(self, limit: int = MAX_FLIGHTS) -> None:
        self._limit = limit
        self._flights: OrderedDict[str, Flight] = OrderedDict()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def make_room(self, rid: str) -> list[Flight]:
        """Forget what stands in the way of one more, and return it: the oldest, and whatever had the same id."""
        before = self._flights.pop(rid, None)
        gone = [before] if before is not None else []
        while len(self._flights) >= self._limit:
            gone.append(self._flights.popitem(last=False)[1])
        return gone

    def add(self, rid: str, parsed: ParsedRequest, plan: Plan) -> Flight:
        """Remember a request that goes to the engine, and return it. `make_room` first."""
        flight = self._flights[rid] = Flight(
            chunks=parsed.chunks,
            prompt_bytes=parsed.prompt_bytes,
            text_tokens=max(1, parsed.text_tokens),
            teaches=parsed.prompts == 1 and not parsed.exact_tokens,
            model=plan.model,
            predicted=plan.matched_tokens,
        )
        return flight

    def get(self, rid: str) -> Flight | None:
        """Return a request, None when it is not known."""
        return self._flights.get(rid)

    def pop(self, rid: str) -> Flight | None:
        """Forget a request and return it."""
        return self._flights.pop(rid, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._flights.clear()


class Late:
    """Requests that are over and had blocks of which the pool had not heard. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, Flight]] = deque(maxlen=MAX_LATE)

    def add(self, flight: Flight, now: float) -> None:
        """Wait for the blocks that a request still lacks, if any."""
        if flight.unconfirmed:
            self._late.append((now, flight))

    def waiting(self, now: float) -> list[Flight]:
        """Return those whose blocks are worth waiting for."""
        while self._late and (now - self._late[0][0] > LATE_S or not self._late[0][1].unconfirmed):
            self._late.popleft()
        return [flight for _, flight in self._late if flight.unconfirmed]

    def clear(self) -> None:
        """Forget all of them."""
        self._late.clear()
