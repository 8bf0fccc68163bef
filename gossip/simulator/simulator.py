"""A cluster in virtual time: one seed, one agenda, real bytes through the codec.

Rules
1. Nothing here decides for an endpoint: it is fed what its shell would feed it, and its actions are carried out.
2. Latency, loss, duplication, reordering, cuts, crashes, restarts, pauses and clock steps all follow from the seed.
3. The checkers see every event, and look at everybody every `INSPECT_S` virtual seconds and at `validate()`.
4. `report` counts what really happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gossip import actions as io
from gossip.config import GossipConfig
from gossip.decode import decode_packet
from gossip.endpoint import Endpoint
from gossip.events import GossipEvent, MemberChanged, NameConflict, SlowReset
from gossip.identity import Address, Identity
from gossip.member import MemberState
from gossip.simulator.agenda import Agenda
from gossip.simulator.checkers import Checker, standard_checkers
from gossip.simulator.clock import Clock
from gossip.simulator.delivery import Delivery
from gossip.simulator.network import Network
from gossip.simulator.node import INBOX, SimNode
from gossip.simulator.report import Report
from gossip.simulator.witness import Witness

#: Virtual seconds between two inspections by the checkers.
INSPECT_S = 1.0
#: A node that was paused is not yet well for this many seconds: its word that it is back has to travel.
GRACE_S = 1.0
#: Decoded packets that are remembered for their further receivers: those of about 10 ms of a thousand nodes.
REMEMBERED = 1024
#: A timer fires this much late, in seconds, so that rounding of the clock's offset never makes it early.
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The load rows that nodes set."""

    payload: bytes
    every_s: float


class Simulator:
    """The machine. `checkers`: None for all of them; a bench of 1000 nodes passes none. `record`: keep every event.
    `subnet` and `port` make the addresses that nodes get.
    """

    def __init__(
        self,
        seed: int = 1,
        config: GossipConfig | None = None,
        *,
        latency: tuple[float, float] = (0.0003, 0.002),
        loss: float = 0.0,
        duplication: float = 0.0,
        reordering: float = 0.0,
        checkers: Sequence[Checker] | None = None,
        record: bool = True,
        subnet: str = "10.0",
        port: int = 7946,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config or GossipConfig.lan()
        self.network = Network(self.rng, latency, loss, duplication, reordering)
        self.checkers = list(checkers) if checkers is not None else standard_checkers()
        self.record = record
        self.nodes: dict[str, SimNode] = {}
        self.report = Report()
        self.witness = Witness(self.report, self._is_well)
        #: Called with every event after the checkers.
        self.listener: Callable[[SimNode, GossipEvent], None] | None = None
        self._agenda = Agenda()
        self._delivery = Delivery(self._agenda, self.network, self.report, self._feed)
        #: Every datagram is decoded, but one that went to several nodes only once: packets are immutable.
        self._decode = lru_cache(maxsize=REMEMBERED)(decode_packet)
        self._boots = 0
        self._homes = 0
        self._subnet, self._port = subnet, port
        self._load: Load | None = None
        if self.checkers:
            self.at(INSPECT_S, self._inspect)

    # --- building -----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        incarnation: int = 1,
        address: Address | None = None,
        seeds: Iterable[str] = (),
        cluster: str = "test",
        config: GossipConfig | None = None,
    ) -> SimNode:
        """Start a node; it replaces one that is at the same address. `seeds` are names of nodes."""
        if address is None:
            self._homes += 1
            address = (f"{self._subnet}.{self._homes // 250}.{self._homes % 250 + 1}", self._port)
        self._boots += 1
        identity = Identity(name, cluster, incarnation, *address, meta=name.encode())
        clock = Clock(self.rng.uniform(10, 100_000) - self.now)
        endpoint = Endpoint(identity, config or self.config, random.Random(self.rng.random()), decode=self._decode)
        node = SimNode(name, self._boots, endpoint, address, clock)
        self._delivery.move_in(node)
        targets = tuple(self.nodes[s].address for s in seeds)
        self.nodes[name] = node
        self._feed(node, io.Started())
        if targets:
            self._feed(node, io.SeedsAdded(targets))
        self._start_rows(node)
        return node

    def cluster(self, size: int) -> list[SimNode]:
        """Start `size` nodes at once that know the first one as their seed."""
        first = self.add("n0")
        return [first, *(self.add(f"n{i}", seeds=["n0"]) for i in range(1, size))]

    def load_rows(self, payload_bytes: int = 32, every_s: float = 0.2) -> None:
        """Let every node, also later ones, set a load row of this size again and again, each at its own phase."""
        self._load = Load(b"r" * payload_bytes, every_s)
        for node in self.running():
            self._start_rows(node)

    def stop_rows(self) -> None:
        """Let no node renew its row any more."""
        self._load = None

    def _start_rows(self, node: SimNode) -> None:
        if self._load is not None:
            self.at(self.now + self._load.every_s * self.rng.random(), self._set_row, node, self._load)

    def _set_row(self, node: SimNode, load: Load) -> None:
        if node.running and self._load is load:
            if node.paused_until <= self.now:
                self._feed(node, io.RowSet(load.payload))
            self.at(self.now + load.every_s, self._set_row, node, load)

    # --- faults -------------------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        """Stop a process without a word; its host refuses streams from now on."""
        self.nodes[name].running = False
        self.report["crashes"] += 1

    def restart(
        self, name: str, *, incarnation: int, seeds: Iterable[str] = (), address: Address | None = None
    ) -> SimNode:
        """Start a node again, whether it had crashed or not, where it was or at another address."""
        old = self.nodes[name]
        old.running = False
        self.report["restarts"] += 1
        return self.add(name, incarnation=incarnation, address=address or old.address, seeds=seeds)

    def pause(self, name: str, seconds: float) -> None:
        """Stop a process for a while, as SIGSTOP does: its socket fills up, its timers come late."""
        node = self.nodes[name]
        node.paused_until = max(node.paused_until, self.now + seconds)
        self.report["pauses"] += 1
        self.at(node.paused_until, self._resume, node)

    def step_clock(self, name: str, seconds: float) -> None:
        """Let a node's monotonic clock jump ahead, as after its machine was suspended."""
        node = self.nodes[name]
        node.clock.step(seconds)
        self.report["clock_steps"] += 1
        self._rearm(node)

    def skew_clock(self, name: str, rate: float) -> None:
        """Let a node's clock run at another pace from now on."""
        node = self.nodes[name]
        node.clock.set_rate(rate, self.now)
        self.report["clock_steps"] += 1
        self._rearm(node)

    def cut(self, sender: str, receiver: str) -> None:
        """Lose everything from one node to another, in this direction only."""
        self.network.cut(sender, receiver)

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut all paths between the groups."""
        self.report["partitions"] += 1
        self.network.partition(groups)

    def heal(self) -> None:
        """End all cuts and directed losses."""
        self.network.heal()

    # --- running ------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._agenda.now

    def at(self, moment: float, what: Callable[..., None], *args: Any) -> None:
        """Do something at a moment of virtual time."""
        self._agenda.at(moment, what, *args)

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._agenda.run(seconds)

    def run_until(self, holds: Callable[[], bool], limit: float, step: float = 0.05) -> float:
        """Run until the condition holds; gives the virtual seconds it took.

        :raises AssertionError: it did not hold within `limit` seconds.
        """
        start = self.now
        while not holds():
            if self.now - start >= limit:
                raise AssertionError(f"not within {limit} virtual seconds: {self.states()}")
            self.run(step)
        return self.now - start

    def calm(self, within_s: float) -> float:
        """End all faults of the network and wait until everybody agrees; gives the virtual seconds it took.

        :raises AssertionError: they do not within `within_s` seconds.
        """
        self.heal()
        self.network.loss = self.network.duplication = self.network.reordering = 0.0
        return self.run_until(self.agreed, within_s)

    def do(self, name: str, event: io.Input) -> None:
        """Feed a node by hand."""
        self._feed(self.nodes[name], event)

    # --- questions ----------------------------------------------------------------------------------------------------

    def clock(self, node: SimNode) -> float:
        """What the node's own clock shows now."""
        return node.clock.read(self.now)

    def running(self) -> list[SimNode]:
        """Every node that was started and has not crashed; paused ones run."""
        return [n for n in self.nodes.values() if n.running]

    def state(self, observer: str, subject: str) -> MemberState | None:
        """What one node believes of another, None for a stranger."""
        view = self.nodes[observer].endpoint.member(subject, self.clock(self.nodes[observer]))
        return view.state if view else None

    def states(self) -> dict[str, dict[str, str]]:
        """Who holds whom for anything but alive; for the story of a failure."""
        return {
            n.name: {m.name: m.state.value for m in n.endpoint.membership if m.state is not MemberState.ALIVE}
            for n in self.running()
        }

    def agreed(self) -> bool:
        """Every running node holds exactly the running ones for alive."""
        alive = {n.name for n in self.running()}
        observers = self.running()
        if any(len(n.up) != len(alive) - 1 or n.suspects for n in observers):
            return False
        return all(n.up <= alive for n in observers)

    def all_say(self, subject: str, state: MemberState | None) -> bool:
        """Every other running node believes that of the subject."""
        return all(self.state(n.name, subject) is state for n in self.running() if n.name != subject)

    def false_deaths(self) -> int:
        """How often a node was held for dead that was well; see `Report`."""
        return self.report["false_deaths"]

    def validate(self) -> None:
        """Let every checker look. :raises Violation: one found something."""
        for checker in self.checkers:
            checker.inspect(self.nodes, self.now)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _inspect(self) -> None:
        self.validate()
        self.at(self.now + INSPECT_S, self._inspect)

    def _feed(self, node: SimNode, event: io.Input) -> None:
        if not node.running:
            return
        if node.paused_until > self.now:
            if len(node.inbox) < INBOX:
                node.inbox.append(event)
            else:
                self.report["inbox_lost"] += 1
            return
        self._perform(node, node.endpoint.handle(event, node.clock.read(self.now)))

    def _resume(self, node: SimNode) -> None:
        if node.paused_until > self.now or not node.running:
            return
        # Timers first: the worst order, and what an event loop does.
        self._perform(node, node.endpoint.handle_timeout(node.clock.read(self.now)))
        inbox, node.inbox = node.inbox, []
        for event in inbox:
            self._feed(node, event)

    def _timer(self, node: SimNode, at: float) -> None:
        if node.timer_at != at:
            return
        node.timer_at = node.deadline = None
        if node.running and node.paused_until <= self.now:
            self._perform(node, node.endpoint.handle_timeout(node.clock.read(self.now)))

    def _rearm(self, node: SimNode) -> None:
        node.timer_at = node.deadline = None
        self._arm(node)

    def _arm(self, node: SimNode) -> None:
        due = node.endpoint.next_deadline()
        if due is None or (node.deadline is not None and node.deadline <= due):
            return
        at = max(self.now, node.clock.moment(due)) + _ROUNDING_S
        node.timer_at, node.deadline = at, due
        self.at(at, self._timer, node, at)

    def _perform(self, node: SimNode, actions: list[io.Action]) -> None:
        delivery = self._delivery
        for action in actions:
            match action:
                case io.SendDatagram():
                    delivery.send(node, action)
                case io.RowsReceived():
                    pass  # rows are asked for by those who want them
                case io.Notify():
                    self._note(node, action.event)
                case io.OpenStream():
                    delivery.open(node, action)
                case io.ReplyStream():
                    delivery.reply(node, action.stream, action.data)
                case io.CloseStream():
                    delivery.reply(node, action.stream, None)
        delivery.depart()
        self._arm(node)

    # --- what listeners hear ------------------------------------------------------------------------------------------

    def _note(self, node: SimNode, event: GossipEvent) -> None:
        if self.record:
            node.events.append((self.now, event))
        for checker in self.checkers:
            checker.observe(node, event, self.now)
        match event:
            case MemberChanged(view, previous):
                node.believe(view.name, view.state)
                self.witness.saw(node.name, view)
                self.report["joins_seen"] += previous is None
            case SlowReset():
                self.report["resets"] += 1
            case NameConflict():
                self.report["conflicts"] += 1
        if self.listener is not None:
            self.listener(node, event)

    def _is_well(self, name: str, observer: str) -> bool:
        subject, network = self.nodes.get(name), self.network
        if subject is None or not subject.running or subject.paused_until > self.now - GRACE_S:
            return False
        return network.passes(name, observer) and network.passes(observer, name)
