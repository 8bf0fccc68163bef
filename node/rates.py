"""How fast KV comes from each peer, learnt from pulls: the transfer part of the latency vector."""

from __future__ import annotations

from collections import OrderedDict

from node.window import Rate

#: Peers remembered; the one not pulled from for longest goes first.
MAX_PEERS = 64
#: Pulls below this many bytes measure latency, not a rate.
MIN_BYTES = 1 << 18
#: Share of the past that one more pull leaves.
KEEP = 0.8


class TransferRates:
    """Bytes per second by source."""

    def __init__(self) -> None:
        self._rates: OrderedDict[str, Rate] = OrderedDict()

    def pulled(self, source: str, size: int, seconds: float) -> None:
        """Learn from a pull of ``size`` bytes that took ``seconds`` to move."""
        if size < MIN_BYTES or seconds <= 0:
            return
        self._rates.setdefault(source, Rate(KEEP)).add(size, seconds)
        self._rates.move_to_end(source)
        if len(self._rates) > MAX_PEERS:
            self._rates.popitem(last=False)

    def snapshot(self) -> dict[str, float]:
        """Bytes per second by source, the latest pulled from first."""
        return {name: self._rates[name].per_second for name in reversed(self._rates)}
