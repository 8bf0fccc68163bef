"""A random story of faults from one seed: what the fixed-seed tests and the sweep run.

A cluster starts, lives through crashes, restarts, pauses, clock steps, partitions, one-way cuts and lossy paths, some
of them at once, all with loss, duplication and reordering; then it is left in peace and has to agree. The checkers
watch all along. A node that comes back does so with a higher boot counter, or, now and then, with a lost one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from gossip.config import GossipConfig
from gossip.simulator.simulator import Simulator

#: Within so many calm seconds everybody agrees again: the longest pause between two dials of a lost peer, and a bit.
CALM_S = 20.0
#: Virtual seconds between two faults, at most, and of one fault.
GAP_S, FAULT_S = 3.0, 12.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a story was, for the report: `calm_s` is how long agreement took once it was over."""

    seed: int
    size: int
    seconds: float
    calm_s: float
    counts: dict[str, int]


class Chaos:
    """One story. `seconds`: how long the faults go on."""

    def __init__(self, seed: int, size: int, seconds: float) -> None:
        self._dice = random.Random(seed)
        self._seed, self._size, self._seconds = seed, size, seconds
        config = GossipConfig.lan(nodes=size, dead_keep_s=40.0, gossip_to_dead_s=10.0, push_pull_interval_s=5.0)
        self.sim = Simulator(seed, config, loss=0.05, duplication=0.03, reordering=0.02, record=False)
        self._boots = {f"n{i}": 1 for i in range(size)}

    def run(self) -> Outcome:
        """Live it. :raises AssertionError: a checker found something, or they do not agree in the end."""
        sim = self.sim
        sim.cluster(self._size)
        sim.load_rows()
        sim.run(2.0)
        faults = [self._crash, self._pause, self._step, self._skew, self._partition, self._cut, self._lossy, self._heal]
        while sim.now < self._seconds:
            self._dice.choice(faults)()
            sim.run(self._dice.uniform(0.1, GAP_S))
        for name in [n.name for n in sim.nodes.values() if not n.running]:
            self._restart(name)
        sim.run(max(0.0, max(n.paused_until for n in sim.running()) - sim.now))
        took = sim.calm(CALM_S)
        sim.validate()
        sim.report.require(lost=1, delivered=100)
        return Outcome(self._seed, self._size, sim.now, took, dict(sim.report))

    def _one(self) -> str:
        return self._dice.choice([n.name for n in self.sim.running()])

    def _for_a_while(self) -> float:
        return self._dice.uniform(0.2, FAULT_S)

    def _crash(self) -> None:
        if len(self.sim.running()) > 1:
            name = self._one()
            self.sim.crash(name)
            self.sim.at(self.sim.now + self._for_a_while(), self._restart, name)

    def _restart(self, name: str) -> None:
        if self.sim.nodes[name].running:
            return
        lost_its_counter = self._dice.random() < 0.1
        self._boots[name] = 1 if lost_its_counter else self._boots[name] + 1
        others = [n.name for n in self.sim.running()]
        seeds = self._dice.sample(others, min(2, len(others)))
        self.sim.restart(name, incarnation=self._boots[name], seeds=seeds)

    def _pause(self) -> None:
        self.sim.pause(self._one(), self._for_a_while())

    def _step(self) -> None:
        self.sim.step_clock(self._one(), self._for_a_while())

    def _skew(self) -> None:
        self.sim.skew_clock(self._one(), self._dice.uniform(0.95, 1.05))

    def _partition(self) -> None:
        names = list(self.sim.nodes)
        self._dice.shuffle(names)
        at = self._dice.randrange(1, len(names))
        self.sim.partition(names[:at], names[at:])
        self.sim.at(self.sim.now + self._for_a_while(), self.sim.heal)

    def _cut(self) -> None:
        self.sim.cut(self._one(), self._one())

    def _lossy(self) -> None:
        self.sim.network.set_loss(self._one(), self._one(), self._dice.uniform(0.2, 1.0))

    def _heal(self) -> None:
        self.sim.heal()
