"""What the gossip bench does to a simulated cluster, and what it reads off. All times are virtual seconds."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from gossip import GossipConfig, GossipEvent, MemberChanged, MemberState
from gossip.identity import Address
from gossip.simulator import SimNode, Simulator

#: Load rows as in the notes: 32 bytes, renewed with every gossip tick.
ROW_BYTES = 32
ROW_EVERY_S = 0.2
#: Lower and upper end of a stall, and of the time between two stalls of a sick node, in seconds.
STALL_S = (1.0, 5.0)
AWAKE_S = (0.5, 5.0)
#: Observers whose rows are read for the ages; all of them in smaller clusters.
OBSERVERS = 50
#: How finely it is seen when everybody agrees.
STEP_S = 0.02


def build(size: int, seed: int, subnet: str, port: int, last: Address) -> tuple[Simulator, float]:
    """Start everybody at once, the last one at that address; gives the cluster, and how long it took to agree."""
    sim = Simulator(seed, GossipConfig.lan(nodes=size), checkers=[], record=False, subnet=subnet, port=port)
    sim.cluster(size - 1)
    sim.add(f"n{size - 1}", address=last, seeds=["n0"])
    return sim, sim.run_until(sim.agreed, 120, STEP_S)


def settle(sim: Simulator, limit: float = 120.0) -> None:
    """Let the rumours of the start run out, so that what follows is the steady state."""
    sim.run_until(lambda: not any(len(n.endpoint.membership.broadcasts) for n in sim.running()), limit, 0.5)


@dataclass(frozen=True, slots=True)
class Steady:
    """The steady state over a window. Ages in seconds, bytes per node and second, times per virtual second."""

    ages: list[float]
    missing: int
    bytes_out: float
    bytes_in: float
    datagrams_out: float
    cpu_s: float
    wall_s: float


def steady(sim: Simulator, window: float, row_bytes: int = ROW_BYTES) -> Steady:
    """Renew rows, let them spread, then read ages and bytes for `window` seconds."""
    sim.load_rows(row_bytes, ROW_EVERY_S)
    sim.run(5.0)
    nodes, ages, missing = sim.running(), [], 0
    out, into, sent = (sum(getattr(n, f) for n in nodes) for f in ("bytes_out", "bytes_in", "datagrams_out"))
    cpu_s = wall_s = 0.0
    for _ in range(max(1, round(window / 0.25))):
        cpu, wall = time.process_time(), time.perf_counter()
        sim.run(0.25)
        cpu_s += time.process_time() - cpu
        wall_s += time.perf_counter() - wall
        for observer in nodes if len(nodes) <= OBSERVERS else sim.rng.sample(nodes, OBSERVERS):
            views = [observer.endpoint.row(n.name, sim.clock(observer)) for n in nodes]
            ages += [view.age_s for view in views if view is not None]
            missing += views.count(None)
    seconds, count = max(1, round(window / 0.25)) * 0.25, len(nodes)
    return Steady(
        sorted(ages),
        missing,
        (sum(n.bytes_out for n in nodes) - out) / count / seconds,
        (sum(n.bytes_in for n in nodes) - into) / count / seconds,
        (sum(n.datagrams_out for n in nodes) - sent) / count / seconds,
        cpu_s / seconds,
        wall_s / seconds,
    )


def join(sim: Simulator, repeats: int) -> list[float]:
    """Let newcomers join through a random member; how long until each is known to all, and knows all."""
    took = []
    for i in range(repeats):
        host = sim.rng.choice(sim.running()).name
        sim.add(f"late{i}", seeds=[host])
        took.append(sim.run_until(sim.agreed, 60, STEP_S))
        sim.run(1.0)
    return sorted(took)


class Crashes:
    """Crashes nodes one after another and notes when the last observer knew. Each is restarted a while later."""

    #: Seconds from a crash to the restart; all know by then, or it counts as this long.
    REST_S = 20.0

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._waiting: dict[str, tuple[float, set[str]]] = {}
        #: Seconds until all knew, per crash; and until each observer did.
        self.known_to_all: list[float] = []
        self.known_to_each: list[float] = []

    def run(self, count: int, gap: float) -> None:
        """Crash `count` nodes, one every `gap` seconds."""
        self._sim.listener = self._heard
        for _ in range(count):
            self._crash(self._sim.rng.choice([n.name for n in self._sim.running() if n.name not in self._waiting]))
            self._sim.run(gap)
        self._sim.run_until(lambda: not self._waiting, 2 * self.REST_S)
        self._sim.listener = None
        self._sim.run(5.0)

    def _crash(self, name: str) -> None:
        self._sim.crash(name)
        for _, observers in self._waiting.values():
            observers.discard(name)
        # Who has just started itself and never met the victim has nothing to learn.
        self._waiting[name] = (self._sim.now, {n.name for n in self._sim.running() if name in n.up})
        self._sim.at(self._sim.now + self.REST_S, self._restart, name)

    def _heard(self, node: SimNode, event: GossipEvent) -> None:
        if not isinstance(event, MemberChanged) or event.view.state is not MemberState.DEAD:
            return
        since, observers = self._waiting.get(event.view.name, (0.0, set()))
        if node.name in observers:
            observers.discard(node.name)
            self.known_to_each.append(self._sim.now - since)
            if not observers:
                self.known_to_all.append(self._sim.now - since)

    def _restart(self, name: str) -> None:
        _, observers = self._waiting.pop(name)
        if observers:
            self.known_to_all.append(self.REST_S)
        old = self._sim.nodes[name].endpoint.identity.incarnation
        seed = next(n.name for n in self._sim.running())
        self._sim.restart(name, incarnation=old + 1, seeds=[seed])


def deaths_with_loss(sim: Simulator, seconds: float, loss: float) -> int:
    """Lose that share of all datagrams; how many times somebody well was held for dead."""
    before, sim.network.loss = sim.report["false_incidents"], loss
    lost = sim.report["lost"]
    sim.run(seconds)
    sim.network.loss = 0.0
    if loss and sim.report["lost"] <= lost:
        raise AssertionError("nothing was lost")
    return sim.report["false_incidents"] - before


@dataclass(frozen=True, slots=True)
class Stalls:
    """What stalls led to. A death is false if its subject had been awake for a second when somebody came to believe it;
    `deaths` are all, also those of nodes that were rightly held for dead while they stood still.
    """

    stalls: int
    deaths: int
    false_of_healthy: int
    false_of_stalled: int


def deaths_with_stalls(sim: Simulator, seconds: float, share: float, stall_s: tuple[float, float] = STALL_S) -> Stalls:
    """Let that share of the nodes stall again and again, for that long each time."""
    deaths, incidents, until = set(sim.witness.deaths), set(sim.witness.false), sim.now + seconds
    pauses = sim.report["pauses"]
    dice = random.Random(sim.rng.random())
    names = [n.name for n in sim.running()]
    sick = sim.rng.sample(names, max(1, round(share * len(names))))
    for name in sick:
        _stall(sim, name, until, dice, stall_s)
    sim.run(seconds)
    sim.run(10.0)
    false = sim.witness.false - incidents
    of_stalled = sum(name in sick for name, _, _ in false)
    return Stalls(sim.report["pauses"] - pauses, len(sim.witness.deaths - deaths), len(false) - of_stalled, of_stalled)


def _stall(sim: Simulator, name: str, until: float, dice: random.Random, stall_s: tuple[float, float]) -> None:
    if sim.now < until:
        stall = dice.uniform(*stall_s)
        sim.pause(name, stall)
        sim.at(sim.now + stall + dice.uniform(*AWAKE_S), _stall, sim, name, until, dice, stall_s)


def heal(sim: Simulator, seconds: float) -> float:
    """Cut the cluster in halves for a while; how long until all agree after that."""
    names = [n.name for n in sim.running()]
    sim.rng.shuffle(names)
    sim.partition(names[: len(names) // 2], names[len(names) // 2 :])
    sim.run(seconds)
    sim.heal()
    return sim.run_until(sim.agreed, 120, STEP_S)
