"""How long it takes to fetch KV blocks from a peer, and whether that pays.

    pull      = lookup + round trip + n*b/net + n*b/memory + step   (several sources: `node.policy.best_pull`)
    recompute = n / prefill rate
    pulling pays when pull < margin * recompute

n: tokens to fetch, b: bytes of KV per token, step: the engine only takes blocks in at step boundaries.
The margin keeps a pull that is hardly worth it, and may fail, from being tried. Rates are learnt: the target
measures how fast it pulls from each peer and gossips it in its latency vector, beside how fast its engine copies out of
the pool; a pair that never pulled is taken to be as fast as others, and tried out with a small pull now and then. The
formula itself is `kvmigrate.planner`'s; this adds what routing knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmigrate import planner
from kvmigrate.planner import MARGIN, MIN_RATE_BYTES, PRIOR_LOOKUP_S, PRIOR_MEMORY_BYTES_S, PRIOR_NET_BYTES_S
from node.kv_sources import MORE_SOURCES

#: Round trip from which two nodes are not taken for neighbours, in milliseconds.
FAR_MS = 5.0


@dataclass(frozen=True, slots=True)
class PullModel:
    """The formula with what is not learnt per peer. Priors are those of `kvmigrate.planner`."""

    #: Resolving chunks at the source, and waiting for the engine's next step, in milliseconds.
    lookup_ms: float = PRIOR_LOOKUP_S * 1000
    step_ms: float = 10.0
    #: Bytes per second: network of a peer never pulled from; pool to paged memory where no engine copied yet.
    default_net: float = PRIOR_NET_BYTES_S
    memory: float = PRIOR_MEMORY_BYTES_S
    #: Share of the recompute time that a pull must stay below.
    margin: float = MARGIN
    #: Pairs of nodes that never pulled are tried out now and then: in so many of the requests where a network that is
    #: so many times faster than believed would make it worth while, with so many bytes (`explored`).
    explore_share: float = 1 / 16
    explore_faster: float = 16.0
    explore_bytes: int = 64 << 20
    #: Sources that may help the one that a plan names.
    more: int = MORE_SOURCES

    def guess(self, typical: float, rtt_ms: float) -> float:
        """Bytes per second between two nodes that never pulled: what is usual here, but no wonders over a long way."""
        return typical if typical and rtt_ms < FAR_MS else min(typical or self.default_net, self.default_net)

    def pull_ms(self, tokens: int, token_bytes: int, rtt_ms: float, net: float, copy_rate: float) -> float:
        """Milliseconds to fetch `tokens`; `net` and `copy_rate` in bytes per second, 0 = never measured."""
        move_s = planner.move_s(tokens, token_bytes, net or self.default_net, copy_rate or self.memory)
        return self.lookup_ms + rtt_ms + move_s * 1000 + self.step_ms

    def explored(  # noqa: PLR0917 - as `pull_ms`
        self, tokens: int, token_bytes: int, rtt_ms: float, net: float, copy_rate: float, recompute_ms: float
    ) -> int:
        """How many of `tokens` to fetch only to learn how fast that is; 0 = it would teach nothing.

        At least what `kvmigrate.planner` takes for a measurement, and few enough to cost little on a slow network.
        """
        best_ms = self.pull_ms(tokens, token_bytes, rtt_ms, net * self.explore_faster, copy_rate)
        if tokens * token_bytes < 2 * MIN_RATE_BYTES or not self.pays(best_ms, recompute_ms):
            return 0
        return min(tokens, max(2 * MIN_RATE_BYTES, self.explore_bytes) // token_bytes)

    def pays(self, pull_ms: float, recompute_ms: float) -> bool:
        """Whether fetching beats computing by the margin."""
        return planner.pays(pull_ms, recompute_ms, self.margin)
