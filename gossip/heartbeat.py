"""The load plane as a heartbeat: a row that stays old longer than its plane explains has its owner probed at once.

Everybody's row is renewed several times a second and gets everywhere within a second or two, so that a crash shows at
all observers at about the same age of its last row, long before a round of probes gets there.

Rules
1. How old a row may be is learnt: `AGE_FACTOR` times the 90th percentile of all ages here, smoothed, and at least
   `LEAST_TICKS` gossip intervals. Where everything is old, which is our own fault or a partition's, the bound rises.
2. Only a row that its owner renews regularly counts, at least three times within the least bound.
3. All observers see the same thing, so each looks at `DOUBTERS` of its n rows per tick only: a live node with an old
   row gets a few pings, not n of them. A row is doubted once by each.
4. A doubt is a probe out of turn and nothing more: only a probe that fails, also through peers and TCP, accuses.
5. Whoever is itself unwell doubts nobody: after a late tick the rows first get time to arrive, and when probes fail
   without a word from the helpers (`health`), the fault is here. A few doubts at a time, so that this is found out
   before many are accused.
"""

from __future__ import annotations

from collections.abc import Callable

from gossip.health import LocalHealth
from gossip.hub import Hub
from gossip.member import Member
from gossip.membership import Membership
from gossip.row_table import RowTable

#: Rule 1.
AGE_FACTOR = 1.25
QUANTILE = 0.9
#: Rows that are looked at for it, about; in a large cluster all of them would cost more than they tell.
SAMPLE = 50
LEAST_TICKS = 5
#: Weight of one tick in the smoothed percentile: it follows within about three seconds.
GAIN = 1 / 16
#: Renewals that must have been seen (rule 2), and per bound of age.
LEAST_RENEWALS = 3
#: Rows that are looked at per tick, and so about the number of nodes that probe a doubtful one per tick (rule 3).
DOUBTERS = 6
#: Worst own health at which others are still doubted (rule 5).
MAX_SCORE = 1
#: Gossip intervals of patience after a tick that came late (rule 5).
PATIENCE_TICKS = 5


class Heartbeat:
    """Watches ages at each gossip tick. `doubt(member, now)` asks for a probe and says whether there was room."""

    def __init__(
        self, hub: Hub, membership: Membership, health: LocalHealth, doubt: Callable[[Member, float], bool]
    ) -> None:
        self._hub = hub
        self._membership = membership
        self._health = health
        self._doubt = doubt
        self._usual_s = 0.0
        self._ticked_at = float("-inf")
        self._patient_until = float("-inf")

    @property
    def bound_s(self) -> float:
        """How old a row may be before its owner is doubted, in seconds."""
        return max(LEAST_TICKS * self._hub.config.gossip_interval_s, AGE_FACTOR * self._usual_s)

    def tick(self, rows: RowTable, oldest: float, now: float) -> None:
        """Look at the rows of others; those set before `oldest` are given up, and count for nothing."""
        interval = self._hub.config.gossip_interval_s
        if now - self._ticked_at > 2 * interval:
            self._patient_until = now + PATIENCE_TICKS * interval
        self._ticked_at = now
        if now < self._patient_until or self._hub.leaving:
            return
        sample = sorted(at for at in rows.set_at[:: 1 + len(rows) // SAMPLE] if at >= oldest)
        if sample:
            usual = now - sample[int((1 - QUANTILE) * (len(sample) - 1))]
            self._usual_s += (usual - self._usual_s) * GAIN
            self._doubt_old(rows, oldest, now)

    def _doubt_old(self, rows: RowTable, oldest: float, now: float) -> None:
        latest, first = now - self.bound_s, self._hub.rng.randrange(len(rows))
        for number in range(first, first + min(DOUBTERS, len(rows))):
            slot = number % len(rows)
            if (
                not oldest <= rows.set_at[slot] < latest
                or rows.doubted[slot]
                or not self._renewed_regularly(rows, slot)
            ):
                continue
            if self._health.score > MAX_SCORE:
                return
            member = self._membership.up(rows.rows[slot].name)
            if member is not None and self._doubt(member, now):
                rows.doubted[slot] = True
                self._hub.counters["doubts"] += 1

    def _renewed_regularly(self, rows: RowTable, slot: int) -> bool:
        often = LEAST_TICKS * self._hub.config.gossip_interval_s / LEAST_RENEWALS
        return rows.renewals(slot) >= LEAST_RENEWALS and rows.period_s(slot) <= often
