"""A member of the cluster: its states, the record we keep, the view that others get."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gossip.identity import Address
from gossip.incarnation import boot_of, refutations_of
from gossip.suspicion import Suspicion


class MemberState(enum.Enum):
    """What we believe about a member. Values are the words of `/gossip/state`."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"

    @property
    def is_up(self) -> bool:
        """Alive or suspect: still a member, still probed, still holding rows and slow state."""
        return self is MemberState.ALIVE or self is MemberState.SUSPECT


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as seen from here, at one moment.

    `incarnation` is the boot counter, `refutations` how often that boot has had to refute an accusation. `verified`
    is False for a member known from hearsay only: nothing has come from its own address yet. `rtt_s` is smoothed.
    """

    name: str
    incarnation: int
    host: str
    port: int
    meta: bytes
    state: MemberState
    state_age_s: float
    rtt_s: float | None
    is_self: bool
    suspected_by: tuple[str, ...]
    refutations: int = 0
    verified: bool = True


@dataclass(slots=True)
class Member:
    """The record of one other node. `incarnation` is the packed form of `gossip.incarnation`."""

    name: str
    incarnation: int
    host: str
    port: int
    meta: bytes
    state: MemberState
    state_since: float
    verified: bool = False
    #: Present exactly while the state is SUSPECT.
    suspicion: Suspicion | None = None
    #: When we last told this node, directly, that it is held for dead.
    told_at: float = field(default=float("-inf"))

    @property
    def address(self) -> Address:
        """Host and port as one pair."""
        return (self.host, self.port)

    @property
    def boot(self) -> int:
        """Boot counter of the incarnation."""
        return boot_of(self.incarnation)

    def view(self, now: float, rtt_s: float | None) -> MemberView:
        """Give the public, immutable view."""
        return MemberView(
            name=self.name,
            incarnation=self.boot,
            host=self.host,
            port=self.port,
            meta=self.meta,
            state=self.state,
            state_age_s=max(0.0, now - self.state_since),
            rtt_s=rtt_s,
            is_self=False,
            suspected_by=self.suspicion.accusers if self.suspicion else (),
            refutations=refutations_of(self.incarnation),
            verified=self.verified,
        )
