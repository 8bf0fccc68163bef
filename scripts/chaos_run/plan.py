"""What is broken when: a seeded plan, made before anything runs. No clock, no process.

Rules
1. The same nodes, length and seed give the same plan.
2. At most `down_share` of the nodes (and never more than all but two) are disturbed at once; one that was disturbed is
   left alone until it has had `rest_s` to come back.
3. Nothing begins in the first or last `calm_s`, and everything has ended before the last `calm_s` begin.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random


class What(enum.Enum):
    """What can be done to a cluster."""

    KILL_NODE = "kill_node"  # SIGKILL to the node process; started again at the end of the strike
    KILL_ENGINE = "kill_engine"  # SIGKILL to the engine; its own node has to bring it back
    STOP_NODE = "stop_node"  # SIGSTOP to the node process, SIGCONT at the end
    STOP_ENGINE = "stop_engine"  # SIGSTOP to the engine, SIGCONT at the end if it is still that process
    CUT_LINK = "cut_link"  # two nodes cannot reach each other
    CUT_NODE = "cut_node"  # one node cannot reach any other; clients reach it
    DRAIN = "drain"  # /admin/drain, and at the end /admin/undrain
    RESTART = "restart"  # SIGTERM, that drains; started again when it has ended
    FILL = "fill"  # a burst of long new prompts at one node
    GARBAGE = "garbage"  # nonsense to its HTTP, gossip and KV ports


@dataclass(frozen=True, slots=True)
class Kind:
    """How often one kind is drawn, and for how long it lasts, seconds."""

    weight: float
    least_s: float
    most_s: float
    #: It takes the node (or a link of it) away from the others.
    disturbs: bool = True
    #: How long it goes on by itself after that, at most: a node that is asked to end finishes what it runs.
    trails_s: float = 0.0


KINDS: Mapping[What, Kind] = {
    What.KILL_NODE: Kind(3.0, 0.5, 4.0),
    What.KILL_ENGINE: Kind(3.0, 0.0, 0.0),
    What.STOP_NODE: Kind(1.0, 0.3, 8.0),
    What.STOP_ENGINE: Kind(1.5, 0.3, 12.0),
    What.CUT_LINK: Kind(1.0, 1.0, 10.0),
    What.CUT_NODE: Kind(1.0, 1.0, 8.0),
    What.DRAIN: Kind(1.0, 2.0, 8.0),
    What.RESTART: Kind(1.0, 0.0, 0.0, trails_s=6.0),
    What.FILL: Kind(0.7, 0.0, 0.0, disturbs=False),
    What.GARBAGE: Kind(0.8, 0.0, 0.0, disturbs=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """How dense a plan is; seconds."""

    #: Between two strikes, in the mean; each pause is 0.5 to 1.5 times that.
    every_s: float = 4.0
    calm_s: float = 6.0
    #: For a node to start, to be known to all and to have its engine ready.
    rest_s: float = 8.0
    down_share: float = 0.25


@dataclass(frozen=True, slots=True)
class Strike:
    """One thing that is done. `peer` is the other end of a cut link."""

    number: int
    at_s: float
    what: What
    node: str
    lasts_s: float
    peer: str = ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Who is disturbed."""
        return (self.node, self.peer) if self.peer else (self.node,)


def make_plan(
    nodes: Sequence[str],
    seconds: float,
    seed: int,
    config: PlanConfig | None = None,
    leave_out: Collection[What] = (),
) -> tuple[Strike, ...]:
    """The strikes on `nodes` in a run of that length, in order of time."""
    config = config or PlanConfig()
    rng = Random(seed)
    kinds = [what for what in KINDS if what not in leave_out]
    most_down = max(1, min(int(len(nodes) * config.down_share), len(nodes) - 2))
    free_at = dict.fromkeys(nodes, 0.0)
    strikes: list[Strike] = []
    now = config.calm_s
    while kinds and now < seconds - config.calm_s:
        what = rng.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        free = [node for node in nodes if free_at[node] <= now]
        found = _draw(what, free, most_down - (len(nodes) - len(free)), rng)
        lasts_s = rng.uniform(KINDS[what].least_s, KINDS[what].most_s)
        if found and now + lasts_s < seconds - config.calm_s:
            strikes.append(Strike(len(strikes) + 1, round(now, 3), what, found[0], round(lasts_s, 3), *found[1:]))
            if KINDS[what].disturbs:
                free_at |= dict.fromkeys(found, now + lasts_s + KINDS[what].trails_s + config.rest_s)
        now += config.every_s * rng.uniform(0.5, 1.5)
    return tuple(strikes)


def _draw(what: What, free: Sequence[str], room: int, rng: Random) -> list[str]:
    """Whom it hits of those that are well; nobody when too many are disturbed already."""
    wanted = 2 if what is What.CUT_LINK else 1
    room = room if KINDS[what].disturbs else wanted
    # A cut link takes no node away: both ends still serve, so it needs room for one.
    if len(free) < wanted or room < 1:
        return []
    return rng.sample(free, wanted)
