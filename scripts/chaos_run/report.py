"""What a run has found, as figures and as lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos_run.client import End, Sent
from chaos_run.engines import Engines
from chaos_run.journals import Verdict

#: Why a stream was carried -> what was done to its engine or node (`strikes.py`).
CAUSES = {
    "killed": ("killed", "engine killed"),
    "hung": ("stopped", "engine stopped"),
    "cut": ("cut",),
    "drained": ("drained",),
}
#: Lines of each kind of fault that are shown.
MAX_SHOWN = 10


@dataclass(slots=True)
class Report:
    """All of it. `figures` is what `--json` prints."""

    seed: int
    nodes: int
    minutes: float
    engines: Engines
    no_cuts: str
    done: Counter[str]
    counts: Counter[str]
    sent: Sequence[Sent]
    verdict: Verdict
    leaks: Sequence[str]
    failed: Sequence[str] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def _of(self, end: End) -> list[Sent]:
        return [item for item in self.sent if item.end is end]

    @property
    def figures(self) -> dict[str, Any]:
        """One flat object."""
        carried = [s for s in self.sent if s.asked.rid in self.verdict.carried and s.end is End.RIGHT]
        streams = [s for s in carried if s.asked.stream]
        others = [s for s in carried if not s.asked.stream]
        pauses = sorted(self._pause_s(s) for s in streams)
        firsts = sorted(s.first_s for s in self.sent if s.first_s is not None)
        return {
            "seed": self.seed,
            "nodes": self.nodes,
            "minutes": self.minutes,
            "engines": self.engines.name,
            "requests": len(self.sent),
            "streams": sum(s.asked.stream for s in self.sent),
            "right": len(self._of(End.RIGHT)),
            "wrong_answers": len(self._of(End.WRONG)),
            "client_errors": len(self._of(End.ERROR)),
            "entry_lost": len(self._of(End.ENTRY_LOST)),
            "kills": self.done["kill_node"] + self.done["kill_engine"],
            "kills_of_nodes": self.done["kill_node"],
            "kills_of_engines": self.done["kill_engine"],
            "stops": self.done["stop_node"] + self.done["stop_engine"],
            "cuts": self.done["cut_link"] + self.done["cut_node"],
            "drains": self.done["drain"],
            "restarts": self.done["restart"],
            "fills": self.done["fill"],
            "garbage": self.done["garbage"],
            "carried_streams": len(streams),
            "carried_others": len(others),
            "carried_streams_tokens": _tokens(streams),
            "carried_others_tokens": _tokens(others),
            "again_streams_tokens": self._again(streams),
            "again_others_tokens": self._again(others),
            # Only engines with journals can be asked.
            "duplicate_decodes": len(self.verdict.duplicates) if self.engines.journals else None,
            "unreachable_decodes": len(self.verdict.unreachable) if self.engines.journals else None,
            "leaks": len(self.leaks),
            "strikes_failed": len(self.failed),
            "refused_connections": self.counts["refused_connections"],
            "told_to_retry": self.counts["told_to_retry"],
            "pause_p50_ms": milliseconds(pauses, 0.5),
            "pause_p99_ms": milliseconds(pauses, 0.99),
            "pause_max_ms": milliseconds(pauses, 1.0),
            "ttft_p50_ms": milliseconds(firsts, 0.5),
            "ttft_p99_ms": milliseconds(firsts, 0.99),
            **self._by_cause(streams),
            "no_cuts": self.no_cuts,
            **self.more,
        }

    def _again(self, carried: Sequence[Sent]) -> int:
        """Tokens of these answers that were computed more than once."""
        return sum(max(0, self.verdict.computed[s.asked.rid] - s.asked.completion_tokens) for s in carried)

    def _pause_s(self, sent: Sent) -> float:
        return sent.pause_s(self.verdict.resumed[sent.asked.rid])

    def _by_cause(self, streams: Sequence[Sent]) -> dict[str, Any]:
        """The pauses of carried streams by what had happened to the engine that they left."""
        told: dict[str, Any] = {}
        for cause, words in CAUSES.items():
            pauses = sorted(self._pause_s(s) for s in streams if self.verdict.carried[s.asked.rid] in words)
            told[f"carried_{cause}"] = len(pauses)
            told[f"pause_{cause}_p50_ms"] = milliseconds(pauses, 0.5)
            told[f"pause_{cause}_max_ms"] = milliseconds(pauses, 1.0)
        return told

    @property
    def good(self) -> bool:
        """Whether nothing was lost, doubled, wrong or leaked."""
        figures = self.figures
        return not any(figures[name] for name in ("wrong_answers", "client_errors", "duplicate_decodes", "leaks"))

    def faults(self) -> list[str]:
        """What is wrong, in words, the first few of each kind."""
        told = {
            "wrong answer": [_told(s) for s in self._of(End.WRONG)],
            "client error": [_told(s) for s in self._of(End.ERROR)],
            "duplicate decode": self.verdict.duplicates,
            "leak": self.leaks,
            "strike failed": self.failed,
            "(no fault) could not be told": self.verdict.unreachable,
        }
        return [f"{kind}: {text}" for kind, texts in told.items() for text in list(texts)[:MAX_SHOWN]]


def _tokens(sent: Sequence[Sent]) -> int:
    return sum(s.asked.completion_tokens for s in sent)


def _told(sent: Sent) -> str:
    kind = "stream" if sent.asked.stream else "body"
    return f"{sent.asked.rid} ({kind}, {sent.asked.path}) through {sent.entry}: {sent.why}"


def milliseconds(ordered: Sequence[float], share: float) -> float | None:
    """A quantile of sorted seconds, in milliseconds; None without any."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000.0, 1) if ordered else None
