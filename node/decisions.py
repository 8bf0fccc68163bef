"""What was decided lately, and what came of it. No prompt text, and no more than `MAX_DECISIONS` entries.

One entry a request, written when its answer begins or it is refused: the plan that was run in the end, with the terms
of its target, beside what was really measured.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from node.flows import pulled_from
from node.plan import Plan
from node.relay.call import Call
from node.relay.forward import CACHED_HEADER, PULLED_FROM_HEADER, PULLED_HEADER

#: Decisions kept, those that the state shows, and other candidates that each remembers.
MAX_DECISIONS = 512
SHOWN = 50
MAX_OTHERS = 3
#: Longest model name shown.
_MAX_MODEL = 128


@dataclass(frozen=True, slots=True)
class Decision:
    """One request. Times in monotonic seconds or milliseconds, as the names say."""

    at: float
    rid: str
    model: str | None
    stream: bool
    status: int
    plan: Plan | None
    #: From the request's arrival, and from the last decision, to the first byte; None when it was refused.
    first_byte_ms: float | None
    ran_ms: float | None
    #: Prompt tokens that the target's engine found cached, blocks that it pulled before; None = it did not tell.
    cached_tokens: int | None
    pulled_blocks: int | None
    #: The same by the node that gave them.
    pulled_from: Mapping[str, int]
    #: Its number, and the number of its last change: whoever asks for what is new gets it again.
    seq: int = 0
    revision: int = 0
    #: Other candidates that were weighed and what each would have cost in milliseconds, the cheapest first.
    others: tuple[tuple[str, float], ...] = ()
    #: Why the answer broke off after its first byte; empty while it did not.
    broke: str = ""

    @property
    def predicted_ms(self) -> float | None:
        """From the decision to the first byte, as it was expected; None where no times were worked out."""
        cost = self.plan.cost if self.plan is not None else None
        if cost is None or not cost.prefill_ms:
            return None
        return cost.hop_ms + cost.queue_ms + cost.pull_ms + cost.prefill_ms

    def short(self, now: float, *, ids: bool = True) -> dict[str, object]:
        """What `/gossip/state` shows; ``ids``: with the id, which a client may have made up."""
        plan = self.plan
        return {
            "ago_s": round(max(0.0, now - self.at), 1),
            "rid": self.rid if ids else "",
            "model": self.model,
            "target": plan.target if plan is not None else None,
            "reason": plan.reason if plan is not None else "refused",
            "hops": plan.hops if plan is not None else 0,
            "status": self.status,
        }

    def as_dict(self, now: float) -> dict[str, object]:
        """Everything, JSON-able."""
        told: dict[str, object] = {
            **self.short(now),
            "stream": self.stream,
            "first_byte_ms": _rounded(self.first_byte_ms),
            "ran_ms": _rounded(self.ran_ms),
            "predicted_ms": _rounded(self.predicted_ms),
            "cached_tokens": self.cached_tokens,
            "pulled_blocks": self.pulled_blocks,
            "pulled_from": dict(self.pulled_from),
            "broke": self.broke or None,
        }
        if self.plan is not None:
            told |= {
                "policy": self.plan.policy,
                "source": self.plan.source,
                "prompt_tokens": self.plan.prompt_tokens,
                "predicted_cached_tokens": self.plan.matched_tokens,
                "visited": list(self.plan.visited),
                "cost": None if self.plan.cost is None else self.plan.cost.as_dict(),
                "others": [{"node": name, "total_ms": round(total_ms, 3)} for name, total_ms in self.others],
            }
        return told


class DecisionLog:
    """The ring of the last decisions."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._numbers = itertools.count(1)

    def note(
        self,
        call: Call,
        plan: Plan | None,
        status: int,
        now: float,
        *,
        first_byte_s: float | None,
        told: Mapping[str, str],
    ) -> None:
        """A request was answered or refused; `told` are the target's own headers by lower-case name."""
        others = () if plan is None else _cheapest(plan)
        if plan is not None and len(plan.costs) > 1:  # the terms of the others are nobody's business any more
            plan = replace(plan, costs=() if plan.cost is None else (plan.cost,))
        number = next(self._numbers)
        self._ring.append(
            Decision(
                seq=number,
                revision=number,
                others=others,
                at=now,
                rid=call.rid,
                model=call.parsed.model[:_MAX_MODEL] if call.parsed.model else None,
                stream=call.parsed.stream,
                status=status,
                plan=plan,
                first_byte_ms=None if first_byte_s is None else first_byte_s * 1000,
                ran_ms=None if plan is None or first_byte_s is None else _ran_ms(call, plan, first_byte_s),
                cached_tokens=_count(told.get(CACHED_HEADER)),
                pulled_blocks=_count(told.get(PULLED_HEADER)),
                pulled_from=pulled_from(told.get(PULLED_FROM_HEADER, "")),
            )
        )

    def broke(self, call: Call, why: str) -> None:
        """The answer to this call broke off."""
        for place in range(len(self._ring) - 1, -1, -1):
            if self._ring[place].rid == call.rid:
                self._ring[place] = replace(self._ring[place], broke=why, revision=next(self._numbers))
                return

    @property
    def last(self) -> int:
        """The newest revision; 0 without decisions."""
        return max((decision.revision for decision in self._ring), default=0)

    def since(self, revision: int, most: int) -> list[Decision]:
        """At most ``most`` decisions that were made or changed after ``revision``, newest first."""
        new = (decision for decision in reversed(self._ring) if decision.revision > revision)
        return list(itertools.islice(new, most))

    def latest(self, now: float, *, ids: bool = True) -> list[dict[str, object]]:
        """The lines that `/gossip/state` shows, newest first."""
        return [decision.short(now, ids=ids) for decision in list(self._ring)[: -SHOWN - 1 : -1]]

    def recent(self, now: float, limit: int = MAX_DECISIONS) -> dict[str, object]:
        """The answer to `GET /route/recent`: the last `limit` decisions, newest first, and how good they were."""
        newest = list(self._ring)[: -limit - 1 : -1] if limit > 0 else []
        return {"decisions": [decision.as_dict(now) for decision in newest], "forecast": _forecast(newest)}


def _forecast(decisions: list[Decision]) -> dict[str, object]:
    """How far predicted and real times to the first byte of streams are apart, and predicted and real cached tokens."""
    from statistics import median  # it brings fractions and decimals: no start should wait for those

    ratios = [
        decision.predicted_ms / decision.ran_ms
        for decision in decisions
        if decision.stream and decision.status < 400 and decision.predicted_ms and decision.ran_ms
    ]
    told = [(d.plan.matched_tokens, d.cached_tokens) for d in decisions if d.plan and d.cached_tokens is not None]
    return {
        "streams": len(ratios),
        "predicted_over_real_median": round(median(ratios), 3) if ratios else None,
        "error_median": round(median(abs(ratio - 1) for ratio in ratios), 3) if ratios else None,
        "predicted_cached_tokens": sum(predicted for predicted, _ in told),
        "cached_tokens": sum(cached for _, cached in told),
    }


def _ran_ms(call: Call, plan: Plan, first_byte_s: float) -> float:
    """From the decision to the first byte, by the moment of that byte: noting it may come later."""
    return max(0.0, call.arrived + first_byte_s - plan.decided_at) * 1000


def _cheapest(plan: Plan) -> tuple[tuple[str, float], ...]:
    if len(plan.costs) < 2:
        return ()
    others = sorted((cost.total_ms, cost.name) for cost in plan.costs if cost.name != plan.target)
    return tuple((name, total_ms) for total_ms, name in others[:MAX_OTHERS])


def _count(header: str | None) -> int | None:
    return int(header) if header is not None and header.isascii() and header.isdigit() and len(header) < 12 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
