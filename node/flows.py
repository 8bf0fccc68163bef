"""Who sent requests and KV blocks to whom, as far as it went through this node.

A node sees what it forwards, what is forwarded to it, and what either of the two pulled. What other nodes do among
themselves is not gossiped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from kvmigrate.pull import MAX_SOURCES
from node.plan import Plan
from node.relay.call import Call, Opened, Outcome
from node.relay.forward import PULLED_FROM_HEADER
from node.relay.headers import HeaderList
from node.relay.ports import Peers, Runner, unnoticed
from node.wire import NAME

#: Pairs counted; the one that was quiet for longest goes first.
MAX_PAIRS = 512
#: More blocks than any prompt has: what a peer tells is not believed beyond it.
MAX_BLOCKS = 1 << 20

Pair = tuple[str, str]


class Flows:
    """Totals since the start, by pair (from, to)."""

    def __init__(self) -> None:
        self._forwards: OrderedDict[Pair, int] = OrderedDict()
        self._pulls: OrderedDict[Pair, int] = OrderedDict()

    def opened(self, plan: Plan, pulled: Mapping[str, int]) -> None:
        """Count an answer that has begun, and the blocks that were pulled for it, by the node that gave them."""
        if plan.entry != plan.target:
            _count(self._forwards, (plan.entry, plan.target), 1)
        for source, blocks in pulled.items():
            _count(self._pulls, (source, plan.target), blocks)

    def forwards(self) -> list[tuple[str, str, int]]:
        """Requests by (entry, target)."""
        return [(*pair, count) for pair, count in self._forwards.items()]

    def pulls(self) -> list[tuple[str, str, int]]:
        """KV blocks by (source, target)."""
        return [(*pair, count) for pair, count in self._pulls.items()]


class WatchedRunner:
    """Runs as the runner that it wraps does, and counts what was opened and the blocks that were pulled for it."""

    def __init__(self, runner: Runner, flows: Flows) -> None:
        self._runner = runner
        self._flows = flows

    async def open(
        self, call: Call, plan: Plan, *, predicted_ms: float, admitted: Callable[[], None] = unnoticed
    ) -> Outcome:
        """Try the plan's target once."""
        outcome = await self._runner.open(call, plan, predicted_ms=predicted_ms, admitted=admitted)
        if isinstance(outcome, Opened):
            self._flows.opened(plan, pulled_in(outcome.headers))
        return outcome


class WatchedPeers(WatchedRunner):
    """The same around the runner on peers."""

    def __init__(self, peers: Peers, flows: Flows) -> None:
        super().__init__(peers, flows)
        self._peers = peers

    async def settled(self, opened: Opened) -> None:
        """Wait, bounded, until the peer has ended an attempt that was closed here."""
        await self._peers.settled(opened)


def pulled_in(headers: HeaderList) -> dict[str, int]:
    """KV blocks by node that the headers of an answer tell of; what makes no sense is left out."""
    if not headers:
        return {}
    return pulled_from(next((value for name, value in headers if name.lower() == PULLED_FROM_HEADER), ""))


def pulled_from(text: str) -> dict[str, int]:
    """The same for the value of the header."""
    found: dict[str, int] = {}
    for part in text.split(",", MAX_SOURCES)[:MAX_SOURCES]:
        name, _, number = part.strip().partition("=")
        if NAME.fullmatch(name) and number.isascii() and number.isdigit() and len(number) < 10 and int(number):
            found[name] = min(int(number), MAX_BLOCKS)
    return found


def _count(table: OrderedDict[Pair, int], pair: Pair, more: int) -> None:
    table[pair] = table.get(pair, 0) + more
    table.move_to_end(pair)
    if len(table) > MAX_PAIRS:
        table.popitem(last=False)
