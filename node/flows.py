"""Who sent requests and KV blocks to whom, as far as it went through this node.

A node sees what it forwards, what is forwarded to it, and what either of the two pulled. What other nodes do among
themselves is not gossiped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from node.plan import Plan
from node.relay.call import Call, Opened, Outcome
from node.relay.forward import PULLED_HEADER
from node.relay.headers import HeaderList
from node.relay.ports import Peers, Runner, unnoticed

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

    def opened(self, plan: Plan, blocks: int) -> None:
        """Count an answer that has begun, and the blocks that were pulled for it."""
        if plan.entry != plan.target:
            _count(self._forwards, (plan.entry, plan.target), 1)
        if plan.source is not None and blocks:
            _count(self._pulls, (plan.source, plan.target), blocks)

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
            self._flows.opened(plan, blocks_in(outcome.headers))
        return outcome


class WatchedPeers(WatchedRunner):
    """The same around the runner on peers."""

    def __init__(self, peers: Peers, flows: Flows) -> None:
        super().__init__(peers, flows)
        self._peers = peers

    async def settled(self, opened: Opened) -> None:
        """Wait, bounded, until the peer has ended an attempt that was closed here."""
        await self._peers.settled(opened)


def blocks_in(headers: HeaderList) -> int:
    """KV blocks that the headers of an answer tell of; 0 when they tell nothing, or no number."""
    if not headers:
        return 0
    text = next((value for name, value in headers if name.lower() == PULLED_HEADER), "")
    return min(int(text), MAX_BLOCKS) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _count(table: OrderedDict[Pair, int], pair: Pair, more: int) -> None:
    table[pair] = table.get(pair, 0) + more
    table.move_to_end(pair)
    if len(table) > MAX_PAIRS:
        table.popitem(last=False)
