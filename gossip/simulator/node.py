"""One simulated process: an endpoint, its clock, what waits in its socket, what its listener was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip import actions as io
from gossip.endpoint import Endpoint
from gossip.events import GossipEvent
from gossip.identity import Address
from gossip.member import MemberState
from gossip.simulator.clock import Clock

#: What a paused node's socket buffer holds; the rest is lost, as in a kernel.
INBOX = 400


@dataclass(slots=True, eq=False)
class SimNode:
    """One boot of one node. A restart is a new one with the same name."""

    name: str
    #: Unique in the run: a later boot has another.
    serial: int
    endpoint: Endpoint
    address: Address
    clock: Clock
    running: bool = True
    #: In virtual seconds; the process stands still until then.
    paused_until: float = float("-inf")
    #: When the timer that is set will fire, in virtual seconds.
    timer_at: float | None = None
    #: The deadline, on the node's own clock, that `timer_at` was set for.
    deadline: float | None = None
    inbox: list[io.Input] = field(default_factory=list)
    #: With their virtual times; empty unless the simulator records.
    events: list[tuple[float, GossipEvent]] = field(default_factory=list)
    #: Beliefs as rebuilt from the events: who is up, and who of them is suspected.
    up: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)
    #: Every datagram that arrives, as (virtual time, source, bytes), where somebody asked for it.
    recording: list[tuple[float, Address, bytes]] | None = None
    bytes_out: int = 0
    bytes_in: int = 0
    datagrams_out: int = 0

    def believe(self, name: str, state: MemberState) -> None:
        """Follow one event."""
        if state is MemberState.ALIVE:
            self.up.add(name)
            self.suspects.discard(name)
        elif state is MemberState.SUSPECT:
            self.up.add(name)
            self.suspects.add(name)
        else:
            self.up.discard(name)
            self.suspects.discard(name)
