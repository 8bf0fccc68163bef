"""Brings what nodes send to those it is for, through the faults of the network: datagrams, and streams of one request.

A datagram may be lost, late or doubled. A stream arrives, ends in time or does not: to a host whose process is gone it
is refused, through a cut it times out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossip import actions as io
from gossip.identity import Address
from gossip.simulator.agenda import Agenda
from gossip.simulator.network import Network
from gossip.simulator.node import SimNode
from gossip.simulator.report import Report

#: The port that a stream seems to come from.
_STREAM_PORT = 50_000


class Delivery:
    """`feed` gives an event to a node. `report` counts what really happened."""

    def __init__(
        self, agenda: Agenda, network: Network, report: Report, feed: Callable[[SimNode, io.Input], None]
    ) -> None:
        self._agenda = agenda
        self._network = network
        self._report = report
        self._feed = feed
        self._at: dict[Address, SimNode] = {}
        #: What the node at work has sent so far, by receiver.
        self._burst: dict[SimNode, list[io.DatagramReceived]] = {}
        #: Who waits for the reply of a stream, with its own number for it.
        self._replies: dict[int, tuple[SimNode, int]] = {}
        self._streams = 0

    def move_in(self, node: SimNode) -> None:
        """From now on the node gets what is sent to its address; who was there before runs no more."""
        if node.address in self._at:
            self._at[node.address].running = False
        self._at[node.address] = node

    # --- datagrams ----------------------------------------------------------------------------------------------------

    def send(self, node: SimNode, action: io.SendDatagram) -> None:
        """Take one datagram; it leaves with `depart`."""
        size = len(action.data)
        if size > node.endpoint.config.datagram_budget:
            raise AssertionError(f"{node.name} sends a datagram of {size} bytes")
        node.bytes_out += size
        node.datagrams_out += 1
        target, network = self._at.get(action.to), self._network
        if target is None or not target.running:
            return
        if not network.passes(node.name, target.name):
            self._report["cut"] += 1
        elif network.loses(node.name, target.name):
            self._report["lost"] += 1
        else:
            self._report["delivered"] += 1
            self._pass_on(target, io.DatagramReceived(node.address, action.data))

    def _pass_on(self, target: SimNode, event: io.DatagramReceived) -> None:
        agenda, network = self._agenda, self._network
        if network.duplicates():
            self._report["duplicated"] += 1
            agenda.at(agenda.now + network.delay(), self._receive, target, (event,))
        if network.reorders():
            agenda.at(agenda.now + network.delay() + network.lateness(), self._receive, target, (event,))
        else:
            self._burst.setdefault(target, []).append(event)

    def depart(self) -> None:
        """What one node sent to another at one moment travels together, and keeps its order (rule 2 of `network`)."""
        if not self._burst:
            return
        for target, events in self._burst.items():
            self._agenda.at(self._agenda.now + self._network.delay(), self._receive, target, events)
        self._burst = {}

    def _receive(self, node: SimNode, events: Sequence[io.DatagramReceived]) -> None:
        for event in events:
            node.bytes_in += len(event.data)
            if node.recording is not None:
                node.recording.append((self._agenda.now, event.source, event.data))
            self._feed(node, event)

    # --- streams ------------------------------------------------------------------------------------------------------

    def open(self, node: SimNode, action: io.OpenStream) -> None:
        """Bring a request to its receiver, or a failure back."""
        agenda, target, network = self._agenda, self._at.get(action.to), self._network
        node.bytes_out += len(action.data)
        if target is None or not target.running:
            failed = io.StreamFailed(action.session, "refused")
            agenda.at(agenda.now + network.delay(), self._feed, node, failed)
            return
        if not (network.passes(node.name, target.name) and network.passes(target.name, node.name)):
            self._report["cut"] += 1
            late = io.StreamFailed(action.session, "timeout")
            agenda.at(agenda.now + action.timeout_s, self._feed, node, late)
            return
        self._streams += 1
        self._replies[self._streams] = (node, action.session)
        self._report["streams"] += 1
        target.bytes_in += len(action.data)
        event = io.StreamRequested(self._streams, (node.address[0], _STREAM_PORT), action.data)
        agenda.at(agenda.now + network.stream_delay(3), self._feed, target, event)
        agenda.at(agenda.now + action.timeout_s, self._give_up, self._streams)

    def reply(self, node: SimNode, stream: int, data: bytes | None) -> None:
        """Bring a reply back; None closes the stream without one."""
        if stream not in self._replies:
            return  # too late: the opener has given up
        origin, session = self._replies.pop(stream)
        node.bytes_out += len(data or b"")
        origin.bytes_in += len(data or b"")
        event: io.Input = io.StreamReplied(session, data) if data else io.StreamFailed(session, "closed")
        self._agenda.at(self._agenda.now + self._network.stream_delay(1), self._feed, origin, event)

    def _give_up(self, stream: int) -> None:
        if stream in self._replies:
            origin, session = self._replies.pop(stream)
            self._feed(origin, io.StreamFailed(session, "timeout"))
