"""What became of each request of a replay, a line of JSON each: for who wants to know which of them decide a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from benches.trace_replay import Seen
from benches.traces import Arrival


def write(
    file: Path,
    suffix: str,
    name: str,
    requests: Sequence[tuple[Arrival, Seen]],
    decisions: Mapping[str, Mapping[str, object]],
) -> None:
    """Append those of one contestant at one load, in the order they were sent. Seconds from when each was due.

    `decisions` are what our nodes say of them, by id. Tokens are those of the trace.
    """
    start = requests[0][1].due if requests else 0.0
    with file.open("ab") as lines:
        for number, (arrival, one) in enumerate(requests):
            record = {
                "run": suffix,
                "contestant": name,
                "number": number,
                "due_s": round(one.due - start, 4),
                "sent_s": _after(one, one.sent),
                "first_s": _after(one, one.first),
                "ended_s": _after(one, one.ended),
                "status": one.status,
                "failed": one.failed,
                "tokens": arrival.tokens,
                "blocks": len(arrival.blocks),
                "output": arrival.output,
                "decision": decisions.get(one.rid),
            }
            lines.write(orjson.dumps(record) + b"\n")


def _after(one: Seen, moment: float) -> float | None:
    """None: it never came to that."""
    return round(moment - one.due, 4) if moment else None
