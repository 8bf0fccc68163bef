"""Migrate or recompute: which is faster, from learnt rates. Pure.

Migrating n tokens pays when

    queue + lookup + rtt + step + n*b/net + n*b/memory  <  margin * n / prefill

b = KV bytes a token, net and memory in bytes/s, prefill in tokens/s, times in seconds. The left side has a part that
does not depend on n (fixed) and one that grows with it; when a token costs as much to move as to compute, no n pays
and the answer is never.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from .errors import LocalError

#: Migrate only when it takes at most this share of the recompute time: both sides are estimates, and a failed pull
#: costs its time on top of the recompute.
MARGIN: Final = 0.7
#: Weight of a new measurement: about the last five count.
ALPHA: Final = 0.3
#: Until something was measured: a 10 Gb/s link, and a lookup on it.
PRIOR_NET_BYTES_S: Final = 1.0e9
PRIOR_LOOKUP_S: Final = 0.005
#: Copy from the pool into paged memory, until measured.
PRIOR_MEMORY_BYTES_S: Final = 4.0e9
#: Transfers smaller than this say more about the fixed time than about the rate.
MIN_RATE_BYTES: Final = 1 << 20
MAX_PEERS: Final = 4096


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Return KV bytes of one token of a model with separate keys and values (not MLA)."""
    return 2 * layers * kv_heads * head_dim * element_bytes


def move_s(tokens: int, bytes_per_token: float, net_bytes_s: float, memory_bytes_s: float) -> float:
    """Seconds to bring `tokens` over the network and into paged memory, without what does not depend on them.

    The formula as a bare function: routing evaluates it for many (target, source) pairs of one request.
    """
    return tokens * bytes_per_token * (1 / net_bytes_s + 1 / memory_bytes_s)


def pays(migrate_s: float, recompute_s: float, margin: float = MARGIN) -> bool:
    """Whether migrating is worth it; any unit of time, the same for both."""
    return migrate_s < margin * recompute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What moving and computing cost now."""

    bytes_per_token: float
    net_bytes_s: float
    memory_bytes_s: float
    prefill_tokens_s: float
    fixed_s: float  #: queue at the source, lookup, round trip, and the engine step that the load waits for
    margin: float = MARGIN

    def __post_init__(self) -> None:
        """Refuse what would turn the comparison around or divide by zero."""
        rates = (self.bytes_per_token, self.net_bytes_s, self.memory_bytes_s, self.prefill_tokens_s)
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise LocalError("rates must be positive numbers")
        if not self.fixed_s >= 0 or not 0 < self.margin <= 1:
            raise LocalError("fixed_s must not be negative, margin must be in (0, 1]")

    @property
    def move_s_per_token(self) -> float:
        """Seconds that one more migrated token takes."""
        return move_s(1, self.bytes_per_token, self.net_bytes_s, self.memory_bytes_s)

    def migrate_s(self, tokens: int) -> float:
        """Seconds to migrate."""
        return self.fixed_s + move_s(tokens, self.bytes_per_token, self.net_bytes_s, self.memory_bytes_s)

    def recompute_s(self, tokens: int) -> float:
        """Seconds to compute."""
        return tokens / self.prefill_tokens_s

    @property
    def crossover_tokens(self) -> float:
        """Tokens above which migrating pays; infinity when it never does."""
        gain = self.margin / self.prefill_tokens_s - self.move_s_per_token
        return self.fixed_s / gain if gain > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, with both prices in seconds and a reason for people."""

    migrate: bool
    tokens: int
    migrate_s: float
    recompute_s: float
    crossover_tokens: float
    reason: str


def decide(costs: Costs, tokens: int) -> Verdict:
    """Migrate `tokens` tokens that a source has and we lack, or compute them?"""
    move, compute, crossover = costs.migrate_s(tokens), costs.recompute_s(tokens), costs.crossover_tokens
    if tokens <= 0:
        yes, reason = False, "nothing to migrate"
    elif math.isinf(crossover):
        yes, reason = False, "a token takes as long to move as to compute"
    elif not pays(move, compute, costs.margin):
        yes, reason = False, f"pays only above {math.ceil(crossover)} tokens"
    else:
        yes, reason = True, f"saves {(compute - move) * 1000:.0f} ms"
    return Verdict(yes, max(tokens, 0), move, compute, crossover, reason)


@dataclass(frozen=True, slots=True)
class PeerRates:
    """What pulls from one peer have shown."""

    net_bytes_s: float = PRIOR_NET_BYTES_S
    lookup_s: float = PRIOR_LOOKUP_S
    samples: int = 0
    #: Pulls among them that were large enough to measure the network.
    rated: int = 0


class RateBook:
    """Learnt averages: for each peer (the ones used last, bounded) network rate and lookup time; our memory rate.

    `copy_bytes_s` is how fast the engine, all its ranks together, copies out of the pool; 0 = never measured.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[str, PeerRates] = OrderedDict()
        self.copy_bytes_s = 0.0

    def peer(self, name: str) -> PeerRates:
        """Return a peer's rates, priors when nothing is known."""
        return self._peers.get(name, PeerRates())

    def pulled(self, name: str, nbytes: int, seconds: float, lookup_s: float) -> None:
        """Learn from a pull: `seconds` in all, `lookup_s` of them before the first block was asked for."""
        old = self.peer(name)
        rate, rated, transfer_s = old.net_bytes_s, old.rated, seconds - lookup_s
        if nbytes >= MIN_RATE_BYTES and transfer_s > 0:
            rate, rated = _mix(old.net_bytes_s, nbytes / transfer_s, rated), rated + 1
        lookup = _mix(old.lookup_s, max(lookup_s, 0.0), old.samples)
        self._peers[name] = PeerRates(rate, lookup, old.samples + 1, rated)
        self._peers.move_to_end(name)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Learn from the engine's copy out of the pool: `nbytes` of all ranks, which copy at the same time."""
        if nbytes >= MIN_RATE_BYTES and seconds > 0:
            self.copy_bytes_s = _mix(self.copy_bytes_s, nbytes / seconds, int(self.copy_bytes_s > 0))

    def network(self) -> dict[str, float]:
        """Measured bytes per second by peer, the one pulled from last first; what the latency vector carries."""
        return {name: self._peers[name].net_bytes_s for name in reversed(self._peers) if self._peers[name].rated}

    def forget(self, name: str) -> None:
        """A peer is gone for good."""
        self._peers.pop(name, None)

    def costs(
        self,
        name: str,
        *,
        bytes_per_token: float,
        prefill_tokens_s: float,
        rtt_s: float = 0.0,
        queue_s: float = 0.0,
        step_s: float = 0.0,
    ) -> Costs:
        """Return what a pull from a peer would cost; LocalError for rates that are not positive."""
        rates = self.peer(name)
        return Costs(
            bytes_per_token=bytes_per_token,
            net_bytes_s=rates.net_bytes_s,
            memory_bytes_s=self.copy_bytes_s or PRIOR_MEMORY_BYTES_S,
            prefill_tokens_s=prefill_tokens_s,
            fixed_s=queue_s + rates.lookup_s + rtt_s + step_s,
        )


def _mix(old: float, new: float, samples: int) -> float:
    """Return the new average; the first measurement replaces the prior."""
    return new if samples == 0 else old + ALPHA * (new - old)
