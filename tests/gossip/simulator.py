"""A virtual-time cluster: one heap of (time, order, what), one seed, real bytes through the codec.

Latency, loss (also per direction), duplication, reordering, partition, crash, restart, pause and clock offsets all
follow from the seed. Global checkers run on every event:

- a member's incarnation never falls at an observer, unless the observer had forgotten it;
- nobody returns from the dead without a higher incarnation;
- the listener's events rebuild exactly the state that the endpoint shows (`Node.mirror`).

`Simulator.stats` counts what really happened, so that a test can prove that its faults were there.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gossip import (
    Endpoint,
    GossipConfig,
    GossipEvent,
    Identity,
    MemberChanged,
    MemberState,
    NameConflict,
    SlowChanged,
    SlowReset,
)
from gossip import actions as io
from gossip.identity import Address

#: What a paused node's socket buffer holds; the rest is lost, as in a kernel.
INBOX = 400


@dataclass
class Node:
    endpoint: Endpoint
    address: Address
    clock_offset: float
    running: bool = True
    paused_until: float = 0.0
    timer_at: float | None = None
    inbox: list[io.Input] = field(default_factory=list)
    events: list[tuple[float, GossipEvent]] = field(default_factory=list)
    mirror: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    sent_bytes: int = 0
    sent_datagrams: int = 0

    @property
    def name(self) -> str:
        return self.endpoint.identity.name


class Simulator:
    def __init__(
        self,
        seed: int = 1,
        config: GossipConfig | None = None,
        *,
        latency: tuple[float, float] = (0.0003, 0.002),
        loss: float = 0.0,
        duplication: float = 0.0,
        reordering: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = config or GossipConfig.lan()
        self.latency, self.loss, self.duplication, self.reordering = latency, loss, duplication, reordering
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.stats: Counter[str] = Counter()
        self.observe: Callable[[Node, GossipEvent], None] | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._at: dict[Address, Node] = {}
        self._cut: set[tuple[str, str]] = set()
        self._streams = 0
        self._replies: dict[int, tuple[Node, int]] = {}

    # --- building -----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        incarnation: int = 1,
        address: Address | None = None,
        seeds: Iterable[str] = (),
        cluster: str = "test",
    ) -> Node:
        """Start a node; it replaces one that is at the same address."""
        if address is None:
            number = len(self._at) + 1
            address = (f"10.0.{number // 250}.{number % 250 + 1}", 7946)
        identity = Identity(name, cluster, incarnation, *address, meta=name.encode())
        offset = self.rng.uniform(10, 100_000)
        node = Node(Endpoint(identity, self.config, random.Random(self.rng.random())), address, offset)
        if address in self._at:
            self._at[address].running = False
        self._at[address] = node
        self.nodes[name] = node
        self._feed(node, io.Started())
        if targets := tuple(self.nodes[s].address for s in seeds):
            self._feed(node, io.SeedsAdded(targets))
        return node

    def cluster(self, size: int) -> list[Node]:
        """Start `size` nodes that know the first one as their seed."""
        first = self.add("n0")
        return [first, *(self.add(f"n{i}", seeds=["n0"]) for i in range(1, size))]

    # --- faults -------------------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        self.nodes[name].running = False
        self.stats["crashes"] += 1

    def restart(self, name: str, *, incarnation: int, seeds: Iterable[str] = ()) -> Node:
        old = self.nodes[name]
        old.running = False
        self.stats["restarts"] += 1
        return self.add(name, incarnation=incarnation, address=old.address, seeds=seeds)

    def pause(self, name: str, seconds: float) -> None:
        node = self.nodes[name]
        node.paused_until = self.now + seconds
        self.stats["pauses"] += 1
        self._at_time(node.paused_until, lambda: self._resume(node))

    def cut(self, sender: str, receiver: str) -> None:
        """Lose everything from one node to another, in this direction only."""
        self._cut.add((sender, receiver))

    def partition(self, *groups: Iterable[str]) -> None:
        sides = [set(group) for group in groups]
        for a in sides:
            for b in sides:
                if a is not b:
                    self._cut |= {(x, y) for x in a for y in b}

    def heal(self) -> None:
        self._cut.clear()

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, what = heapq.heappop(self._heap)
            what()
        self.now = until

    def run_until(self, holds: Callable[[], bool], limit: float, step: float = 0.05) -> float:
        """Run until the condition holds; gives the virtual seconds it took, fails after `limit` of them."""
        start = self.now
        while not holds():
            assert self.now - start < limit, f"not within {limit} virtual seconds: {self.states()}"
            self.run(step)
        return self.now - start

    def do(self, name: str, event: io.Input) -> None:
        self._feed(self.nodes[name], event)

    # --- questions ----------------------------------------------------------------------------------------------------

    def running(self) -> list[Node]:
        return [n for n in self.nodes.values() if n.running]

    def state(self, observer: str, subject: str) -> MemberState | None:
        view = self.nodes[observer].endpoint.member(subject, self.clock(self.nodes[observer]))
        return view.state if view else None

    def states(self) -> dict[str, dict[str, str]]:
        return {
            n.name: {
                v.name: v.state.value for v in n.endpoint.members(self.clock(n)) if v.state is not MemberState.ALIVE
            }
            for n in self.running()
        }

    def agreed(self) -> bool:
        """Every running node holds exactly the running ones for alive."""
        alive = {n.name for n in self.running()}
        return all(
            {v.name for v in n.endpoint.members(0) if v.state is MemberState.ALIVE} == alive
            and not any(v.state is MemberState.SUSPECT for v in n.endpoint.members(0))
            for n in self.running()
        )

    def all_say(self, subject: str, state: MemberState | None) -> bool:
        return all(self.state(n.name, subject) is state for n in self.running() if n.name != subject)

    def false_deaths(self) -> int:
        return self.stats["false_deaths"]

    def clock(self, node: Node) -> float:
        """The node's own monotonic clock: nodes do not share one."""
        return self.now + node.clock_offset

    def validate(self) -> None:
        for node in self.running():
            node.endpoint.validate()
            held = {n: dict(node.endpoint.slow_of(n)) for n in node.mirror}
            assert held == node.mirror, f"{node.name}: the events do not add up to the slow state"

    # --- the machine --------------------------------------------------------------------------------------------------

    def _at_time(self, at: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, what))

    def _feed(self, node: Node, event: io.Input) -> None:
        if not node.running:
            return
        if node.paused_until > self.now:
            if len(node.inbox) < INBOX:
                node.inbox.append(event)
            return
        self._perform(node, node.endpoint.handle(event, self.clock(node)))

    def _resume(self, node: Node) -> None:
        if node.paused_until > self.now or not node.running:
            return
        # Timers first: the worst order, and what an event loop does.
        self._perform(node, node.endpoint.handle_timeout(self.clock(node)))
        inbox, node.inbox = node.inbox, []
        for event in inbox:
            self._feed(node, event)

    def _timer(self, node: Node, at: float) -> None:
        if node.timer_at != at:
            return
        node.timer_at = None
        if node.running and node.paused_until <= self.now:
            self._perform(node, node.endpoint.handle_timeout(self.clock(node)))

    def _perform(self, node: Node, actions: list[io.Action]) -> None:
        for action in actions:
            match action:
                case io.SendDatagram():
                    self._send(node, action)
                case io.Notify():
                    self._note(node, action.event)
                case io.OpenStream():
                    self._open(node, action)
                case io.ReplyStream():
                    self._reply(node, action.stream, action.data)
                case io.CloseStream():
                    self._reply(node, action.stream, None)
        due = node.endpoint.next_deadline()
        if due is not None:
            # A nanosecond late, so that rounding of the offset never makes a timer early.
            at = max(self.now, due - node.clock_offset) + 1e-9
            if node.timer_at is None or at < node.timer_at:
                node.timer_at = at
                self._at_time(at, lambda: self._timer(node, at))

    def _delay(self) -> float:
        late = 0.5 if self.rng.random() < self.reordering else 0.0
        return self.rng.uniform(*self.latency) + late * self.rng.random()

    def _reaches(self, sender: Node, to: Address) -> Node | None:
        target = self._at.get(to)
        if target is None or not target.running or (sender.name, target.name) in self._cut:
            return None
        return target

    def _send(self, node: Node, action: io.SendDatagram) -> None:
        assert len(action.data) <= self.config.datagram_budget
        node.sent_bytes += len(action.data)
        node.sent_datagrams += 1
        target = self._reaches(node, action.to)
        if target is None or self.rng.random() < self.loss:
            self.stats["lost"] += 1
            return
        copies = 2 if self.rng.random() < self.duplication else 1
        self.stats["delivered"] += 1
        self.stats["duplicated"] += copies - 1
        event = io.DatagramReceived(node.address, action.data)
        for _ in range(copies):
            self._at_time(self.now + self._delay(), lambda: self._feed(target, event))

    def _open(self, node: Node, action: io.OpenStream) -> None:
        target = self._at.get(action.to)
        node.sent_bytes += len(action.data)
        if target is None or not target.running:
            failed = io.StreamFailed(action.session, "refused")
            self._at_time(self.now + self._delay(), lambda: self._feed(node, failed))
            return
        if {(node.name, target.name), (target.name, node.name)} & self._cut:
            late = io.StreamFailed(action.session, "timeout")
            self._at_time(self.now + action.timeout_s, lambda: self._feed(node, late))
            return
        self._streams += 1
        self._replies[self._streams] = (node, action.session)
        self.stats["streams"] += 1
        event = io.StreamRequested(self._streams, (node.address[0], 50_000), action.data)
        self._at_time(self.now + 3 * self._delay(), lambda: self._feed(target, event))

    def _reply(self, node: Node, stream: int, data: bytes | None) -> None:
        origin, session = self._replies.pop(stream)
        node.sent_bytes += len(data or b"")
        event: io.Input = io.StreamReplied(session, data) if data else io.StreamFailed(session, "closed")
        self._at_time(self.now + self._delay(), lambda: self._feed(origin, event))

    # --- checkers -----------------------------------------------------------------------------------------------------

    def _note(self, node: Node, event: GossipEvent) -> None:
        node.events.append((self.now, event))
        match event:
            case MemberChanged(view, previous):
                self._check_member(node, event)
                if view.state is MemberState.DEAD:
                    subject = self.nodes.get(view.name)
                    well = subject is not None and subject.running and subject.paused_until <= self.now
                    self.stats["false_deaths" if well else "true_deaths"] += 1
                if previous is None:
                    self.stats["joins_seen"] += 1
            case SlowChanged(name, changes):
                held = node.mirror.setdefault(name, {})
                for key, value in changes:
                    if value is None:
                        held.pop(key, None)
                    else:
                        held[key] = value
            case SlowReset(name):
                node.mirror[name] = {}
                self.stats["resets"] += 1
            case NameConflict():
                self.stats["conflicts"] += 1
        if self.observe is not None:
            self.observe(node, event)

    def _check_member(self, node: Node, event: MemberChanged) -> None:
        view, previous = event.view, event.previous
        stamp, known = (view.incarnation, view.refutations), node.stamps.get(view.name)
        if previous is None:
            known = None
        assert known is None or stamp >= known, f"{node.name}: incarnation of {view.name} fell from {known} to {stamp}"
        if previous in (MemberState.DEAD, MemberState.LEFT) and view.state.is_up:
            assert known is not None and stamp > known, f"{node.name}: {view.name} rose from the dead at {stamp}"
        node.stamps[view.name] = stamp


def quick(**changes: object) -> GossipConfig:
    """A preset for tests of the long-term rules: the dead are forgotten soon."""
    base = GossipConfig.lan(dead_keep_s=20.0, gossip_to_dead_s=5.0, push_pull_interval_s=5.0)
    return replace(base, **changes)  # type: ignore[arg-type]
