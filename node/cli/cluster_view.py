"""The picture that a node's page is told (`node.picture`), read for a terminal. Any field may be missing or odd."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Requests kept, and seconds that "now" stands for in rates.
MAX_REQUESTS = 50
RECENT_S = 30.0

Message = Mapping[str, Any]
Pair = tuple[str, str]


@dataclass(slots=True)
class ClusterView:
    """What `grapevine top` shows. Feed it with `take`."""

    cluster: str = ""
    self_name: str = ""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    requests: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS))
    engine: Mapping[str, Any] = field(default_factory=dict)
    #: Totals since the node's start, and what was added since the last message.
    forwards: dict[Pair, int] = field(default_factory=dict)
    pulls: dict[Pair, int] = field(default_factory=dict)
    moved: dict[tuple[str, Pair], int] = field(default_factory=dict)
    block_tokens: int = 0
    _columns: list[str] = field(default_factory=list)
    _steps: dict[int, list[float]] = field(default_factory=dict)
    _step_s: float = 2.0
    _now: float = 0.0

    def take(self, kind: str, message: Message) -> None:
        """Take one event: ``first`` replaces everything, ``tick`` adds to it."""
        if kind == "first":
            self.cluster, self.self_name = str(message.get("cluster", "")), str(message.get("self", ""))
            past = message.get("past") or {}
            self._columns, self._step_s = list(past.get("columns") or []), float(past.get("step_s") or 2.0)
            self._steps.clear()
            self.requests.clear()
        self.engine = message.get("engine") or {}
        self.block_tokens = int((message.get("kv") or {}).get("block_tokens") or 0)
        self._now = float(message.get("now") or 0.0)
        self._take_nodes(message.get("nodes") or {}, message.get("models") or [])
        self._take_flows(message, counted=kind != "first")
        self._take_requests(message.get("requests") or [])
        for step in message.get("steps") or []:
            self._steps[int(step[0])] = step
        oldest = self._now - 2 * RECENT_S / self._step_s
        self._steps = {index: step for index, step in self._steps.items() if index >= oldest}

    def rate(self, column: str) -> float:
        """What the node counted per second, over the last `RECENT_S`."""
        if column not in self._columns:
            return 0.0
        place = self._columns.index(column)
        recent = (step[place] for index, step in self._steps.items() if index > self._now - RECENT_S / self._step_s)
        return sum(recent) / RECENT_S

    def total(self, column: str) -> float:
        """The sum of a load figure over all living nodes."""
        return sum(node.get(column) or 0 for node in self.nodes if node.get("state") not in ("dead", "left"))

    def _take_nodes(self, columns: Mapping[str, list[Any]], models: list[str]) -> None:
        names = columns.get("name") or []
        self.nodes = [{key: column[index] for key, column in columns.items()} for index in range(len(names))]
        for node in self.nodes:
            node["models"] = [models[place] for place in node.get("models") or []]

    def _take_flows(self, message: Message, *, counted: bool) -> None:
        names = [str(node["name"]) for node in self.nodes]
        self.moved = {}
        for kind in ("forwards", "pulls"):
            old: dict[Pair, int] = getattr(self, kind)
            new = {(names[a], names[b]): int(count) for a, b, count in message.get(kind) or []}
            if counted:
                self.moved |= {(kind, pair): more for pair, n in new.items() if (more := n - old.get(pair, 0)) > 0}
            setattr(self, kind, new)

    def _take_requests(self, rows: list[dict[str, Any]]) -> None:
        """Newest first; a row that is told again replaces what was known of it."""
        known = {row.get("seq"): row for row in self.requests}
        known |= {row.get("seq"): row for row in rows}
        newest = sorted(known.values(), key=lambda row: row.get("seq") or 0, reverse=True)
        self.requests.clear()
        self.requests.extend(newest[:MAX_REQUESTS])
