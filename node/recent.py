"""The last requests that this node was the entry of, for its page and its state: what happened and why there.

A ring of `MAX_REQUESTS` rows. It holds no text of a prompt and no header of a client; the id of a request, which a
client may have chosen, is kept only where clients need no API key (`show_ids`): rows are shown without credentials.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from node.plan import Plan, Refusal
from node.relay.call import Call
from node.relay.carry.lost import Lost

#: Rows kept.
MAX_REQUESTS = 200
#: Candidates of a decision that a row names, the cheapest first.
MAX_OTHERS = 4
#: Answers that were opened and are not in the ring yet.
MAX_OPENED = 4096
_MAX_MODEL = 128


@dataclass(slots=True)
class Row:
    """One request. Times in seconds of the node's clock; ``blocks`` were pulled from ``source``.

    ``revision`` is ``seq`` until the row changes: whoever asks for what is new gets it again.
    """

    seq: int
    revision: int
    at: float
    rid: str
    model: str | None
    status: int
    first_byte_s: float | None
    prompt_tokens: int
    plan: Plan | None
    blocks: int = 0
    #: Why the answer broke off after its first byte; empty while it did not.
    broke: str = ""

    def as_dict(self, now: float) -> dict[str, object]:
        """JSON-able, with the age in place of the time."""
        plan = self.plan
        return {
            "seq": self.seq,
            "ago_s": round(max(0.0, now - self.at), 1),
            "rid": self.rid,
            "model": self.model,
            "target": plan.target if plan else None,
            "reason": plan.reason if plan else "refused",
            "hops": plan.hops if plan else 0,
            "status": self.status,
            "first_byte_ms": None if self.first_byte_s is None else round(self.first_byte_s * 1000.0, 1),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": plan.matched_tokens if plan else 0,
            "source": plan.source if plan else None,
            "pulled_blocks": self.blocks,
            "refused_by": list(plan.visited) if plan else [],
            "costs": _cheapest(plan) if plan else [],
            "broke": self.broke,
        }


class RecentRequests:
    """Implements `node.relay.ports.Notes`."""

    def __init__(self, clock: Callable[[], float], *, show_ids: bool) -> None:
        self._clock = clock
        self._show_ids = show_ids
        self._rows: deque[Row] = deque(maxlen=MAX_REQUESTS)
        self._seqs = itertools.count(1)
        #: Blocks pulled for an answer that is about to be noted, by request id.
        self._opened: OrderedDict[str, int] = OrderedDict()

    @property
    def last(self) -> int:
        """The newest revision; 0 without rows."""
        return max((row.revision for row in self._rows), default=0)

    def rows(self, most: int = MAX_REQUESTS, *, after: int = 0) -> list[dict[str, object]]:
        """Return at most ``most`` rows with a revision above ``after``, newest first."""
        now = self._clock()
        new = (row for row in reversed(self._rows) if row.revision > after)
        return [row.as_dict(now) for row in itertools.islice(new, most)]

    def pulled(self, rid: str, blocks: int) -> None:
        """Note that so many KV blocks were pulled for the answer that comes next."""
        self._opened[rid] = blocks
        while len(self._opened) > MAX_OPENED:
            self._opened.popitem(last=False)

    def decided(self, call: Call, plan: Plan | Refusal, seconds: float) -> None:
        """Nothing to note: the plan comes with the answer."""

    def retried(self, why: str) -> None:
        """Nothing to note: the plan names who refused."""

    def waited(self, seconds: float) -> None:
        """Nothing to note."""

    def denied(self, why: str) -> None:
        """Nothing to note: the refusal comes as an answer."""

    def carried(self, lost: Lost, seconds: float, failed: str) -> None:
        """Nothing to note: the stream is the same one."""

    def answered(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Note an answer or a refusal."""
        seq = next(self._seqs)
        row = Row(
            seq=seq,
            revision=seq,
            at=self._clock(),
            rid=call.rid if self._show_ids else "",
            model=call.parsed.model[:_MAX_MODEL] if call.parsed.model else None,
            status=status,
            first_byte_s=first_byte_s,
            prompt_tokens=plan.prompt_tokens if plan else call.parsed.est_prompt_tokens,
            plan=plan,
            blocks=self._opened.pop(call.rid, 0),
        )
        self._rows.append(row)

    def broke(self, call: Call, plan: Plan, why: str) -> None:
        """Note that an answer broke off."""
        row = next((row for row in reversed(self._rows) if row.plan is plan), None)
        if row is not None:
            row.broke = why
            row.revision = next(self._seqs)


def _cheapest(plan: Plan) -> list[tuple[str, float]]:
    costs = sorted(plan.costs, key=lambda cost: cost.total_ms)[:MAX_OTHERS]
    return [(cost.name, round(cost.total_ms, 1)) for cost in costs]
