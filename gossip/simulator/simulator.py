"""A cluster in virtual time: one heap of (time, order, what), one seed, real bytes through the codec.

Rules
1. Nothing here decides for an endpoint: it is fed what its shell would feed it, and its actions are carried out.
2. Latency, loss, duplication, reordering, cuts, crashes, restarts, pauses and clock steps all follow from the seed.
3. The checkers see every event, and look at everybody every `INSPECT_S` virtual seconds and at `validate()`.
4. `report` counts what really happened.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from gossip import actions as io
from gossip.config import GossipConfig
from gossip.decode import decode_packet
from gossip.endpoint import Endpoint
from gossip.events import GossipEvent, MemberChanged, NameConflict, SlowReset
from gossip.identity import Address, Identity
from gossip.member import MemberState
from gossip.simulator.checkers import Checker, standard_checkers
from gossip.simulator.clock import Clock
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
        self.now = 0.0
        self.nodes: dict[str, SimNode] = {}
        self.report = Report()
        self.witness = Witness(self.report, self._is_well)
        #: Called with every event after the checkers.
        self.listener: Callable[[SimNode, GossipEvent], None] | None = None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._at: dict[Address, SimNode] = {}
        self._replies: dict[int, tuple[SimNode, int]] = {}
        self._streams = 0
        #: Every datagram is decoded, but one that went to several nodes only once: packets are immutable.
        self._decode = lru_cache(maxsize=REMEMBERED)(decode_packet)
        #: What the node at work has sent so far, by receiver.
        self._burst: dict[SimNode, list[io.DatagramReceived]] = {}
        self._boots = 0
        self._homes = 0
        self._subnet, self._port = subnet, port
        self._load: tuple[bytes, float] | None = None
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
        if address in self._at:
            self._at[address].running = False
        self._at[address] = node
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
        self._load = (b"r" * payload_bytes, every_s)
        for node in self.running():
            self._start_rows(node)

    def stop_rows(self) -> None:
        """Let no node renew its row any more."""
        self._load = None

    def _start_rows(self, node: SimNode) -> None:
        if self._load is not None:
            self.at(self.now + self._load[1] * self.rng.random(), self._set_row, node, self._load)

    def _set_row(self, node: SimNode, load: tuple[bytes, float]) -> None:
        if node.running and self._load is load:
            if node.paused_until <= self.now:
                self._feed(node, io.RowSet(load[0]))
            self.at(self.now + load[1], self._set_row, node, load)

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

    def at(self, moment: float, what: Callable[..., None], *args: Any) -> None:
        """Do something at a moment of virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (moment, self._order, what, args))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.now + seconds
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, what, args = pop(heap)
            what(*args)
        self.now = until

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

    def _receive(self, node: SimNode, events: Sequence[io.DatagramReceived]) -> None:
        for event in events:
            node.bytes_in += len(event.data)
            if node.recording is not None:
                node.recording.append((self.now, event.source, event.data))
            self._feed(node, event)

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
        for action in actions:
            match action:
                case io.SendDatagram():
                    self._send(node, action)
                case io.RowsReceived():
                    pass  # rows are asked for by those who want them
                case io.Notify():
                    self._note(node, action.event)
                case io.OpenStream():
                    self._open(node, action)
                case io.ReplyStream():
                    self._reply(node, action.stream, action.data)
                case io.CloseStream():
                    self._reply(node, action.stream, None)
        if self._burst:
            self._depart()
        self._arm(node)

    def _send(self, node: SimNode, action: io.SendDatagram) -> None:
        size = len(action.data)
        if size > node.endpoint.config.datagram_budget:
            raise AssertionError(f"{node.name} sends a datagram of {size} bytes")
        node.bytes_out += size
        node.datagrams_out += 1
        target, network = self._at.get(action.to), self.network
        if target is None or not target.running:
            return
        if not network.passes(node.name, target.name):
            self.report["cut"] += 1
        elif network.loses(node.name, target.name):
            self.report["lost"] += 1
        else:
            self.report["delivered"] += 1
            event = io.DatagramReceived(node.address, action.data)
            if network.duplicates():
                self.report["duplicated"] += 1
                self.at(self.now + network.delay(), self._receive, target, (event,))
            if network.reorders():
                self.at(self.now + network.delay() + network.lateness(), self._receive, target, (event,))
            else:
                self._burst.setdefault(target, []).append(event)

    def _depart(self) -> None:
        """What one node sent to another at one moment travels together, and keeps its order (rule 2 of `network`)."""
        for target, events in self._burst.items():
            self.at(self.now + self.network.delay(), self._receive, target, events)
        self._burst = {}

    def _open(self, node: SimNode, action: io.OpenStream) -> None:
        target, network = self._at.get(action.to), self.network
        node.bytes_out += len(action.data)
        if target is None or not target.running:
            failed = io.StreamFailed(action.session, "refused")
            self.at(self.now + network.delay(), self._feed, node, failed)
            return
        if not (network.passes(node.name, target.name) and network.passes(target.name, node.name)):
            self.report["cut"] += 1
            late = io.StreamFailed(action.session, "timeout")
            self.at(self.now + action.timeout_s, self._feed, node, late)
            return
        self._streams += 1
        self._replies[self._streams] = (node, action.session)
        self.report["streams"] += 1
        target.bytes_in += len(action.data)
        event = io.StreamRequested(self._streams, (node.address[0], 50_000), action.data)
        self.at(self.now + network.stream_delay(3), self._feed, target, event)
        self.at(self.now + action.timeout_s, self._give_up, self._streams)

    def _give_up(self, stream: int) -> None:
        if stream in self._replies:
            origin, session = self._replies.pop(stream)
            self._feed(origin, io.StreamFailed(session, "timeout"))

    def _reply(self, node: SimNode, stream: int, data: bytes | None) -> None:
        if stream not in self._replies:
            return  # too late: the opener has given up
        origin, session = self._replies.pop(stream)
        node.bytes_out += len(data or b"")
        origin.bytes_in += len(data or b"")
        event: io.Input = io.StreamReplied(session, data) if data else io.StreamFailed(session, "closed")
        self.at(self.now + self.network.stream_delay(1), self._feed, origin, event)

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
